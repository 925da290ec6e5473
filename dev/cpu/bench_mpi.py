#!/usr/bin/env python3
"""Times the training step on 1, 2 and 4 processes with the same global batch: `make bench-mpi`.

Prints the step's time, the share of it in which computing waited for communication, and the time that overlapping the
reduction of gradients with the backward pass saves. The runs take turns, so that other load on the machine slows all of
them. A figure is the median over all steps of all turns, without each run's first few.
"""

import argparse
import os
import tempfile

from bench_runs import communication_ms, median_ms, run


def main():
    parser = argparse.ArgumentParser(description="Times the training step on several processes.")
    parser.add_argument("program", help="train_gpt, as built")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--model", default="mini")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--global-batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()

    kinds = [(ranks, overlap) for ranks in arguments.processes for overlap in ([True, False] if ranks > 1 else [True])]
    steps = {kind: [] for kind in kinds}
    options = ["--model", arguments.model, "--dtype", arguments.dtype, "--global-batch-tokens", arguments.global_batch_tokens]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.turns):
            for kind in kinds:
                ranks, overlap = kind
                steps[kind] += run(arguments.program, ranks, arguments.steps, os.path.join(folder, "run"), *options,
                                   f"--overlap-grad-reduce={'true' if overlap else 'false'}")[1]

    print(f"\n{arguments.model}, {arguments.dtype}, {arguments.global_batch_tokens} tokens a step, "
          f"{len(os.sched_getaffinity(0))} cores shared by the processes; median of "
          f"{arguments.turns * arguments.steps} steps\n")
    print(f"{'':10} | {'overlapped with the backward pass':^32} | {'not overlapped':^32} |")
    print(f"{'processes':>10} | {'ms a step':>10} {'waits for others':>21} | {'ms a step':>10} "
          f"{'communication':>21} | {'overlap saves':>13}")
    for ranks in arguments.processes:
        overlapped = steps[ranks, True]
        waiting = f"{communication_ms(overlapped):.1f} ms {communication_ms(overlapped) / median_ms(overlapped):6.1%}"
        line = f"{ranks:10} | {median_ms(overlapped):10.1f} {waiting:>21} | "
        if ranks > 1:
            not_overlapped = steps[ranks, False]
            whole_communication = f"{communication_ms(not_overlapped):.1f} ms {communication_ms(not_overlapped) / median_ms(not_overlapped):6.1%}"
            line += (f"{median_ms(not_overlapped):10.1f} {whole_communication:>21} | "
                     f"{median_ms(not_overlapped) - median_ms(overlapped):7.1f} ms {1 - median_ms(overlapped) / median_ms(not_overlapped):6.1%}")
        else:
            line += f"{'':32} |"
        print(line)


if __name__ == "__main__":
    main()
