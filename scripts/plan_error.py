#!/usr/bin/env python3
"""How far the planner's times are from published steps (docs/published_steps.toml), as Markdown.

    scripts/plan_error.py

Software reaches a part of the speed that the planner expects. One factor is fitted for each software, the geometric
mean of its steps; a step's error is that of the factor of the others (of all, where the software has one step alone).
The second table has steps that no factor was fitted to, with their memory.
"""

import collections
import json
import math
import pathlib
import shlex
import subprocess
import sys

import interpreter

if __name__ == "__main__":
    interpreter.need("tomllib")

import tomllib  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent


def plan(step):
    command = [ROOT / "train_gpt", "plan", "--json", *shlex.split(step["options"])]
    result = subprocess.run(command, capture_output=True, text=True)
    if not result.stdout.startswith("{"):
        sys.exit(f"error: {step['name']}: {result.stderr.strip()}")
    return json.loads(result.stdout)


def published_seconds(step, made):
    if "seconds" in step:
        return step["seconds"]
    gpus, tokens = made["mesh"]["processes"], made["batch"]["tokens"]
    if "speed" in step:
        return tokens / gpus / step["speed"]
    model = made["model"]
    layers, channels, length = model["layers"], model["channels"], model["sequence_length"]
    operations = {"causal": model["flops_per_token"],
                  "all": model["flops_per_token"] + 6 * layers * channels * length,
                  "recomputed": 96 * layers * channels**2 * (1 + length / (6 * channels) + model["vocabulary"] / (16 * layers * channels))}
    return operations[step["counts"]] * tokens / gpus / (step["tflops"] * 1e12)


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def seconds_text(seconds):
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"


def measure(steps):
    """Adds `seconds`, `plan`, and `speed`: the part of the expected speed that the step reached."""
    for step in steps:
        step["plan"] = plan(step)
        step["seconds"] = published_seconds(step, step["plan"])
        step["share"] = step["plan"]["time"]["expected_seconds"] / step["seconds"]
    return steps


def left_out_errors(steps):
    """Adds `error` to each: of the time that the software's other steps predict."""
    softwares = collections.defaultdict(list)
    for step in steps:
        softwares[step["software"]].append(step)
    for step in steps:
        others = [other["share"] for other in softwares[step["software"]] if other is not step]
        step["error"] = step["share"] / geometric_mean(others or [other["share"] for other in steps if other is not step]) - 1
    return softwares


def main():
    described = tomllib.loads((ROOT / "docs/published_steps.toml").read_text())
    steps = measure(described["step"])
    softwares = left_out_errors(steps)
    print("| published step | software | measured | at least | expected | error with the software's factor |\n|---|---|---|---|---|---|")
    for step in steps:
        time = step["plan"]["time"]
        print(f"| {step['name']} | {step['software']} | {seconds_text(step['seconds'])} | {seconds_text(time['bound_seconds'])} "
              f"| {seconds_text(time['expected_seconds'])} | {step['error']:+.0%} |")
    print("\n| software | steps | factor | mean error | largest |\n|---|---|---|---|---|")
    for name, group in [*softwares.items(), ("all", steps)]:
        errors = [abs(step["error"]) for step in group]
        print(f"| {name} | {len(group)} | {geometric_mean([step['share'] for step in group]):.2f} | {sum(errors) / len(errors):.1%} "
              f"| {max(errors):.0%} |")
    print("\n| step that no factor was fitted to | measured | expected | measured GiB | planned |\n|---|---|---|---|---|")
    for step in measure(described["held_out"]):
        made = step["plan"]
        print(f"| {step['name']} | {seconds_text(step['seconds'])} | {seconds_text(made['time']['expected_seconds'])} | {step['gib']} "
              f"| {made['memory']['bytes'] / 2**30:.2f} |")
    alone = [abs(step["share"] - 1) for step in steps]
    print(f"\nWithout factors of software: mean {geometric_mean([step['share'] for step in steps]):.2f} of the measured time, "
          f"error {sum(alone) / len(alone):.0%} in the mean, {max(alone):.0%} at most.")


if __name__ == "__main__":
    main()
