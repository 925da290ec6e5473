"""Draws the panels of a comparison other than the loss: throughput, MFU, HellaSwag, memory by arena, time by phase.

Each function takes the axes and the runs. plot.py decides which panels a picture has, and where.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.ticker import FuncFormatter

from amounts import bytes_text, clipped, duration_text, short
from plot_common import (FAINT, INK, Look, dress, dress_x, finite, last_finite, positions, smooth, text_width,
                         thinned)
from plot_loss import set_x_limits

# In the order of stacking. Neighbours differ in lightness too.
ARENAS = {"parameters": "#0072b2", "gradients": "#8fc7ea", "master": "#3d2466", "moments": "#cc9bc0",
          "activations": "#e69f00", "communication": "#00664b", "pipeline": "#6fd3b0", "workspace": "#5f5f5f"}
PHASES = {"data": "#2e1a4f", "forward": "#8fc7ea", "backward": "#0072b2", "communication": "#d55e00", "norm": "#f0d48a",
          "update": "#00664b", "disk": "#cc9bc0", "other": "#b8b8b8"}
SPARE_COLORS = ["#7a5230", "#c9b79c", "#444444"]
NAME, NAME_SIZE = 20, 12.5  # the characters and the font size of a run's name beside its bar
CHANCE = 0.25  # with the four endings of a HellaSwag question


def line_panel(axes, runs, kind, column, of_rows=smooth):
    """Draws a line per run that has the column; returns the finite values that were drawn."""
    values, ends = [], []
    for index, run in enumerate(runs):
        look, x = Look(index), positions(run, kind)
        y = of_rows(np.array(run[column]))
        end = last_finite(y + x)
        if end is None:
            continue
        shown, heights = thinned(x, y)
        axes.plot(shown, heights, color=look.color, linewidth=1.8, linestyle=look.line, zorder=4,
                  marker=look.marker if len(finite(y)) < 10 else None)
        axes.plot(x[end], y[end], color=look.color, marker=look.marker, markersize=7, markeredgecolor="white", clip_on=False,
                  zorder=5)
        ends += [*finite(x)[[0, -1]]]
        values.append(finite(y))
    set_x_limits(axes, ends, kind)
    dress(axes)
    dress_x(axes, kind, max(ends))
    return np.concatenate(values)


def throughput_panel(axes, runs, kind):
    values = line_panel(axes, runs, kind, "tokens_per_s")
    axes.set_ylabel("tokens per second, smoothed", labelpad=10)
    typical = [np.median(finite(run["tokens_per_s"])) for run in runs if len(finite(run["tokens_per_s"]))]
    if min(typical) > 0 and max(typical) > 20 * min(typical):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.1 * max(np.quantile(values, 0.995), *typical) or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: short(value) if value else "0"))
    axes.yaxis.set_minor_formatter("")


def mfu_panel(axes, runs, kind):
    values = line_panel(axes, runs, kind, "mfu")
    axes.set_ylabel("MFU, smoothed", labelpad=10)
    axes.set_ylim(0, min(1, 1.15 * np.quantile(values, 0.995)) or 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:.3g}%"))


def hellaswag_panel(axes, runs, kind):
    """Draws points joined by lines, because only some steps have a value."""
    values, ends = [CHANCE], []
    for index, run in enumerate(runs):
        look, x = Look(index), positions(run, kind)
        rows, accuracies = run.points("hellaswag_acc_norm")
        pairs = [(x[row], accuracy) for row, accuracy in zip(rows, accuracies) if np.isfinite(x[row])]
        if pairs:
            axes.plot(*zip(*pairs), color=look.color, linewidth=1.8, linestyle=look.line, marker=look.marker,
                      markersize=6, markeredgecolor="white", markeredgewidth=0.8, zorder=4,
                      markevery=max(1, len(pairs) // 8))
            values += accuracies
            ends += [*finite(x)[[0, -1]]]
    low, high = min(values), max(values)
    axes.set_ylim(max(0, low - 0.03), min(1, high + 0.03))
    axes.axhline(CHANCE, color=FAINT, linewidth=1.3, linestyle=(0, (5, 4)), zorder=3)
    axes.annotate("chance", xy=(1, CHANCE), xycoords=axes.get_yaxis_transform(), xytext=(0, 4), fontsize=11, color=FAINT,
                  textcoords="offset points", ha="right")
    set_x_limits(axes, ends, kind)
    dress(axes)
    dress_x(axes, kind, max(ends))
    axes.set_ylabel("HellaSwag accuracy", labelpad=10)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{100 * value:.3g}%"))


def phase_times(run):
    """The mean milliseconds of each phase in a step, without the first step, which includes one-time work. `other` is
    the time outside all phases. Empty if the run did not record them."""
    step = np.array(run["step_ms"])
    rows = np.isfinite(step)
    if rows.sum() > 1:
        rows[np.flatnonzero(rows)[0]] = False
    if not rows.any():
        return {}
    times = {}
    for name in run.columns.names():
        if name.startswith("phase_ms/"):
            values = finite(np.array(run[name])[rows])
            times[name.split("/", 1)[1]] = values.sum() / rows.sum()
    if not times:
        return {}
    other = step[rows].mean() - sum(times.values())
    if other > 0.005 * step[rows].mean():
        times["other"] = other
    return times


def in_order(names, colors):
    """The existing parts, known ones first, each with a color."""
    names = [*(name for name in colors if name in names), *sorted(name for name in names if name not in colors)]
    spare = [name for name in names if name not in colors]
    return {name: colors.get(name) or SPARE_COLORS[spare.index(name) % len(SPARE_COLORS)] for name in names}


def bars_panel(axes, runs, parts, colors, as_text, title):
    """Draws a stacked bar per run; `parts` has each run's amounts by name. If totals differ too much for one scale,
    all bars have the same length and show shares."""
    totals = [sum(amounts.values()) for amounts in parts]
    known = [total for total in totals if total > 0]
    shares = max(known) > 20 * min(known)
    longest = 1.0 if shares else max(known)
    look = in_order({name for amounts in parts for name in amounts}, colors)
    for row, (amounts, total) in enumerate(zip(parts, totals)):
        left = 0.0
        for name, color in look.items():
            width = amounts.get(name, 0) / (total if shares and total else 1)
            if width > 0:
                axes.barh(row, width, left=left, height=0.72, color=color, edgecolor="white", linewidth=0.8, zorder=3)
                # Only if it fits: a character takes about 8 pixels at this size.
                text = as_text(amounts[name])
                if width / (1.16 * longest) * axes.bbox.width > 8 * len(text) + 8:
                    light = np.dot(to_rgb(color), (0.299, 0.587, 0.114)) > 0.5
                    axes.text(left + width / 2, row, text, ha="center", va="center", fontsize=10.5,
                              color=INK if light else "white", zorder=4)
                left += width
        axes.text(left + 0.012 * longest, row, as_text(total) if total else "not recorded", va="center", fontsize=12,
                  color=INK if total else FAINT)
    axes.set_xlim(0, 1.16 * longest)
    axes.set_ylim(len(runs) - 0.4, -0.6)
    axes.set_yticks(range(len(runs)), [clipped(run.name, NAME) for run in runs], fontsize=NAME_SIZE)
    for index, tick in enumerate(axes.get_yticklabels()):
        tick.set_color(Look(index).color)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=8)
    axes.set_xticks([])
    # The legend also uses the width beside the names, and smaller type if necessary.
    beside = 12 + max(text_width(axes.figure, clipped(run.name, NAME), NAME_SIZE) for run in runs)
    begin, size = -beside / axes.bbox.width, 11.5
    needs = sum(text_width(axes.figure, name, size) + 2.4 * size / 72 * axes.figure.dpi for name in look)
    size *= min(1, (axes.bbox.width + beside) / needs)
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in look.values()]
    axes.legend(handles, look, loc="lower left", bbox_to_anchor=(begin, 1), ncols=len(look), frameon=False, fontsize=size,
                handlelength=0.9, handleheight=0.9, handletextpad=0.4, columnspacing=1.1, borderpad=0, borderaxespad=0.5)
    axes.annotate(title + (": shares" if shares else ""), xy=(begin, 1), xycoords="axes fraction", xytext=(0, 34),
                  textcoords="offset points", fontsize=14)


def memory_panel(axes, runs):
    bars_panel(axes, runs, [run.memory() for run in runs], ARENAS, bytes_text, "Memory of a process, by arena")


def time_panel(axes, runs):
    bars_panel(axes, runs, [phase_times(run) for run in runs], PHASES,
               lambda milliseconds: f"{milliseconds:.3g} ms" if milliseconds < 999.5 else duration_text(milliseconds / 3.6e6),
               "Time of a step, by phase")
