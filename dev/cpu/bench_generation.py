#!/usr/bin/env python3
"""Times generation on the CPU: the second part of `make bench-cpu`.

The model has the sizes of SmolLM2-135M, and random weights. A token takes at least the time in which memory delivers all
weights once; the rate of reading is measured in this run. If the interpreter LLAMA_PYTHON has PyPI's xllamacpp, llama.cpp
generates beside it with the same weights. The programs take turns, so that other load on the machine slows both. The ratio
is that of their median times.
"""

import argparse
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import random_llama
from bench_cpu import Program

HERE = pathlib.Path(__file__).resolve().parent
PROMPT = [str(token) for token in range(1, 9)]
CONTEXT = 512
# A pause before each turn, so that the other program's threads have stopped spinning for work.
REST_SECONDS = 0.5


class Ours:
    """train_gpt: a step is a process that generates."""

    def __init__(self, arguments, folder, dtype, threads):
        self.command = [arguments.program, "--generate", "--init", folder, "--device", "cpu", "--dtype", dtype, "--temperature", "0",
                        "--seq-len", str(CONTEXT), "--sample-tokens", str(arguments.tokens), "--prompt", " ".join(PROMPT)]
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.steps = []

    def step(self):
        result = subprocess.run(self.command, env=self.environment, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.exit(result.stderr.strip())
        self.steps.append({"ms": 1e3 / float(re.search(r"then ([\d.]+) tokens/s", result.stderr)[1])})

    def end(self):
        pass


def python_with_llama():
    """The interpreter that has xllamacpp, or None."""
    python = os.environ.get("LLAMA_PYTHON")
    if not python:
        print("LLAMA_PYTHON= names no Python with xllamacpp, so there is no comparison with llama.cpp")
    elif subprocess.run([python, "-c", "import xllamacpp"], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        sys.exit(f"error: LLAMA_PYTHON={python} cannot import xllamacpp; give a Python that can")
    return python


def read_rate(arguments, threads):
    """Bytes per second."""
    bench = Program("bench_step", [arguments.bench_step, str(threads), "--model", "tiny"])
    rate = bench.ask("reads")["bytes"]
    bench.end()
    return rate


def bench(arguments, python, folder, weight_bytes, dtype, threads):
    programs = {"train_gpt": Ours(arguments, folder, dtype, threads)}
    if python:
        programs["llama.cpp"] = Program("llama.cpp", [
            python, str(HERE / "llama_tokens.py"), f"{folder}/{dtype}.gguf", str(threads), str(CONTEXT), str(arguments.tokens), *PROMPT])
    for _ in range(arguments.turns):
        for program in programs.values():
            time.sleep(REST_SECONDS)
            program.step()
    least = 1e3 * weight_bytes / read_rate(arguments, threads)
    medians = {}
    for name, program in programs.items():
        program.end()
        times = [step["ms"] for step in program.steps]
        medians[name] = statistics.median(times)
        print(f"   {dtype} {threads:7} {name:10} {medians[name]:9.2f} {min(times):7.2f} {1e3 / medians[name]:9.1f} {least:12.2f}", end="")
        print(f"   {medians['train_gpt'] / medians[name]:.2f} times llama.cpp's time" if name == "llama.cpp" else "", flush=True)


def main():
    parser = argparse.ArgumentParser(description="Times generation on the CPU, and llama.cpp's beside it.")
    parser.add_argument("program", help="train_gpt, as built")
    parser.add_argument("bench_step", help="bench_step, as built")
    parser.add_argument("--dtypes", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, len(os.sched_getaffinity(0))}))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=65, help="tokens of a turn; the first is not timed")
    parser.add_argument("--turns", type=int, default=5, help="turns of each program")
    arguments = parser.parse_args()

    python = python_with_llama()
    with tempfile.TemporaryDirectory() as folder:
        sizes = random_llama.config(arguments.layers)
        weights = random_llama.write(pathlib.Path(folder), sizes, arguments.dtypes if python else [])
        print(f"\n== generation: a Llama of {arguments.layers} layers, {sizes['hidden_size']} channels, V {sizes['vocab_size']:,}, "
              f"{weights:,} weights; {arguments.tokens} tokens after {len(PROMPT)}\n"
              f"   dtype threads program       ms/token    best  tokens/s  read weights")
        for dtype in arguments.dtypes:
            for threads in arguments.threads:
                bench(arguments, python, folder, weights * {"fp32": 4, "bf16": 2}[dtype], dtype, threads)


if __name__ == "__main__":
    main()
