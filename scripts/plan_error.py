#!/usr/bin/env python3
"""How far the planner's times are from published steps (docs/published_steps.tsv), as Markdown.

    scripts/plan_error.py         # the tables of docs/planner.md
    scripts/plan_error.py --fit   # the tables of llmc/planner/published_times.cpp that these steps ask for

The fit moves the factors of that file's table, one for each part of a step, generation and format, towards the measured
times: a Gauss-Newton step in the logarithms, since a step's time is about the sum of its parts. Where few steps say
anything, a factor stays near that of its format and generation, and those near that of all. Rebuild and repeat until it
changes nothing.
"""

import collections
import concurrent.futures
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys

import interpreter

if __name__ == "__main__":
    interpreter.need("numpy")

import numpy as np  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS, TABLE = ROOT / "docs/published_steps.tsv", ROOT / "llmc/planner/published_times.cpp"
FACTORS = ["products", "attention", "other_operations", "tensor_exchanges", "update"]
GENERATIONS = {"A": "ampere", "H": "hopper", "B": "blackwell", "G": "blackwell"}
# No option describes it: a gather for each tensor, nothing hidden.
NOT_FITTED = "SC21 table 2 ZeRO-3"


class Step:
    def __init__(self, line):
        self.source, self.name, seconds, gib, self.options = line.split("\t")[:5]
        self.seconds, self.gib = float(seconds), float(gib) if gib else None

    def plan(self):
        command = [ROOT / "train_gpt", "plan", "--json", *shlex.split(self.options)]
        result = subprocess.run(command, capture_output=True, text=True)
        if not result.stdout.startswith("{"):
            sys.exit(f"error: {self.name}: {result.stderr.strip()}")
        plan = json.loads(result.stdout)
        self.time, self.memory = plan["time"], plan["memory"]
        self.ratio = self.seconds / self.time["expected_seconds"]
        self.error = abs(1 / self.ratio - 1)
        self.generation = GENERATIONS[re.search(r"--gpu (.)", self.options)[1]]
        self.is_fp8 = "te-fp8" in self.options
        self.is_data_parallel = plan["mesh"]["tensor"] == plan["mesh"]["pipeline"] == 1


def planned_steps():
    steps = [Step(line) for line in STEPS.read_text().splitlines() if not line.startswith("#")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(Step.plan, steps))
    return steps


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def seconds_text(seconds):
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def print_errors(steps):
    sources = collections.defaultdict(list)
    for step in steps:
        sources[step.source].append(step)
    print("| source | steps | expected / measured | mean error | largest | in the range |\n|---|---|---|---|---|---|")
    for name, group in sources.items():
        share = math.exp(mean(-math.log(step.ratio) for step in group))
        inside = sum(step.time["low_seconds"] <= step.seconds <= step.time["high_seconds"] for step in group)
        print(f"| {name} | {len(group)} | {share:.2f} | {mean(step.error for step in group):.1%} "
              f"| {max(step.error for step in group):.0%} | {inside} |")
    fitted = [step for step in steps if step.source != NOT_FITTED]
    inside = sum(step.time["low_seconds"] <= step.seconds <= step.time["high_seconds"] for step in steps)
    width = np.median([step.time["high_seconds"] / step.time["low_seconds"] for step in steps])
    by_source = mean(mean(step.error for step in group) for name, group in sources.items() if name != NOT_FITTED)
    print(f"\nMean error {mean(step.error for step in fitted):.1%}, mean of the sources' means {by_source:.1%}, both without {NOT_FITTED}.\n"
          f"The range holds {inside / len(steps):.0%} of the steps; in the median, its end is {width:.2f} times its beginning.")
    print("\n| step | measured | at least | expected | measured GiB | planned |\n|---|---|---|---|---|---|")
    for step in steps:
        if step.gib:
            print(f"| {step.source}: {step.name} | {seconds_text(step.seconds)} | {seconds_text(step.time['bound_seconds'])} "
                  f"| {seconds_text(step.time['expected_seconds'])} | {step.gib} | {step.memory['bytes'] / 2**30:.2f} |")


class Fit:
    """The logarithms of the factors are sums of effects: of all steps, of a generation, of a format, and of both."""

    # How much an effect costs, in squared errors; found by trying them on unseen steps, as OUTLIER.
    PULL = {"all": 0.2, "generation": 0.05, "format": 0.4, "both": 0.4}
    START = {"products": 1.2, "other_operations": 2, "update": 1.35}     # of all steps
    LEAST = 0.9    # of products: 0.8 of the peak in 8 bits, 0.9 in 16
    OUTLIER = 0.15  # an error from which on it counts as its size, not as its square

    def __init__(self, steps):
        self.steps = [step for step in steps if step.source != NOT_FITTED]
        lines = re.findall(r"Software\{Generation::(\w+), (true|false), ([^}]*)\}", TABLE.read_text())
        self.classes = [(generation, is_fp8 == "true") for generation, is_fp8, _ in lines]
        self.now = np.log([[float(x) for x in values.split(",")] for _, _, values in lines])
        effects = [("all",), *(("generation", of) for of in dict.fromkeys(generation for generation, _ in self.classes)),
                   ("format", False), ("format", True), *(("both", of) for of in self.classes)]
        self.pull = np.array([self.PULL[effect[0]] for effect in effects] * len(FACTORS))
        self.start = np.concatenate([[math.log(self.START.get(factor, 1)), *[0] * (len(effects) - 1)] for factor in FACTORS])
        has = np.array([[effect[0] == "all" or effect[1] in (generation, is_fp8, (generation, is_fp8)) for effect in effects]
                        for generation, is_fp8 in self.classes], float)
        # (classes, factors, effects of all factors)
        self.effects = np.einsum("ce,fg->cfge", has, np.eye(len(FACTORS))).reshape(len(has), len(FACTORS), -1)
        self.of = np.array([self.classes.index((step.generation, step.is_fp8)) for step in self.steps])
        self.seconds = np.array([step.seconds for step in self.steps])
        parts = np.array([[step.time["parts"][factor] for factor in FACTORS] for step in self.steps])
        # What is recomputed is mostly products.
        parts[:, 0] += [step.time["parts"]["recomputation"] for step in self.steps]
        self.parts = parts
        self.rest = np.array([step.time["expected_seconds"] for step in self.steps]) - parts.sum(1)
        sizes = collections.Counter(step.source for step in self.steps)
        weights = np.array([sizes[step.source] ** -0.5 for step in self.steps])
        self.weights = weights / weights.mean()

    def times(self, factors, chosen):
        """Of steps at other factors (classes, factors), in logarithms."""
        parts = self.parts[chosen] * np.exp(factors - self.now)[self.of[chosen]]
        return parts, parts.sum(1) + self.rest[chosen]

    def solve(self, chosen):
        effects = self.start.copy()
        for _ in range(50):
            parts, times = self.times(self.effects @ effects, chosen)
            errors = np.log(times / self.seconds[chosen])
            slopes = np.einsum("sf,sfe->se", parts / times[:, None], self.effects[self.of[chosen]])
            weights = self.weights[chosen] * np.minimum(1, self.OUTLIER / np.maximum(np.abs(errors), 1e-9))
            effects -= 0.5 * np.linalg.solve((slopes.T * weights) @ slopes + np.diag(self.pull),
                                             slopes.T @ (weights * errors) + self.pull * (effects - self.start))
            factors = self.effects @ effects
            for own, lacks in zip(self.effects[:, 0, :], np.log(self.LEAST) - factors[:, 0]):
                if lacks > 0:
                    effects[np.flatnonzero(own)[-1]] += lacks  # the effect of both, the last one
        return self.effects @ effects

    def error_of_unseen(self):
        """The mean errors of steps, and of sources, each step with the factors of nine tenths of the others."""
        order = np.random.default_rng(1).permutation(len(self.steps))
        errors = np.zeros(len(self.steps))
        for i in range(10):
            unseen = order[i::10]
            factors = self.solve(np.setdiff1d(order, unseen))
            errors[unseen] = np.abs(self.times(factors, unseen)[1] / self.seconds[unseen] - 1)
        sources = collections.defaultdict(list)
        for step, error in zip(self.steps, errors):
            sources[step.source].append(error)
        return errors.mean(), mean(map(mean, sources.values()))


def print_fit(steps):
    fit = Fit(steps)
    for (generation, is_fp8), factors in zip(fit.classes, np.exp(fit.solve(np.arange(len(fit.steps))))):
        print(f"    Software{{Generation::{generation}, {str(is_fp8).lower()}, {', '.join(f'{x:.3f}' for x in factors)}}},")
    # Quantiles of a sample, such that a further step is below the first and above the last with one chance in ten each.
    optional = {None: "{}", True: "true", False: "false"}
    for generation in dict.fromkeys(generation for generation, _ in fit.classes):
        for is_fp8, is_data in ((False, True), (False, False), (False, None), (True, True), (True, False), (True, None), (None, None)):
            ratios = [step.ratio for step in steps if step.generation == generation and is_fp8 in (None, step.is_fp8) and
                      is_data in (None, step.is_data_parallel)]
            if len(ratios) >= 5:
                low, high = np.quantile(ratios, [0.1, 0.9], method="weibull")
                print(f"    Steps{{Generation::{generation}, {optional[is_fp8]}, {optional[is_data]}, {len(ratios)}, {low:.2f}, {high:.2f}}},")
    print("unseen steps: mean error {:.1%}, mean of the sources' means {:.1%}".format(*fit.error_of_unseen()))


if __name__ == "__main__":
    print_fit(planned_steps()) if sys.argv[1:] == ["--fit"] else print_errors(planned_steps())
