"""The part `bench` of the check: training steps of GPT-2's sizes at T = 1024, compared with the same step in PyTorch. It
also compares the kernels of llmc/ with cuBLASLt and cuDNN.

Each turn is a process that takes its steps and ends, since two would not fit into the GPU's memory. The programs' turns
alternate, so that changes of the GPU's clocks affect both. Both write a line per step; the time between lines counts.
"""

import json
import pathlib
import random
import re
import statistics
import sys
import tempfile
import threading

import kernel_times
import machine
import programs
from results import TIME_OVER, CheckFailed, Late, Skipped, read

V = 50304
# layers, heads, channels, sequences at once (the first that fits); the most valuable model first
MODELS = {
    "124M": (12, 12, 768, [64, 32]),
    "1558M": (48, 25, 1600, [16, 12, 8, 4]),
    "350M": (24, 16, 1024, [32, 16]),
    "774M": (36, 20, 1280, [16, 8]),
}
PEAK = 989e12  # dense bf16 of an H100 or H200, by datasheet
SECONDS = {"124M": 15, "1558M": 25, "350M": 20, "774M": 25}  # approximate time of a turn; PyTorch's first one also compiles
COMPILING = 45
BESIDE = "the kernels compared with cuBLASLt and cuDNN"
KERNEL_SECONDS = 120


class Extent:
    def __init__(self, tiny):
        self.T, self.V, self.warmup, self.timed, self.profiled = (8, 32, 1, 2, 1) if tiny else (1024, V, 8, 30, 6)
        self.device = "cpu" if tiny else "cuda"  # PyTorch's name of the device
        self.models = {"tiny": (1, 1, 16, [4, 2])} if tiny else MODELS
        self.turns = 2


def parameters(layers, channels, T, vocabulary):
    return (vocabulary + T) * channels + layers * (12 * channels**2 + 13 * channels) + 2 * channels


def flops_a_token(layers, channels, T, vocabulary):
    """FLOPs per token of a training step: 6 for each parameter, and attention's, of which causality leaves half."""
    return 6 * parameters(layers, channels, T, vocabulary) + 6 * layers * channels * T


def run(results, tiny, models):
    extent = Extent(tiny)
    results.attempt("the GPU's own rates", rates, results, tiny)
    names = left_first(results, extent.models if tiny else models)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = pathlib.Path(name)
        write_tokens(folder / "train.bin", extent.V)
        for model in names:
            Contest(results, extent, folder, model).run()
            if model == names[0] and not any(line["name"] == BESIDE and line["status"] == "passed" for line in read(results.path)):
                results.attempt(BESIDE, kernels, results, tiny, seconds=60)


def left_first(results, models):
    """Sorts the models: first those that were not measured completely at this commit, so that a new run continues there."""

    def measured(model):
        lines = [line for line in read(results.path) if line["part"] == results.part and line["name"].startswith(f"{model}, ")]
        return any(line["name"] == outside(model) for line in lines) and not any(
            line["status"] == "skipped" and line["detail"].startswith(TIME_OVER) for line in lines)

    return sorted(models, key=measured)


def outside(model):
    return f"{model}, time outside kernels, train_gpt"


def write_tokens(path, vocabulary):
    draw = random.Random(1)
    programs.program.write_token_file(path, [draw.randrange(vocabulary) for _ in range(1 << 20)])


def rates(results, tiny):
    if tiny:
        raise Skipped("nothing is timed on the CPU")
    done = programs.run([programs.KERNELS, "--rates"], 60)
    if done.returncode:
        raise CheckFailed(programs.tail(done.stderr))
    found = json.loads(done.stdout)
    return found | {"detail": f"a copy {found['copy_bytes_a_second'] / 1e9:.0f} GB/s, a large bf16 product "
                              f"{found['product_flops_a_second'] / 1e12:.0f} TFLOP/s", "clocks": machine.clocks()}


def kernels(results, tiny):
    """Adds each timing as a line of its own, as soon as it is measured."""
    if tiny:
        raise Skipped("nothing is timed on the CPU")
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "timings.jsonl")
        program = programs.TimedSteps([programs.KERNELS, "--time-best", file], KERNEL_SECONDS, file)
        count = 0
        while line := program.next_line():
            timing = json.loads(line)
            if "missing" in timing:  # a library
                results.add(f"kernel {timing['operation']} {timing['shape']}, {timing['variant']}", "skipped", timing["missing"])
                continue
            results.add(f"kernel {timing['operation']} {timing['shape']}, {timing['variant']}", "measured",
                        f"{timing['microseconds']:.0f} us, {timing['share']:.0%} of the ceiling", timing=timing)
            count += 1
        program.end()
    if program.late:
        raise Late(f"ended after {count} timings")
    if program.process.returncode:
        raise CheckFailed(f"after {count} timings: status {program.process.returncode}; {programs.tail(program.said['stderr'])}")
    return {"detail": f"{count} timings"}


def lacks_memory(said):
    """Whether the trainer ran out of memory: by its plan, for an arena, or in a CUDA call."""
    return bool(re.search(r"need .* of memory .*, but the GPU has|needs .* of the GPU's memory|out of memory", said))


def take_timed(program, extent):
    """The lines of the warmup steps and of the timed steps, and the GPU's clocks during the timed ones."""
    taken = program.take(extent.warmup)
    clocks = {}
    thread = threading.Thread(target=lambda: clocks.update(machine.clocks()))
    thread.start()
    taken += program.take(extent.timed)
    thread.join()
    return taken, clocks


class Contest:
    """The turns of one model."""

    def __init__(self, results, extent, folder, model):
        self.results, self.extent, self.folder, self.model = results, extent, folder, model
        self.layers, self.heads, self.channels, self.batches = extent.models[model]
        self.batch = None  # set by the first turn
        self.rates = {}  # {attention: tokens/s of its last turn}

    def run(self):
        seconds = SECONDS.get(self.model, 0)
        for turn in range(self.extent.turns):
            for attention in ("flash", "cudnn") if turn == 0 else list(self.rates):
                self.turn(f"train_gpt, {attention} attention", turn, seconds, self.train_gpt, attention)
            self.turn("PyTorch", turn, seconds + (COMPILING if turn == 0 else 0), self.pytorch)
        self.results.attempt(outside(self.model), self.profile, seconds=seconds)

    def turn(self, name, turn, seconds, take, *arguments):
        self.results.attempt(f"{self.model}, turn {turn + 1}, {name}", self.timed, name, take, arguments, seconds=seconds)

    def timed(self, name, take, arguments):
        before = machine.clocks()
        steps, batch, more = take(*arguments)
        # The time of the last warmup step is the start of the first timed step.
        moments = [moment for moment, _ in steps[self.extent.warmup - 1:]]
        losses = [json.loads(line)["loss"] for _, line in steps]
        times = [b - a for a, b in zip(moments, moments[1:])]
        tokens = batch * self.extent.T
        rate = tokens * len(times) / sum(times)
        flops = flops_a_token(self.layers, self.channels, self.extent.T, self.extent.V) * rate
        if "attention" in more:
            self.rates[more["attention"]] = rate
        return {"detail": f"{rate:,.0f} tokens/s, {flops / PEAK:.1%} of 989 TFLOP/s, {1e3 * statistics.median(times):.1f} ms a step "
                          f"of {batch} x {self.extent.T}; loss {losses[-1]:.3f}",
                "model": self.model, "program": name, "tokens_a_second": rate, "flops_a_second": flops, "batch": batch,
                "step_ms": 1e3 * statistics.median(times), "loss": losses[-1], "clocks": before, **more}

    def out_dir(self, attention):
        return self.folder / f"{self.model}-{attention}"

    def options(self, batch):
        e = self.extent
        sizes = {"layers": self.layers, "heads": self.heads, "channels": self.channels, "seq-len": e.T, "vocab-size": e.V}
        return ["--device=cuda", "--dtype=bf16", f"--train-data={self.folder}/train.bin", "--steps=1000000", "--val-every=0",
                f"--global-batch-tokens={batch * e.T}", f"--micro-batch-size={batch}", "--sample-tokens=0",
                "--lr=1e-4", *(f"--{name}={size}" for name, size in sizes.items())]

    def train_gpt(self, attention, **environment):
        """The steps of a turn, the batch, and the trainer's own figures about its time."""
        batches = [self.batch] if self.batch else self.batches
        for batch in batches:
            # Uses the algorithms that the first turn chose.
            metrics = self.out_dir(attention) / "metrics.jsonl"
            metrics.unlink(missing_ok=True)
            command = [programs.TRAIN_GPT, *self.options(batch), f"--attention={attention}", f"--out-dir={metrics.parent}", "--overwrite"]
            program = programs.TimedSteps(command, 180, metrics, **environment)
            try:
                program.take(1)  # the line that describes the run
                taken, clocks = take_timed(program, self.extent)
                break
            except CheckFailed as refused:
                if "--attention cudnn" in str(refused):
                    raise Skipped(str(refused)) from refused
                if batch == batches[-1] or not lacks_memory(str(refused)):
                    raise
            finally:
                program.end()
        self.batch = batch
        lines = [json.loads(line) for _, line in taken[self.extent.warmup:]]
        # The share of a step's time before its first and after its last operation. GPU events measure the phases between.
        beside = [1 - sum(line["phase_ms"].values()) / line["step_ms"] for line in lines]
        return taken, batch, {"attention": attention, "clocks_while": clocks, "between_steps": statistics.median(beside) if beside else None}

    def pytorch(self):
        if not self.batch:
            raise Skipped("no turn of the trainer said which batch fits")
        e = self.extent
        trouble = None
        for micro_batch in (self.batch, max(1, self.batch // 2)):
            script = programs.BUNDLE / "dev/gpu/torch_step.py"
            command = [sys.executable, script, self.layers, self.heads, self.channels, e.T, e.V, self.batch, micro_batch,
                       e.device, e.profiled]
            program = programs.TimedSteps(command, 240, LD_LIBRARY_PATH=programs.own_library_path())
            try:
                about = json.loads(program.take(1)[0][1])
                taken, clocks = take_timed(program, e)
                profile = json.loads(program.ask("profile")) if e.device == "cuda" else {}
                return taken, self.batch, {"micro_batch": micro_batch, "clocks_while": clocks, **about, **profile}
            except CheckFailed as failed:
                trouble = failed
                if "No module named 'torch'" in str(failed):
                    raise Skipped("python3 has no PyTorch here") from failed
                if "out of memory" not in str(failed):
                    raise
            finally:
                program.end()
        raise trouble

    def profile(self):
        """Runs a turn under CUDA's profiler, with the faster attention."""
        if self.extent.device == "cpu" or not programs.PROFILER.exists():
            raise Skipped("there is no profiler here")
        found = self.folder / "kernel-times.txt"
        found.unlink(missing_ok=True)
        if not self.rates:
            raise Skipped("no turn succeeded")
        steps, _, _ = self.train_gpt(max(self.rates, key=self.rates.get), CUDA_INJECTION64_PATH=str(programs.PROFILER),
                       KERNEL_TIMES=str(found))
        if not found.exists() or not found.stat().st_size:
            raise Skipped("CUPTI refused, or libcupti.so.13 is not here")
        # Most of the timed steps, and nothing before them.
        seconds = 0.8 * (steps[-1][0] - steps[self.extent.warmup][0])
        share = kernel_times.outside(kernel_times.read(found), 1e9 * seconds)
        return {"detail": f"{share:.2%} of the last {seconds:.1f} s of steps", "model": self.model, "outside_kernels": share}
