"""Runs of the trainer on several processes, for bench_mpi.py, bench_zero.py and bench_pipeline.py."""

import json
import pathlib
import shutil
import statistics
import subprocess
import sys

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "scripts/launch.sh"
# The first steps start threads, create oneDNN's primitives and touch memory for the first time.
WARMUP_STEPS = 3


def run(program, ranks, steps, folder, *options):
    """Runs the trainer; returns the record of the run and the metrics of its timed steps."""
    command = [LAUNCH, "-np", ranks, "--bind-to", "none", program, "--device", "cpu", "--steps", WARMUP_STEPS + steps, "--sample-tokens", 0, "--val-batches", 1,
               "--out-dir", folder, *options]
    shutil.rmtree(folder, ignore_errors=True)  # an earlier measurement
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(result.stderr.strip() or f"error: {program} ended with status {result.returncode}")
    lines = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return lines[0]["run"], lines[1 + WARMUP_STEPS:]


def median_ms(steps):
    return statistics.median(step["step_ms"] for step in steps)


def communication_ms(steps):
    return statistics.median(step["phase_ms"]["communication"] for step in steps)
