#!/usr/bin/env python3
"""Times the training step on the CPU: `make bench-cpu`.

For two models, in fp32 and bf16, it prints the step's time, each operation's share of it, and how close each operation is
to its ceiling. The ceiling is the larger of two times: its floating-point operations at the rate of a large matrix product,
and its bytes at the rate of a large copy. Both rates are measured in this run. If PyTorch is installed, it runs the same
step. The programs take steps in turn, so that other load on the machine slows both. The ratio is that of their median steps.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

# name: layers, heads, channels, T, V, sequences per step
MODELS = {
    "mini": dict(layers=6, heads=6, channels=384, T=256, V=256, batch=16),
    "gpt2": dict(layers=12, heads=12, channels=768, T=256, V=50257, batch=4),
}
TORCH_HERE = "import torch"
# A pause before each step, so that the other program's threads have stopped spinning for work.
REST_SECONDS = 0.05


class Program:
    """A program that takes steps on request."""

    def __init__(self, name, command, environment=None):
        self.name = name
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        env=os.environ | (environment or {}))
        self.about = self.answer()
        self.steps = []

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"error: {self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def ask(self, command):
        print(command, file=self.process.stdin, flush=True)
        return self.answer()

    def step(self):
        self.steps.append(self.ask("step"))

    def median_ms(self):
        return statistics.median(step["ms"] for step in self.steps)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def can_import_torch(python):
    return subprocess.run([python, "-c", TORCH_HERE], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                          check=False).returncode == 0


def ours(arguments, model, dtype):
    m = MODELS[model]
    return Program("train_gpt", [
        arguments.program, str(arguments.threads), "--model", model, "--seq-len", str(m["T"]), "--dtype", dtype,
        "--global-batch-tokens", str(m["batch"] * m["T"]), "--micro-batch-size", str(arguments.micro_batch or m["batch"])])


def pytorch(arguments, python, model, dtype, compiled):
    m = MODELS[model]
    sizes = [m[key] for key in ("layers", "heads", "channels", "T", "V", "batch")] + [arguments.micro_batch or m["batch"]]
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "torch_step.py")
    name = "PyTorch" + (", compiled" if compiled else "")
    return Program(name, [python, script, *map(str, sizes), dtype, str(arguments.threads)] +
                   (["compile"] if compiled else []), {"OMP_NUM_THREADS": str(arguments.threads)})


def operations(steps):
    """The work of each operation in a step, and the median of its milliseconds over the steps."""
    return {name: dict(work, ms=statistics.median(step["operations"][name]["ms"] for step in steps))
            for name, work in steps[0]["operations"].items()}


def print_breakdown(program, ceilings):
    step_ms = program.median_ms()
    rows = sorted(operations(program.steps).items(), key=lambda row: -row[1]["ms"])
    print(f"    {'operation':36} {'calls':>5} {'ms':>9} {'of step':>8} {'GFLOP/s':>9} {'GB/s':>7} {'of ceiling':>11}")
    for name, work in rows:
        seconds = work["ms"] / 1e3
        least = max(work["flops"] / ceilings["flops"][work["dtype"]], work["bytes"] / ceilings["bytes"])
        print(f"    {name:36} {work['calls']:5} {work['ms']:9.2f} {work['ms'] / step_ms:8.1%} "
              f"{work['flops'] / seconds / 1e9:9.0f} {work['bytes'] / seconds / 1e9:7.1f} {least / seconds:11.0%}")
    # Computed per step: the sum of medians may be more than the median of the sums.
    rest = statistics.median(step["ms"] - sum(work["ms"] for work in step["operations"].values())
                             for step in program.steps)
    print(f"    {'all else':36} {'':5} {rest:9.2f} {rest / step_ms:8.1%}")


def bench(arguments, model, dtype, torches):
    m = MODELS[model]
    print(f"\n== {model}: {m['layers']} layers, {m['heads']} heads, {m['channels']} channels, T {m['T']}, V {m['V']}, "
          f"{m['batch']} sequences a step, {dtype}")
    mine = ours(arguments, model, dtype)
    others = [pytorch(arguments, python, model, dtype, compiled) for python, compiled in torches]
    ceilings = mine.ask("ceilings")
    if mine.about["note"]:
        print(f"   {mine.about['note']}")
    programs = [mine, *others]
    for program in programs:  # the first steps fill caches, compile, and start threads
        for _ in range(arguments.warmup):
            program.ask("step")
    for _ in range(arguments.steps):
        for program in programs:
            time.sleep(REST_SECONDS)
            program.step()
    tokens = mine.about["tokens"]
    for program in programs:
        times = [step["ms"] for step in program.steps]
        what = program.name + (f" {program.about['torch']} ({program.about['blas']})" if program is not mine else "")
        ratio = f"   train_gpt is {program.median_ms() / mine.median_ms():.2f} times as fast" if program is not mine else ""
        print(f"   {what:30} {program.median_ms():9.1f} ms (best {min(times):.1f})  {tokens / program.median_ms() * 1e3:9,.0f} "
              f"tokens/s{ratio}")
    print(f"   ceilings: {ceilings['flops']['fp32'] / 1e9:,.0f} GFLOP/s fp32, {ceilings['flops']['bf16'] / 1e9:,.0f} bf16, "
          f"memory {ceilings['bytes'] / 1e9:.1f} GB/s (more than 100% of a ceiling: operands in cache, or more reads\n   than writes, while a copy reads as much as it writes)")
    print_breakdown(mine, ceilings)
    sys.stdout.flush()
    for program in programs:
        program.end()


def main():
    parser = argparse.ArgumentParser(description="Times the training step on the CPU, and PyTorch's beside it.")
    parser.add_argument("program", help="bench_step, as built")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    cores = int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0)))
    parser.add_argument("--threads", type=int, default=cores, help="threads of each program; default OMP_NUM_THREADS or all cores")
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each program")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--micro-batch", type=int, default=0, help="sequences at once; default all of the step's")
    parser.add_argument("--no-torch", action="store_true", help="without PyTorch")
    arguments = parser.parse_args()

    torches = []
    if not arguments.no_torch:
        if can_import_torch(sys.executable):
            torches.append((sys.executable, False))
        newer = os.environ.get("TORCH_PYTHON")
        if newer:
            if not can_import_torch(newer):
                sys.exit(f"error: TORCH_PYTHON={newer} cannot import torch; give a Python that can")
            torches += [(newer, False), (newer, True)]
        if not torches:
            print("no PyTorch here, so there is no comparison (make deps installs it, or set TORCH_PYTHON=)")
    model_name = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    print(f"{model_name}, {arguments.threads} threads")
    for model in arguments.models:
        for dtype in arguments.dtypes:
            bench(arguments, model, dtype, torches)


if __name__ == "__main__":
    main()
