"""Shared parts of the pictures: colors, smoothing, and the x axes.

plot_loss.py draws the loss, and plot_panels.py the other panels.
"""

import numpy as np
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter, MaxNLocator

from amounts import short, time_unit

# Neighbouring colors differ for the color-blind too. Markers and lines distinguish runs with the same color.
RUN_COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#8a5a2b"]
RUN_MARKERS = ["o", "s", "^", "D", "v", "p", ">", "<"]
RUN_LINES = ["-", (0, (6, 1.5)), (0, (2, 1))]  # for the first eight runs, the next eight, all others
INK, FAINT, GRID = "#2b2b2b", "#6f6f6f", "#e6e6e6"

class Look:
    """The color, marker and line style of a run."""

    def __init__(self, index):
        self.color = RUN_COLORS[index % len(RUN_COLORS)]
        self.marker = RUN_MARKERS[index % len(RUN_MARKERS)]
        self.line = RUN_LINES[min(index // len(RUN_COLORS), len(RUN_LINES) - 1)]


def smooth(values):
    """The mean over a window of a fortieth of the run. The window is narrower at the steep start, and one-sided at
    the end. Values that are not finite stay so and do not enter the means of others."""
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
    """Every k-th point and the last one, if there are more points than a picture can show."""
    stride = max(1, len(x) // points)
    keep = np.unique(np.append(np.arange(0, len(x), stride), len(x) - 1))
    return [np.asarray(values)[keep] for values in (x, *columns)]


def finite(values):
    values = np.asarray(values, dtype=float)
    return values[np.isfinite(values)]


def last_finite(values):
    """The index of the last finite number, or None."""
    index = np.flatnonzero(np.isfinite(values))
    return int(index[-1]) if len(index) else None


def positions(run, kind):
    """The positions of a run's steps on an axis of steps, tokens or hours."""
    values = {"steps": lambda: run.steps, "tokens": run.tokens, "hours": run.hours}[kind]()
    return np.array(values, dtype=float)


def text_width(figure, text, size, weight="normal"):
    """The width of a text in pixels."""
    return figure.canvas.get_renderer().get_text_width_height_descent(
        text, FontProperties(size=size, weight=weight), ismath=False)[0]


def dress(axes):
    """Applies the style of all panels."""
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, pad=8)


def dress_x(axes, kind, longest):
    """Sets the ticks and the label of an axis of steps, tokens or hours that ends at `longest`."""
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
    """Ticks that are round in another unit; `factor` such units are one unit of the axis."""

    def __init__(self, factor, bins):
        super().__init__(nbins=bins, steps=[1, 2, 5, 10], min_n_ticks=1)
        self._factor = factor

    def tick_values(self, low, high):
        return super().tick_values(low * self._factor, high * self._factor) / self._factor
