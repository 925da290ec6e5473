"""Draws losses: the picture of the loss of one run or several, and the panel of a comparison.

Training losses are drawn pale as recorded, and smoothed. Validation losses have markers. If known, the loss of a
unigram model is drawn, and the source's entropy, which no model can go below. All are in nats per token.
"""

import matplotlib.pyplot as plt
import numpy as np

from amounts import clipped, decimal, short
from metrics import is_number
from plot_common import (FAINT, INK, Look, dress, dress_x, finite, last_finite, positions, smooth, text_width,
                         thinned)

TRAINING_COLOR, VALIDATION_COLOR = "#0072b2", "#e07a1f"  # for a single run; of several runs, each has one color
NAME = 28  # the characters of a name at the end of a line


class Curve:
    """A run's losses over an axis of steps, tokens or hours."""

    def __init__(self, run, kind):
        self.run = run
        self.x = positions(run, kind)
        self.losses = np.array(run["loss"])
        self.smoothed = smooth(self.losses)
        rows, values = run.points("val_loss")
        rows = [row for row in rows if np.isfinite(self.x[row])]
        self.validation_x = self.x[rows]
        self.validations = np.array([run["val_loss"][row] for row in rows])

    def known(self):
        return np.isfinite(self.x).any()


def draw_curve(axes, curve, look, validation_color, alone):
    """Draws a run's losses."""
    x, losses, smoothed = thinned(curve.x, curve.losses, curve.smoothed)
    axes.plot(x, losses, color=look.color, alpha=0.22 if alone else 0.13, linewidth=1, zorder=2)
    axes.plot(x, smoothed, color=look.color, linewidth=2, linestyle=look.line, zorder=4,
              marker=look.marker if len(x) < 10 else None)
    if len(curve.validations):
        axes.plot(curve.validation_x, curve.validations, color=validation_color, linewidth=1.6,
                  linestyle="-" if alone else (0, (4, 2)), marker=look.marker, markersize=5 if alone else 6,
                  markevery=max(1, len(curve.validations) // (25 if alone else 8)), markeredgecolor="white", markeredgewidth=0.8,
                  zorder=5)
    end = last_finite(curve.losses)
    if end is not None and curve.run.diverged():
        axes.plot(curve.x[end], curve.smoothed[end], color=look.color, marker="x", markersize=10, markeredgewidth=2.5,
                  zorder=6)


def labels_of(curve, color, validation_color, alone):
    """The labels at the ends of a run's lines: (loss, text, color, position)."""
    labels = []
    end = last_finite(curve.smoothed)
    name = clipped(curve.run.name, NAME)
    if end is not None and (alone or not len(curve.validations)):
        text = "training" if alone else name
        if curve.run.diverged():
            text += " diverged from"
        labels.append((curve.smoothed[end], f"{text} {decimal(curve.smoothed[end])}", color, curve.x[end]))
    if len(curve.validations):
        text = "validation" if alone else name
        labels.append((curve.validations[-1], f"{text} {decimal(curve.validations[-1])}", validation_color,
                       curve.validation_x[-1]))
    return labels


def draw_references(axes, curves):
    """Draws each different unigram loss and entropy once; returns their labels."""
    labels = []
    end = max(finite(curve.x)[-1] for curve in curves)
    for key, text in (("unigram_loss", "unigram model"), ("source_entropy", "source entropy")):
        for value in sorted({about[key] for about in (curve.run.about for curve in curves) if is_number(about.get(key))}):
            axes.axhline(value, color=FAINT, linewidth=1.3, linestyle=(0, (5, 4)), zorder=3)
            labels.append((value, f"{text} {decimal(value)}", FAINT, end))
    return labels


def set_limits(axes, curves, references, late=False):
    """Sets the range of losses. It leaves out rare outliers of the training loss. With several runs, its top is a
    little above the initial losses and above the maxima of half of the runs, so one diverging run does not set it. With
    `late`, the steep start is cut. The top then follows each run's 99% quantile after a twentieth of its steps (the
    median over the runs). It also follows the end of each run that is not very short."""
    heights, begins, values = [], [], [label[0] for label in references]
    for curve in curves:
        losses, smoothed = finite(curve.losses), finite(curve.smoothed)
        values += [*losses[:1], *curve.validations]
        if len(losses):
            values.append(losses.min())
            begins.append(smoothed[0])
            heights.append(max([smoothed.max(), np.quantile(losses, 0.995), *curve.validations]))
    values += heights
    low, high = (min(values), max(values)) if values else (0, 1)
    if len(heights) > 1:
        typical = max([sorted(heights)[(len(heights) - 1) // 2], *begins])
        high = min(high, low + 1.25 * (typical - low))
    if late and heights:
        longest = max(len(curve.losses) for curve in curves)
        long_ones = [finite(curve.losses) for curve in curves if len(curve.losses) >= longest / 20]
        settled = sorted(np.quantile(losses[len(losses) // 20:], 0.99) for losses in long_ones if len(losses))
        ends = [low + 1.1 * (smooth(losses)[-1] - low) for losses in long_ones if len(losses)]
        high = min(high, max([settled[(len(settled) - 1) // 2], *ends])) if settled else high
    margin = 0.05 * (high - low) or 0.5
    axes.set_ylim(max(0, low - margin) if low >= 0 else low - margin, high + margin)


def set_x_limits(axes, ends, kind):
    """Sets the range of positions: for steps, from the first to the last; otherwise from 0."""
    first, last = min(ends) if kind == "steps" else 0.0, max(ends)
    step = 0.5 if kind == "steps" else 0.0
    margin = 0.01 * (last - first)
    axes.set_xlim(first - margin - step, (last + margin + step) or 1)


def spread(heights, gap):
    """Moves sorted label heights apart until neighbours differ by `gap`, as little as necessary."""
    groups = []  # [first index, count, mean wanted center]
    for i, height in enumerate(heights):
        groups.append([i, 1, height])
        while len(groups) > 1:
            (first, m, a), (_, n, b) = groups[-2:]
            if b - a >= gap * (m + n) / 2:
                break
            groups[-2:] = [[first, m + n, (m * a + n * b) / (m + n)]]
    return [center + gap * (i - (count - 1) / 2) for _, count, center in groups for i in range(count)]


def covered(axes, curve, box):
    """The number of pixel columns in which a run's smoothed losses go through a box."""
    known = np.isfinite(curve.x) & np.isfinite(curve.smoothed)
    if not known.any():
        return 0
    x, y = axes.transData.transform(np.column_stack([curve.x[known], curve.smoothed[known]])).T
    columns = np.arange(box.x0, box.x1)
    rows = np.interp(columns, x, y, left=np.nan, right=np.nan)
    return int(((rows > box.y0) & (rows < box.y1)).sum())


def label_beside_curves(axes, curves, value, text):
    """Writes above or below a level line, at its right or left end. It takes the first of these places that no curve
    crosses, or the one with the fewest crossings."""
    labels = []
    for x, side in ((1, "right"), (0, "left")):
        for offset, alignment in ((4, "bottom"), (-4, "top")):
            label = axes.annotate(text, xy=(x, value), xycoords=axes.get_yaxis_transform(), xytext=(0, offset), fontsize=11,
                                  color=FAINT, textcoords="offset points", ha=side, va=alignment, zorder=6)
            box = label.get_window_extent(axes.figure.canvas.get_renderer())
            outside = box.y0 < axes.bbox.y0 or box.y1 > axes.bbox.y1
            labels.append((outside, sum(covered(axes, curve, box) for curve in curves), len(labels), label))
    labels.sort(key=lambda label: label[:3])
    for *_, label in labels[1:]:
        label.remove()


def loss_panel(axes, runs, kind):
    """Draws the losses of runs in a panel of a comparison, whose table names the runs."""
    curves = [Curve(run, kind) for run in runs]
    drawn = [curve for curve in curves if curve.known()]
    for curve in drawn:
        look = Look(curves.index(curve))
        draw_curve(axes, curve, look, look.color, alone=False)
    references = draw_references(axes, drawn)
    set_limits(axes, curves, [], late=True)  # the same for every x axis
    ends = np.concatenate([finite(curve.x)[[0, -1]] for curve in drawn])
    set_x_limits(axes, ends, kind)
    dress(axes)
    dress_x(axes, kind, max(ends))
    bottom, top = axes.get_ylim()
    for value, text, *_ in references:
        if not bottom <= value <= top:
            continue
        label_beside_curves(axes, drawn, value, text)
    axes.set_ylabel("loss, nats per token", labelpad=10)


def describe(run):
    """The title and the line below it, from the run's description of itself."""
    about, configuration = run.about, run.configuration
    title = f"{configuration['model']} GPT" if isinstance(configuration.get("model"), str) else run.name
    sizes = [f"{configuration[key]} {word}" if key != "seq-len" else f"context {configuration[key]}"
             for key, word in (("layers", "layers"), ("heads", "heads"), ("channels", "channels"), ("seq-len", ""))
             if key in configuration]
    if is_number(about.get("parameters")):
        sizes.append(f"{short(about['parameters'])} parameters")
    facts = [", ".join(sizes)]
    if isinstance(configuration.get("dtype"), str):
        facts.append(configuration["dtype"])
    if is_number(configuration.get("global-batch-tokens")):
        facts.append(f"{configuration['global-batch-tokens']:,} tokens a step")
    mesh = about.get("mesh")
    world = mesh.get("world") if isinstance(mesh, dict) else None
    if is_number(world):
        facts.append("1 process" if world == 1 else f"{world} processes")
    return clipped(title, 80), "  ·  ".join(fact for fact in facts if fact)


def loss_figure(runs, kind):
    """The picture of the loss alone; lines are named at their right ends."""
    figure, axes = plt.subplots(figsize=(16, 10), dpi=100)
    figure.subplots_adjust(left=0.07, right=0.825, bottom=0.09, top=0.88)
    alone = len(runs) == 1
    curves = [Curve(run, kind) for run in runs]
    drawn = [curve for curve in curves if curve.known()]
    labels = []
    for curve in drawn:
        look = Look(curves.index(curve))
        look.color = TRAINING_COLOR if alone else look.color
        validation_color = VALIDATION_COLOR if alone else look.color
        draw_curve(axes, curve, look, validation_color, alone)
        labels += labels_of(curve, look.color, validation_color, alone)
    references = draw_references(axes, drawn)
    set_limits(axes, drawn, references)
    ends = np.concatenate([finite(curve.x)[[0, -1]] for curve in drawn])
    set_x_limits(axes, ends, kind)

    if not any(len(finite(curve.losses)) or len(curve.validations) for curve in drawn):
        trained = any(any(curve.run.trained) for curve in drawn)
        text = "no step has a finite loss" if trained else "no loss was recorded"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", fontsize=16, color=FAINT)
        axes.set_yticks([])
    widest = max((text_width(figure, label[1], 13) for label in labels + references), default=0)
    figure.subplots_adjust(right=min(0.825, 1 - (widest + 50) / (figure.get_figwidth() * figure.dpi)))
    bottom, top = axes.get_ylim()
    labels = sorted(((min(value, top), *rest) for value, *rest in labels + references), key=lambda label: label[0])
    heights = spread([label[0] for label in labels], 0.032 * (top - bottom))
    for height, (value, text, color, position) in zip(heights, labels):
        axes.annotate(text, xy=(position, value), xytext=(1.025, height), xycoords="data",
                      textcoords=axes.get_yaxis_transform(), color=color, fontsize=13, va="center",
                      arrowprops={"arrowstyle": "-", "color": color, "linewidth": 1, "linestyle": (0, (1, 2)),
                                  "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)})

    title, subtitle = describe(runs[0])
    if not alone:
        title = f"{len(runs)} runs"
        subtitle = "validation loss dashed, with its last value" if any(
            len(curve.validations) for curve in drawn) else "training loss, with its last smoothed value"
    axes.text(0, 1.075, title, transform=axes.transAxes, fontsize=21, fontweight="bold", color=INK)
    axes.text(0, 1.03, subtitle, transform=axes.transAxes, fontsize=13, color=FAINT)
    dress(axes)
    dress_x(axes, kind, max(ends))
    axes.set_ylabel("loss, nats per token", labelpad=12)
    axes.xaxis.label.set_fontsize(14)
    axes.yaxis.label.set_fontsize(14)
    return figure
