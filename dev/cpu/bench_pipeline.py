#!/usr/bin/env python3
"""Times the passes of pipelines on 2 and 4 stages, and compares them with the simulation: `make bench-pipeline`.

Each process has one thread, so that stages share no cores if there are enough of them.

Prints the step's measured and simulated time, their ratio, and whether it meets the goal: within 5% of 1. The simulated
time is that of the passes, plus the norm and the update after them as the first stage measured them. The simulation goes
step by step, with the mean times of that step's forward passes, backward passes and transfers. The result is the median
over steps. It uses means because these keep the sum of the passes. If a whole step is slow, it is slow in both
times.

Then prints details. The measured time of the passes goes from the start of the first to the end of the last, as
`--pipeline-timeline` measured it. The simulated time uses the median times of the passes of all steps. Three ratios of
simulated to measured time follow. The simulation uses median times of passes, then each step's mean times, then each pass's
own time. The last ratio shows only the time lost between passes. Then comes the share of time in which stages wait.

The runs take turns, so that other load on the machine slows all of them. A figure is the median over the turns; each turn
gives that of its last steps. Figures are useful only on a quiet machine: on a busy one, a delayed stage delays the others,
which no mean of its passes shows.
"""

import argparse
import json
import os
import pathlib
import re
import statistics
import sys
import tempfile

from bench_runs import median_ms, run

SCHEDULES = {"naive": [], "gpipe": [], "1f1b": [], "interleaved": ["--virtual-stages", 2], "zb-h1": []}
# A run keeps the timelines of its last steps, as many as these (llmc/timeline/pipeline_watch.cpp).
STEPS = 8
# The largest relative difference of the simulated step from the measured one.
GOAL = 0.05
# The shares of the measured time, in the title of a simulation (llmc/train/pipeline_report.cpp).
SHARES = re.compile(r"(\S+) with each step's mean times; (\S+) with each pass's own time$")


def passes_of(folder, name):
    """Three figures of a timeline: milliseconds from its start to its end, the share of idle time, and its title."""
    trace = json.loads((pathlib.Path(folder) / f"{name}.json").read_text())
    passes = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    begin = min(event["ts"] for event in passes)
    return (max(event["ts"] + event["dur"] for event in passes) - begin) / 1e3, trace["otherData"]["bubble_idle_over_total"], trace["otherData"]["title"]


def main():
    parser = argparse.ArgumentParser(description="Times pipelines, and compares them with their simulation.")
    parser.add_argument("program", help="train_gpt, as built")
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--model", default="mini")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--global-batch-tokens", type=int, default=4096)
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    arguments = parser.parse_args()

    os.environ["OMP_NUM_THREADS"] = "1"
    kinds = [(stages, schedule) for stages in arguments.stages for schedule in arguments.schedules]
    steps, measured, simulated = ({kind: [] for kind in kinds} for _ in range(3))
    options = ["--model", arguments.model, "--layers", arguments.layers, "--dtype", arguments.dtype, "--global-batch-tokens",
               arguments.global_batch_tokens, "--micro-batch-size", arguments.micro_batch_size, "--pipeline-timeline"]
    micro_batches = 0
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns):
            for stages, schedule in kinds:
                place = os.path.join(folder, f"{turn}-{stages}-{schedule}")
                print(f"turn {turn + 1} of {arguments.turns}: {stages} stages, {schedule}", file=sys.stderr)
                record, timed = run(arguments.program, stages, STEPS, place, *options, "--pipeline-parallel", stages,
                                    "--pipeline-schedule", schedule, *SCHEDULES[schedule])
                micro_batches = record["micro_batches"]
                steps[stages, schedule].append(timed)
                measured[stages, schedule].append(passes_of(place, "pipeline-measured"))
                simulated[stages, schedule].append(passes_of(place, "pipeline-simulated"))

    print(f"\n{arguments.model}, {arguments.layers} layers, {arguments.dtype}, {micro_batches} micro-batches of {arguments.micro_batch_size} "
          f"sequences, a thread a stage on {len(os.sched_getaffinity(0))} cores; median of {arguments.turns} runs, of the last {STEPS} "
          "steps of each\n")
    print(f"{'':>6}  {'':<11} | {'ms a step':^37} | {'ms of its passes':^21} | {'simulated/measured':^26} | {'stages wait':^21}")
    print(f"{'stages':>6}  {'schedule':<11} | {'measured':>8} {'simulated':>10} {'ratio':>6} {'goal 5%':>10} | {'measured':>10} {'simulated':>10} | "
          f"{'medians':>8} {'means':>7} {'own times':>9} | {'measured':>10} {'simulated':>10}")
    for kind in kinds:
        # One value per turn.
        step = [median_ms(timed) for timed in steps[kind]]
        after_passes = [statistics.median(metrics["phase_ms"]["norm"] + metrics["phase_ms"]["update"] for metrics in timed) for timed in steps[kind]]
        passes, by_medians = ([figures[0] for figures in runs[kind]] for runs in (measured, simulated))
        means, own = zip(*(map(float, SHARES.search(title).groups()) for _, _, title in simulated[kind]))
        expected = [share * time + more for share, time, more in zip(means, passes, after_passes)]
        ratio = statistics.median(a / b for a, b in zip(expected, step))
        waits, would = (statistics.median(figures[1] for figures in runs[kind]) for runs in (measured, simulated))
        print(f"{kind[0]:>6}  {kind[1]:<11} | {statistics.median(step):8.1f} {statistics.median(expected):10.1f} {ratio:6.3f} "
              f"{'met' if abs(ratio - 1) <= GOAL else 'missed':>10} | {statistics.median(passes):10.1f} {statistics.median(by_medians):10.1f} | "
              f"{statistics.median(a / b for a, b in zip(by_medians, passes)):8.3f} {statistics.median(means):7.3f} {statistics.median(own):9.3f} | "
              f"{waits:10.1%} {would:10.1%}")


if __name__ == "__main__":
    sys.exit(main())
