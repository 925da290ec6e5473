#!/usr/bin/env python3
"""Times the passes of pipelines on 2 and 4 stages, and compares them with the simulation: `make bench-pipeline`.

Each process has one thread, so that stages share no cores where there are as many. Prints the step's time, and what it is by
the simulation: that of its passes, and the norm and the update behind them as the first stage measured them; the ratio of
both, which is to be within 5% of 1. Then what it is made of: the time of its passes, from the begin of the first to the end of the last, as `--pipeline-timeline` measured it; what the schedule's
simulation says with the median times of forward passes, backward passes and sending; the ratio of both; the ratio with each pass's own time, which shows what is lost between passes, however uneven they were; and
the share of time in which stages wait. The runs take turns, so that whatever else the machine does slows
all of them; a figure is the median over the turns, each of which gives that of its last steps. On a machine that does something
else a stage that is held up holds up the others, which no median of its passes shows: figures mean something on a quiet one.
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
# Those that a run keeps of its last ones (llmc/train/pipeline_watch.cpp).
STEPS = 8


def passes_of(folder, name):
    """Of a timeline: milliseconds from its begin to its end, the share of idle time, and its title."""
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
                record, timed = run(arguments.program, stages, STEPS, place, *options, "--pipeline-parallel", stages,
                                    "--pipeline-schedule", schedule, *SCHEDULES[schedule])
                micro_batches = record["micro_batches"]
                steps[stages, schedule] += timed
                measured[stages, schedule].append(passes_of(place, "pipeline-measured"))
                simulated[stages, schedule].append(passes_of(place, "pipeline-simulated"))

    print(f"\n{arguments.model}, {arguments.layers} layers, {arguments.dtype}, {micro_batches} micro-batches of {arguments.micro_batch_size} "
          f"sequences, a thread a stage on {len(os.sched_getaffinity(0))} cores; median of {arguments.turns} runs, of the last {STEPS} "
          "steps of each\n")
    print(f"{'':>6}  {'':<11} | {'ms a step':^26} | {'ms of its passes':^21} | {'simulated/measured':^18} | {'stages wait':^21}")
    print(f"{'stages':>6}  {'schedule':<11} | {'measured':>8} {'simulated':>10} {'ratio':>6} | {'measured':>10} {'simulated':>10} | {'medians':>8} {'own times':>9} | "
          f"{'measured':>10} {'simulated':>10}")
    for kind in kinds:
        def median(runs, which):
            return statistics.median(figures[which] for figures in runs[kind])
        ratio = statistics.median(b[0] / a[0] for a, b in zip(measured[kind], simulated[kind]))
        step = median_ms(steps[kind])
        expected = median(simulated, 0) + statistics.median(metrics["phase_ms"]["norm"] + metrics["phase_ms"]["update"] for metrics in steps[kind])
        own = statistics.median(float(re.search(r"(\S+) with each pass's own$", title).group(1)) for _, _, title in simulated[kind])
        print(f"{kind[0]:>6}  {kind[1]:<11} | {step:8.1f} {expected:10.1f} {expected / step:6.3f} | {median(measured, 0):10.1f} {median(simulated, 0):10.1f} | "
              f"{ratio:8.3f} {own:9.3f} | {median(measured, 1):10.1%} {median(simulated, 1):10.1%}")


if __name__ == "__main__":
    sys.exit(main())
