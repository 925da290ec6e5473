"""Times a training on the CPU with two builds, for compare_builds.py --time.

The runs are in pairs, one run with each build; the builds take turns in going first. A pair gives the ratio of the median
step times. Other load on the machine then affects both builds, if it lasts longer than a run.
"""

import os
import pathlib
import random
import statistics
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "cpu"))
from bench_runs import WARMUP_STEPS, median_ms, run  # noqa: E402

PAIRS = 40
STEPS = 16
# A step takes 0.2 seconds on one core.
OPTIONS = ["--model", "mini", "--layers", 2, "--global-batch-tokens", 1024, "--micro-batch-size", 2, "--val-every", 0]
# The largest allowed ratio of AFTER's time to BEFORE's.
BOUND = 1.01
RESAMPLES = 10000


def interval_of_mean(values):
    """The 95% interval of the mean, by the bootstrap: means of as many values, drawn from these with replacement."""
    draw = random.Random(1)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[round(0.025 * RESAMPLES)], means[round(0.975 * RESAMPLES) - 1]


def compare(before, after, pairs):
    """Prints the ratio of AFTER's time to BEFORE's; returns whether it may be within the bound."""
    # One thread leaves a core to other load on the machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"load of the machine at the start: {', '.join(f'{load:.2f}' for load in os.getloadavg())} "
          f"on {len(os.sched_getaffinity(0))} cores; {os.environ['OMP_NUM_THREADS']} of them for a run")
    ratios = []
    with tempfile.TemporaryDirectory(prefix="builds-") as folder:
        for pair in range(pairs):
            order = [("before", before), ("after", after)]
            if pair % 2:
                order.reverse()
            times = {name: median_ms(run(program, 1, STEPS, os.path.join(folder, name), *OPTIONS)[1]) for name, program in order}
            ratios.append(times["after"] / times["before"])
            print(f"pair {pair + 1} of {pairs}: {times['before']:.2f} ms, {times['after']:.2f} ms, ratio {ratios[-1]:.4f}", flush=True)

    low, high = interval_of_mean(ratios)
    print(f"{pairs} pairs of {STEPS} steps each, after {WARMUP_STEPS} that are not timed: {' '.join(map(str, OPTIONS))}")
    print(f"AFTER/BEFORE: median {statistics.median(ratios):.4f}, mean {statistics.fmean(ratios):.4f}, "
          f"95% interval of the mean {low:.4f} to {high:.4f}")
    if low > BOUND:
        print(f"AFTER is slower: the whole interval is above {BOUND}")
    elif high <= BOUND:
        print(f"AFTER is not slower: the whole interval is at most {BOUND}")
    else:
        print(f"undecided: {BOUND} is inside the interval; more pairs or a quieter machine would narrow it")
    return low <= BOUND
