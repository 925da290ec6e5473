#!/usr/bin/env python3
"""Times the training step at each stage of ZeRO, on 2 and 4 processes: `make bench-zero`.

Prints the memory of a process by the plan, which is what it allocates. Prints the bytes that it sends in a step by the
step's actions, which the tests compare with what Open MPI saw. Prints the step's time, and its ratio to that of stage 0. The
runs take turns, so that other load on the machine slows all of them. A figure is the median over all steps of all turns,
without each run's first few.
"""

import argparse
import os
import sys
import tempfile

from bench_runs import communication_ms, median_ms, run

STAGES = {"0 (NO_SHARD)": [], "1 (optimizer)": ["--zero-stage", 1], "2 (SHARD_GRAD_OP)": ["--zero-stage", 2],
          "3 (FULL_SHARD)": ["--zero-stage", 3], "3, kept after forward": ["--zero-stage", 3, "--reshard-after-forward=false"],
          "3, groups of 2": ["--zero-stage", 3, "--zero-shard-size", 2]}
STATE = ("parameters", "gradients", "master", "moments")


def mebibytes(count):
    return f"{count / 2**20:.1f}"


def main():
    parser = argparse.ArgumentParser(description="Times the training step at each stage of ZeRO.")
    parser.add_argument("program", help="train_gpt, as built")
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--global-batch-tokens", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()

    kinds = [(ranks, stage) for ranks in arguments.processes for stage in STAGES if ranks > 2 or stage != "3, groups of 2"]
    steps, records = {kind: [] for kind in kinds}, {}
    options = ["--model", arguments.model, "--dtype", arguments.dtype, "--global-batch-tokens", arguments.global_batch_tokens,
               "--micro-batch-size", arguments.micro_batch_size]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.turns):
            for ranks, stage in kinds:
                record, timed = run(arguments.program, ranks, arguments.steps, os.path.join(folder, "run"), *options, *STAGES[stage])
                records[ranks, stage] = record
                steps[ranks, stage] += timed

    print(f"\n{arguments.model}, {arguments.dtype}, {arguments.global_batch_tokens} tokens a step in micro-batches of "
          f"{arguments.micro_batch_size} sequences, {len(os.sched_getaffinity(0))} cores shared by the processes; median of "
          f"{arguments.turns * arguments.steps} steps; MiB of a process\n")
    print(f"{'processes':>9}  {'stage':<21} | {'state':>8} {'in all':>8} | {'sent a step':>11} | {'ms a step':>9} {'of stage 0':>10} "
          f"{'waits for others':>20}")
    for ranks, stage in kinds:
        record, timed = records[ranks, stage], steps[ranks, stage]
        state = sum(record["memory"][arena] for arena in STATE)
        whole = median_ms(steps[ranks, "0 (NO_SHARD)"])
        print(f"{ranks:9}  {stage:<21} | {mebibytes(state):>8} {mebibytes(sum(record['memory'].values())):>8} | "
              f"{mebibytes(sum(record['bytes_sent'].values())):>11} | {median_ms(timed):9.1f} {median_ms(timed) / whole:10.2f} "
              f"{communication_ms(timed) / median_ms(timed):20.1%}")


if __name__ == "__main__":
    sys.exit(main())
