#!/usr/bin/env python3
"""Checks and times the trainer on a GPU: started by `gpu_check` of a bundle (dev/gpu/gpu_check.sh).

Each result becomes a line of RESULTS/GPU/gpu.jsonl as soon as it is known. GPU is the GPU's name, so that no report mixes
two. This one file has everything: the results, the machine, and the end of what failed programs printed. After each part,
gpu.md and gpu.json in the same folder are written from it. The exit status is 1 if a check failed, and 2 if none failed but
some had no time left.
"""

import argparse
import json
import math
import os
import pathlib
import re
import sys
import tempfile

import machine
import part_bench
import part_first
import part_kernels
import part_lab
import part_model
import programs
import report
from results import Late, Results, read

MINUTES = 5
TRAINER_SECONDS = 120  # to find out whether there is a GPU
# The most valuable part first.
PARTS = {"first": part_first.run, "kernels": part_kernels.run, "model": part_model.run, "bench": part_bench.run,
         "lab": part_lab.run}


def main():
    parser = argparse.ArgumentParser(prog="gpu_check", description="Checks and times the trainer on this machine's GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("dev/results"), help="folder; default dev/results")
    parser.add_argument("--minutes", type=minutes, default=MINUTES, help="minutes that a part may take")
    parser.add_argument("--tiny", action="store_true", help="run each part for a moment, to test the check itself")
    parser.add_argument("--models", nargs="+", choices=part_bench.MODELS, default=list(part_bench.MODELS), help="models for the part bench (default: all)")
    arguments = parser.parse_args()
    for part in arguments.parts:
        if part not in PARTS:
            parser.error(f"there is no part {part}; there are {', '.join(PARTS)}")

    # The errors and warnings of the launcher about missing libraries.
    if trouble := os.environ.get("BUNDLE_TROUBLE"):
        sys.exit(trouble.rstrip("\n"))
    print(os.environ.get("BUNDLE_WARNINGS", ""), end="", file=sys.stderr)
    # Autotunes anew, without the user's own cache.
    with tempfile.TemporaryDirectory(prefix="gpu-check-cache-") as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        sys.exit(check(arguments))


def minutes(text):
    if not 0 < float(text) < math.inf:
        raise ValueError
    return float(text)


def check(arguments):
    """Runs the parts; returns the exit status."""
    refused = no_gpu()
    if refused:
        sys.exit(f"error: {refused}")
    about = machine.about(programs.BUNDLE)
    results = arguments.results.resolve() / re.sub("[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    try:
        results.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        sys.exit(f"error: --results: cannot make the folder {results}: {fault.strerror}")
    lines = results / "gpu.jsonl"
    failed = left = 0
    for part in arguments.parts or PARTS:
        found = Results(lines, part, arguments.minutes, about["commit"])
        programs.Clock.end = found.end
        found.add("machine", "measured", about["gpu"], **about)
        options = {"models": arguments.models} if part == "bench" else {}
        PARTS[part](found, arguments.tiny, **options)
        failed += found.failed
        left += found.left()
        (results / "gpu.json").write_text(json.dumps(report.summary(read(lines)), indent=1) + "\n")
        (results / "gpu.md").write_text(report.markdown(read(lines)))
    more = f", {left} lacked the time: run it again, and they come first" if left else ""
    print(f"{results}/gpu.md; {failed} failed{more}")
    print(f"to send back: {lines}")
    return 1 if failed else 2 if left else 0


def no_gpu():
    """Why nothing can be checked here; empty if there is a GPU, or if the trainer crashes: other programs may not."""
    try:
        asked = programs.run([programs.TRAIN_GPT, "--device=cuda", "--steps=0"], TRAINER_SECONDS)
    except Late as late:
        return f"{late}; does nvidia-smi answer?"
    return programs.tail(asked.stderr, 1).removeprefix("error: ") if asked.returncode == 1 else ""


if __name__ == "__main__":
    main()
