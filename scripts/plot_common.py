"""What the parts of a picture share: colors, numbers as text, smoothing, and what runs are drawn against.

Not what is drawn: the loss is in plot_loss.py, the other panels are in plot_panels.py.
"""

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, MaxNLocator

from amounts import short, time_unit

# Neighbours differ for the color-blind too; markers and lines tell apart what colors do not.
RUN_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#8a5a2b"]
RUN_MARKERS = ["o", "s", "^", "D", "v", "p", ">", "<"]
RUN_LINES = ["-", (0, (6, 1.5)), (0, (2, 1))]  # of the first eight runs, of the next eight, of more
INK, FAINT, GRID = "#2b2b2b", "#6f6f6f", "#e6e6e6"

class Look:
    """How a run is told from the others."""

    def __init__(self, index):
        self.color = RUN_COLORS[index % len(RUN_COLORS)]
        self.marker = RUN_MARKERS[index % len(RUN_MARKERS)]
        self.line = RUN_LINES[min(index // len(RUN_COLORS), len(RUN_LINES) - 1)]


def smooth(values):
    """The mean over a window of a fortieth of the run: narrower at the steep start, one-sided at the end. What is not
    finite stays so, and is not in the means beside it."""
    finite = np.isfinite(values)
    half = len(values) // 80
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    first = index - np.minimum(half, index)
    last = np.minimum(index + np.minimum(half, index), len(values) - 1)
    with np.errstate(invalid="ignore"):
        means = (sums[last + 1] - sums[first]) / (counts[last + 1] - counts[first])
    return np.where(finite, means, np.nan)


def thinned(x, *columns, points=4000):
    """Every k-th point where there are more than a picture can show, the last one too."""
    stride = max(1, len(x) // points)
    keep = np.unique(np.append(np.arange(0, len(x), stride), len(x) - 1))
    return [np.asarray(values)[keep] for values in (x, *columns)]


def finite(values):
    values = np.asarray(values, dtype=float)
    return values[np.isfinite(values)]


def last_finite(values):
    """The index of the last number that is finite, or None."""
    index = np.flatnonzero(np.isfinite(values))
    return int(index[-1]) if len(index) else None


def positions(run, kind):
    """Where the steps of a run lie on an axis: steps, tokens or hours."""
    values = {"steps": lambda: run.steps, "tokens": run.tokens, "hours": run.hours}[kind]()
    return np.array(values, dtype=float)


def text_width(figure, text, size, weight="normal"):
    """In pixels."""
    return figure.canvas.get_renderer().get_text_width_height_descent(
        text, FontProperties(size=size, weight=weight), ismath=False)[0]


def dress(axes):
    """The frame that all panels have."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, pad=8)


def dress_x(axes, kind, longest):
    """The ticks and the label of an axis of steps, tokens or hours that ends at `longest`."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9 if axes.bbox.width > 900 else 6, steps=[1, 2, 5, 10],
                                             integer=kind == "steps", min_n_ticks=1))
    if kind == "hours":
        unit, in_an_hour = time_unit(longest)
        axes.xaxis.set_major_locator(ScaledLocator(in_an_hour, 9 if axes.bbox.width > 900 else 6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value * in_an_hour:,.10g}"))
        axes.set_xlabel(f"{unit} of training steps", labelpad=8)
    elif kind == "tokens":
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: short(value) if value else "0"))
        axes.set_xlabel("tokens", labelpad=8)
    else:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:,.0f}"))
        axes.set_xlabel("step", labelpad=8)


class ScaledLocator(MaxNLocator):
    """Ticks that are round in a unit of which the axis' own has so many."""

    def __init__(self, factor, bins):
        super().__init__(nbins=bins, steps=[1, 2, 5, 10], min_n_ticks=1)
        self._factor = factor

    def tick_values(self, low, high):
        return super().tick_values(low * self._factor, high * self._factor) / self._factor
