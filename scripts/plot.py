#!/usr/bin/env python3
"""Draws one run's loss, or compares several runs, in one picture.

    scripts/plot.py                                     the loss of the newest run in runs/
    scripts/plot.py runs/quickstart                     the loss of a run: writes runs/quickstart/loss.png
    scripts/plot.py runs/a runs/b                       compares runs: writes runs/a/comparison.png
    scripts/plot.py runs/a runs/b --panels loss --x hours -o ab.png

A run is its directory or its metrics file. A comparison shows what its runs recorded: the loss against steps, tokens
and hours; throughput; MFU; HellaSwag accuracy; memory by arena; time by phase. (For a single run with --panels all,
tokens are left out unless the tokens per step vary.) plot_loss.py and plot_panels.py draw the panels.
"""

import argparse
import pathlib
import sys
import warnings

import interpreter

if __name__ == "__main__":
    interpreter.need("matplotlib", "numpy")

import matplotlib  # noqa: E402
import numpy as np  # noqa: E402

matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt  # noqa: E402

from amounts import bytes_text, clipped, decimal, duration_text, short  # noqa: E402
from metrics import MetricsError, distinct_names, find_metrics, is_number, newest_run, read_run  # noqa: E402
from plot_common import FAINT, INK, Look, finite, last_finite, positions, text_width  # noqa: E402
from plot_loss import loss_figure, loss_panel  # noqa: E402
from plot_panels import (NAME, NAME_SIZE, hellaswag_panel, memory_panel, mfu_panel, phase_times,  # noqa: E402
                         throughput_panel, time_panel)

KINDS = ["steps", "tokens", "hours"]
PANELS = ["loss", "throughput", "mfu", "hellaswag", "memory", "time"]
WIDTH, LEFT, RIGHT = 1800, 110, 45  # pixels: width of a comparison, and its margins
LINE_HEIGHT, LINE_GAP = 400, 90  # height of a panel with lines, and of the gap below it
ROW = 28  # height of a row of the table, and of a bar


def fail(message):
    sys.exit(f"error: {message}")


def has(run, column):
    return bool(len(finite(run[column])))


def kinds_of(runs, x):
    """The x axes of the loss. For a single run, tokens are left out if they are the same multiple of all steps."""
    known = [kind for kind in KINDS if any(np.isfinite(positions(run, kind)).any() for run in runs)]
    if x:
        if x not in known:
            fail(f"no run has its {x} (--x {x}): its lines have no `{'step_ms' if x == 'hours' else 'tokens'}`")
        return [x]
    if len(runs) > 1:
        return known
    ratios = np.concatenate([positions(run, "tokens") / np.maximum(positions(run, "steps"), 1) for run in runs])
    ratios = finite(ratios)
    return [kind for kind in known if kind != "tokens" or not np.allclose(ratios, ratios[0])]


def line_panels(runs, wanted, x):
    """The panels with lines, as functions of the axes."""
    panels = []
    if "loss" in wanted:
        panels += [lambda axes, kind=kind: loss_panel(axes, runs, kind) for kind in kinds_of(runs, x)]
    kind = kinds_of(runs, x)[0] if x else "steps"
    for name, column, draw in (("throughput", "tokens_per_s", throughput_panel), ("mfu", "mfu", mfu_panel),
                               ("hellaswag", "hellaswag_acc_norm", hellaswag_panel)):
        if name in wanted and any(has(run, column) for run in runs):
            panels.append(lambda axes, draw=draw: draw(axes, runs, kind))
    return panels


def bar_panels(runs, wanted):
    panels = []
    if "memory" in wanted and any(run.memory() for run in runs):
        panels.append(lambda axes: memory_panel(axes, runs))
    if "time" in wanted and any(phase_times(run) for run in runs):
        panels.append(lambda axes: time_panel(axes, runs))
    return panels


def rows_of(panels):
    """Splits panels into the fewest rows of at most three, evenly filled: 4 become 2 and 2, 5 become 3 and 2."""
    rows = -(-len(panels) // 3)
    lengths = [len(panels) // rows + (row < len(panels) % rows) for row in range(rows)] if rows else []
    begins = np.cumsum([0, *lengths])
    return [panels[begin:begin + length] for begin, length in zip(begins, lengths)]


def loss_text(run):
    """The last validation loss, with the best one if it differs; or how training ended."""
    values = run.points("val_loss")[1]
    if run.diverged():
        end = last_finite(np.array(run["loss"]))
        return "diverged at step 1" if end is None else f"diverged after step {run.steps[end]:,.0f}"
    if not values:
        return "–"
    text = decimal(values[-1])
    return text if min(values) == values[-1] else f"{text} (best {decimal(min(values))})"


def table_of(runs):
    """The differences between runs as text: a list of columns, each with a title, an alignment and cells."""
    def known(value, text):
        return text(value) if is_number(value) else "–"

    def typical(run, column):
        values = finite(run[column])
        return np.median(values) if len(values) else np.nan

    def processes(run):
        mesh = run.about.get("mesh")
        return known(mesh.get("world") if isinstance(mesh, dict) else None, lambda world: f"{world:,}")

    def last(values):
        end = last_finite(np.array(values, dtype=float))
        return np.nan if end is None else values[end]

    columns = [
        ("run", "left", [clipped(run.name, 34) for run in runs]),
        ("validation loss", "left", [loss_text(run) for run in runs]),
        ("parameters", "right", [known(run.about.get("parameters"), short) for run in runs]),
        ("processes", "right", [processes(run) for run in runs]),
        ("dtype", "right", [str(run.configuration.get("dtype", "–")) for run in runs]),
        ("steps", "right", [f"{run.steps[-1]:,.0f}" for run in runs]),
        ("tokens", "right", [known(last(run.tokens()), short) for run in runs]),
        ("time", "right", [known(last(run.hours()), duration_text) for run in runs]),
        ("tokens/s", "right", [known(typical(run, "tokens_per_s"), short) for run in runs]),
        ("MFU", "right", [known(typical(run, "mfu"), lambda mfu: f"{100 * mfu:.1f}%") for run in runs]),
        ("HellaSwag", "right", [known((run.points("hellaswag_acc_norm")[1] or [np.nan])[-1], lambda share: f"{100 * share:.1f}%")
                                for run in runs]),
        ("memory", "right", [known(sum(run.memory().values()) or None, bytes_text) for run in runs]),
    ]
    return [column for column in columns if any(cell != "–" for cell in column[2])]


def draw_table(axes, runs):
    """Draws the table, which is also the legend: a run's line, marker and name, and its results."""
    columns = table_of(runs)
    # Each column is as wide as its widest cell; the remaining width lies between the columns.
    pixels = np.array([max(text_width(axes.figure, cell, 12.5, "bold" if title == "run" else "normal")
                           for cell in [title, *cells]) for title, _, cells in columns])
    gap = min(90, (axes.bbox.width - 60 - pixels.sum()) / max(1, len(columns) - 1))
    axes.set_xlim(0, axes.bbox.width)
    axes.set_ylim(len(runs) + 0.5, -0.5)
    axes.axis("off")
    for row in range(len(runs)):
        look = Look(row)
        axes.plot([0, 22, 44], [row + 1] * 3, color=look.color, linewidth=2.4, linestyle=look.line, marker=look.marker,
                  markevery=[1], markersize=8, markeredgecolor="white", clip_on=False)
    left = 60.0
    for (title, alignment, cells), width in zip(columns, pixels):
        x = left if alignment == "left" else left + width
        axes.text(x, 0, title, ha=alignment, va="center", fontsize=12, color=FAINT)
        for row, cell in enumerate(cells):
            first = title == "run"
            axes.text(x, row + 1, cell, ha=alignment, va="center", fontsize=12.5, color=Look(row).color if first else INK,
                      fontweight="bold" if first else None)
        left += width + gap


def comparison_figure(runs, wanted, x):
    lines, bars = rows_of(line_panels(runs, wanted, x)), bar_panels(runs, wanted)
    if not lines and not bars:
        fail(f"the runs have no data for --panels {','.join(wanted)}; choose other panels")
    head = 70 + ROW * (len(runs) + 1) + 45
    bar_height = ROW * len(runs) + 14
    height = head + len(lines) * (LINE_HEIGHT + LINE_GAP) + (bar_height + 105 if bars else 0)
    figure = plt.figure(figsize=(WIDTH / 100, height / 100), dpi=100)

    def axes_at(left, top, width, tall):
        return figure.add_axes((left / WIDTH, 1 - (top + tall) / height, width / WIDTH, tall / height))

    title = f"{len(runs)} runs compared" if len(runs) > 1 else clipped(runs[0].name, 80)
    figure.text(LEFT / 2 / WIDTH, 1 - 48 / height, title, fontsize=21, fontweight="bold")
    draw_table(axes_at(LEFT / 2, 70, WIDTH - LEFT / 2 - RIGHT, ROW * (len(runs) + 1)), runs)
    top = head
    for row in lines:
        width = (WIDTH - len(row) * LEFT - RIGHT) / len(row)
        for place, draw in enumerate(row):
            draw(axes_at(LEFT + place * (width + LEFT), top, width, LINE_HEIGHT))
        top += LINE_HEIGHT + LINE_GAP
    # Space for the names beside the bars
    names = 45 + max(text_width(figure, clipped(run.name, NAME), NAME_SIZE) for run in runs)
    for place, draw in enumerate(bars):
        width = (WIDTH - RIGHT) / len(bars) - names
        draw(axes_at(names + place * (width + names), top + 70, width, bar_height))
    return figure


def draw(runs, wanted, x, path):
    plt.rcParams.update({"font.size": 13, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": "#b5b5b5",
                         "xtick.color": FAINT, "ytick.color": FAINT, "text.parse_math": False})
    with warnings.catch_warnings():
        # A character of a run's name that the font lacks is drawn as an empty box, which is enough.
        warnings.filterwarnings("ignore", r"Glyph (?s:.*) missing from")
        if wanted == ["loss"]:
            figure = loss_figure(runs, kinds_of(runs, x or "steps")[0])
        else:
            figure = comparison_figure(runs, wanted, x)
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            fail(f"cannot write {path}: {getattr(error, 'strerror', None) or error}")
    plt.close(figure)


def panels_of(text):
    names = text.split(",")
    for name in names:
        if name not in [*PANELS, "all"]:
            raise argparse.ArgumentTypeError(f"unknown panel {name!r}; choose from: {', '.join(PANELS)}, all")
    return [name for name in PANELS if name in names or "all" in names]


def read_runs(words):
    """The metrics files and the runs that can be read, and a line about each other argument."""
    paths, runs, faults = [], [], []
    for word in words:
        try:
            path = find_metrics(word)
            runs.append(read_run(path))
            paths.append(path)
        except MetricsError as error:
            faults.append(f"error: {error}")
    for run, name in zip(runs, distinct_names(paths)):
        run.name = name
    return paths, runs, faults


def main(words=None):
    parser = argparse.ArgumentParser(description="Draw one run's loss, or compare several runs, in one picture.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's directory or its metrics file (default: the newest run in runs/)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the picture to FILE (default: loss.png beside the run's metrics; "
                        "for several runs, comparison.png beside the first run's)")
    parser.add_argument("--x", choices=KINDS, help="draw against this (default: steps; a comparison draws the loss " "against all three)")
    parser.add_argument("--panels", type=panels_of, metavar="LIST", help=f"draw these of {','.join(PANELS)}, or all (default: loss "
                        "for one run, all for several)")
    arguments = parser.parse_args(words)
    if not arguments.runs:
        try:
            arguments.runs = [newest_run(has_steps=True)]
        except MetricsError as error:
            fail(error)
    wanted = arguments.panels or (["loss"] if len(arguments.runs) == 1 else PANELS)
    paths, runs, faults = read_runs(arguments.runs)
    if not runs:
        sys.exit("\n".join(faults))
    default = "loss.png" if wanted == ["loss"] and len(runs) == 1 else "comparison.png"
    output = pathlib.Path(arguments.output) if arguments.output else paths[0].parent / default
    draw(runs, wanted, arguments.x, output)
    print(f"wrote {output}", flush=True)
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
