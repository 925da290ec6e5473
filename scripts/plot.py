#!/usr/bin/env python3
"""Draws the loss of one run, or of several in one picture.

    scripts/plot.py runs/quickstart                       writes runs/quickstart/loss.png
    scripts/plot.py runs/a runs/b/metrics.jsonl -o ab.png

A run is its directory or its metrics file (JSON lines: first `run`, then a line per step). Drawn are the training
loss, as it is and smoothed, the validation loss, and where they are known the loss of a unigram model and the
source's entropy, which no model goes below. Losses are in nats per token.
"""

import argparse
import json
import math
import os
import pathlib
import subprocess
import sys


def go_on_elsewhere(fault):
    """Runs this script by the interpreter that scripts/deps.sh chooses, where this one lacks a module."""
    deps = pathlib.Path(__file__).resolve().parent / "deps.sh"
    chosen = subprocess.run([deps, "python"], capture_output=True, text=True).stdout.strip()
    if subprocess.run([chosen, "-c", "import matplotlib, numpy"], capture_output=True).returncode != 0:
        sys.exit(f"error: neither {sys.executable} nor {chosen} has matplotlib and numpy ({fault}); run `make deps`")
    os.execv(chosen, [chosen, *sys.argv])


try:
    import matplotlib
    import numpy as np
except ImportError as fault:
    if __name__ != "__main__":
        raise
    go_on_elsewhere(fault)

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, MaxNLocator  # noqa: E402

RUN_COLORS = ["#2a6fbb", "#d1495b", "#2e8b57", "#8e5bb5", "#c98a12", "#3aa6a6", "#7a5230", "#5b6470"]
VALIDATION_COLOR = "#e07a1f"  # of a single run; several runs have one color each
INK, FAINT = "#2b2b2b", "#7d7d7d"


class Run:
    """What is drawn of one metrics file."""

    def __init__(self, name, about, lines):
        self.name = name
        self.about = about
        self.steps = np.array([line["step"] for line in lines])
        self.losses = np.array([line["loss"] for line in lines], dtype=float)
        validated = [line for line in lines if "val_loss" in line]
        self.validation_steps = np.array([line["step"] for line in validated])
        self.validation_losses = np.array([line["val_loss"] for line in validated], dtype=float)


def fail(message):
    sys.exit(f"error: {message}")


def metrics_file(argument):
    path = pathlib.Path(argument)
    if path.is_dir():
        if not (path / "metrics.jsonl").is_file():
            fail(f"{path} holds no metrics.jsonl; give a run's directory or its metrics file")
        return path / "metrics.jsonl"
    if not path.is_file():
        fail(f"there is no {path}; give a run's directory or its metrics file")
    return path


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_line(text, number, path):
    """One line as an object; fails with the file and the line where it is not one of ours."""
    try:
        line = json.loads(text)
    except ValueError:
        fail(f"{path}, line {number}: not JSON")
    if number == 1:
        if not isinstance(line, dict) or not isinstance(line.get("run"), dict):
            fail(f"{path}, line 1: no `run` object; is this a metrics file?")
    elif not isinstance(line, dict) or not all(is_number(line.get(key)) for key in ("step", "loss")):
        fail(f"{path}, line {number}: no numbers `step` and `loss`")
    elif not is_number(line.get("val_loss", 0)):
        fail(f"{path}, line {number}: `val_loss` is not a number")
    return line


def read_run(path):
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {path}: {error.strerror if isinstance(error, OSError) else 'not text'}")
    # A run that is being written may end in half a line.
    whole = text[: text.rfind("\n") + 1].splitlines()
    if not whole:
        fail(f"{path} is empty")
    lines = [parse_line(line, number, path) for number, line in enumerate(whole, 1)]
    if len(lines) == 1:
        fail(f"{path} holds no step")
    name = path.resolve().parent.name if path.name == "metrics.jsonl" else path.stem
    return Run(name, lines[0]["run"], lines[1:])


def smooth(values):
    """The mean over a window of a fortieth of the run: narrower at the steep start, one-sided at the end."""
    half = len(values) // 80
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first = index - np.minimum(half, index)
    last = np.minimum(index + np.minimum(half, index), len(values) - 1)
    return (sums[last + 1] - sums[first]) / (last + 1 - first)


def describe(run):
    """The title and the line below it, from what the run says about itself."""
    about, configuration = run.about, run.about.get("configuration", {})
    title = f"{configuration['model']} GPT" if "model" in configuration else run.name
    sizes = [f"{configuration[key]} {word}" if key != "seq-len" else f"context {configuration[key]}"
             for key, word in (("layers", "layers"), ("heads", "heads"), ("channels", "channels"), ("seq-len", ""))
             if key in configuration]
    if is_number(about.get("parameters")):
        sizes.append(f"{short(about['parameters'])} parameters")
    facts = [", ".join(sizes)]
    if "dtype" in configuration:
        facts.append(configuration["dtype"])
    if is_number(configuration.get("global-batch-tokens")):
        facts.append(f"{configuration['global-batch-tokens']:,} tokens a step")
    world = about.get("mesh", {}).get("world")
    if is_number(world):
        facts.append("1 process" if world == 1 else f"{world} processes")
    return title, "  ·  ".join(fact for fact in facts if fact)


def short(number):
    """837,632 -> 0.84 M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.5 * size:
            return f"{number / size:.{3 if number >= size else 2}g} {unit}"
    return str(number)


def decimal(loss):
    """2.345, or 1.23e+09"""
    return f"{loss:.3f}" if abs(loss) < 1e5 else f"{loss:.3g}"


def spread(heights, gap):
    """Moves sorted label heights apart until neighbours differ by `gap`, as little as needed."""
    groups = []  # [first index, count, mean wanted center]
    for i, height in enumerate(heights):
        groups.append([i, 1, height])
        while len(groups) > 1:
            (first, m, a), (_, n, b) = groups[-2:]
            if b - a >= gap * (m + n) / 2:
                break
            groups[-2:] = [[first, m + n, (m * a + n * b) / (m + n)]]
    return [center + gap * (i - (count - 1) / 2) for _, count, center in groups for i in range(count)]


def draw_run(axes, run, color, validation_color, alone):
    """Draws a run; returns its labels as (loss, text, color, step)."""
    axes.plot(run.steps, run.losses, color=color, alpha=0.22 if alone else 0.12, linewidth=1, zorder=2)
    smoothed = smooth(run.losses)
    axes.plot(run.steps, smoothed, color=color, linewidth=2, zorder=4, marker="o" if len(run.steps) < 10 else None)
    labels = []
    if alone:
        labels.append((smoothed[-1], f"training {decimal(smoothed[-1])}", color, run.steps[-1]))
    if len(run.validation_losses):
        axes.plot(run.validation_steps, run.validation_losses, color=validation_color, linewidth=1.6,
                  linestyle="-" if alone else (0, (4, 2)), marker="o", markersize=5, markeredgecolor="white",
                  markeredgewidth=0.8, zorder=5)
        last = run.validation_losses[-1]
        text = f"validation {decimal(last)}" if alone else f"{run.name} {decimal(last)}"
        labels.append((last, text, validation_color, run.validation_steps[-1]))
    elif not alone:
        labels.append((smoothed[-1], f"{run.name} {decimal(smoothed[-1])}", color, run.steps[-1]))
    return labels


def draw_references(axes, runs):
    """Draws each different unigram loss and entropy once; returns their labels."""
    labels = []
    end = max(run.steps[-1] for run in runs)
    for key, text in (("unigram_loss", "unigram model"), ("source_entropy", "source entropy")):
        for value in sorted({run.about[key] for run in runs if is_number(run.about.get(key))}):
            axes.axhline(value, color=FAINT, linewidth=1.3, linestyle=(0, (5, 4)), zorder=3)
            labels.append((value, f"{text} {decimal(value)}", FAINT, end))
    return labels


def set_limits(axes, runs, labels):
    """All of what is drawn, but not the height of a rare outlier of the training loss, nor that of one run of several
    that diverges: nothing much higher than where runs begin and half of them stay."""
    heights = []
    for run in runs:
        values = [smooth(run.losses).max(), np.quantile(run.losses, 0.995), *run.validation_losses]
        heights.append(max((value for value in values if math.isfinite(value)), default=0))
    values = [label[0] for label in labels] + [value for run in runs for value in run.validation_losses]
    values += [*heights, *(run.losses.min() for run in runs)]
    values = [value for value in values if math.isfinite(value)]
    low, high = min(values), max(values)
    if len(runs) > 1:
        usual = max([sorted(heights)[(len(runs) - 1) // 2], *(smooth(run.losses)[0] for run in runs)])
        high = min(high, low + 1.25 * (usual - low))
    margin = 0.05 * (high - low) or 0.5
    axes.set_ylim(max(0, low - margin) if low >= 0 else low - margin, high + margin)
    last = max(run.steps[-1] for run in runs)
    first = min(run.steps[0] for run in runs)
    axes.set_xlim(first - 0.01 * (last - first) - 0.5, last + 0.5)


def draw(runs, path):
    plt.rcParams.update({"font.size": 13, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#b5b5b5",
                         "xtick.color": FAINT, "ytick.color": FAINT})
    figure, axes = plt.subplots(figsize=(16, 10), dpi=100)
    figure.subplots_adjust(left=0.07, right=0.825, bottom=0.09, top=0.88)

    alone = len(runs) == 1
    labels = []
    for i, run in enumerate(runs):
        color = RUN_COLORS[i % len(RUN_COLORS)]
        labels += draw_run(axes, run, color, VALIDATION_COLOR if alone else color, alone)
    labels += draw_references(axes, runs)
    set_limits(axes, runs, labels)

    # Lines are named where they end, at the right.
    bottom, top = axes.get_ylim()
    labels = sorted(((min(value, top), *rest) for value, *rest in labels), key=lambda label: label[0])
    heights = spread([label[0] for label in labels], 0.032 * (top - bottom))
    for height, (value, text, color, step) in zip(heights, labels):
        axes.annotate(text, xy=(step, value), xytext=(1.025, height), xycoords="data",
                      textcoords=axes.get_yaxis_transform(), color=color, fontsize=13, va="center",
                      arrowprops={"arrowstyle": "-", "color": color, "linewidth": 1, "linestyle": (0, (1, 2)),
                                  "shrinkA": 1, "shrinkB": 3})

    title, subtitle = describe(runs[0])
    if not alone:
        title = f"{len(runs)} runs"
        subtitle = "validation loss dashed, with its last value" if any(
            len(run.validation_losses) for run in runs) else "training loss, with its last smoothed value"
    axes.text(0, 1.075, title, transform=axes.transAxes, fontsize=21, fontweight="bold")
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=13, color=FAINT)
    axes.set_xlabel("step", fontsize=14, labelpad=10)
    axes.set_ylabel("loss, nats per token", fontsize=14, labelpad=12)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.0f}"))
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, pad=8)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        fail(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")


def main():
    parser = argparse.ArgumentParser(description="Draws the loss of one run, or of several in one picture.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory or its metrics file")
    parser.add_argument("-o", "--output", metavar="FILE", help="picture (default: loss.png beside the first run's metrics)")
    arguments = parser.parse_args()
    paths = [metrics_file(run) for run in arguments.runs]
    output = pathlib.Path(arguments.output) if arguments.output else paths[0].parent / "loss.png"
    draw([read_run(path) for path in paths], output)
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
