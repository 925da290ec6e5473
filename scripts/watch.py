#!/usr/bin/env python3
"""Shows runs on the terminal while they go on: progress, loss, throughput, memory, the last validation.

    scripts/watch.py                     the newest run in runs/
    scripts/watch.py runs/a runs/b       these, also if they have not begun; Ctrl-C ends it
    scripts/watch.py runs/a --once       the current state; a pipe instead of a terminal does the same

It reads only metrics files and does not disturb the runs. plot.py draws finished runs.
"""

import argparse
import contextlib
import math
import sys
import termios
import time

import interpreter

if __name__ == "__main__":
    interpreter.need("rich")

from rich.console import Console, Group  # noqa: E402
from rich.live import Live  # noqa: E402
from rich.panel import Panel  # noqa: E402
from rich.table import Table  # noqa: E402
from rich.text import Text  # noqa: E402

from amounts import bytes_text, clock, short  # noqa: E402
from metrics import Follower, MetricsError, distinct_names, end_as_by_ctrl_c, find_metrics, is_number, newest_run, require_interval  # noqa: E402

LEVELS, ASCII_LEVELS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
RECENT = 50  # steps over which means are taken
PLOT_ROWS = 6  # rows of the loss in a panel
PANEL_ROWS = PLOT_ROWS + 6  # minimum for a panel with the lines around the plot


def mean(values):
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


class State:
    """The current state of a run."""

    def __init__(self, follower, trouble, now):
        run = follower.run
        self.run, self.trouble = run, trouble
        self.begun = len(run) > 0
        self.step = int(run.steps[-1]) if self.begun else 0
        steps = run.configuration.get("steps")
        self.evaluates = self.begun and not any(run.trained)  # evaluates given weights
        # (Older versions kept only the first `run` line of a resumed run, which does not have the new number of
        # steps.)
        self.total = int(steps) if is_number(steps) and steps >= self.step and steps > 0 else None
        self.seconds = self._seconds_of_a_step()
        self.done = self.total is not None and self.step == self.total
        age = now - follower.last_change
        # This limit is usually longer than a validation or a checkpoint takes.
        self.quiet = age if self.begun and not (self.done or self.evaluates) and age > max(60, 20 * (self.seconds or 0)) else None

    def _seconds_of_a_step(self):
        """The mean of the last steps by the clock, if lines have the time, so that validation counts too."""
        if not self.begun:
            return None
        times = [value for value in self.run["time"][-RECENT:] if math.isfinite(value)]
        if len(times) > 1 and times[-1] > times[0]:
            # A run that was stopped and resumed in between has a gap there.
            gaps = sorted(after - before for before, after in zip(times, times[1:]))
            median = gaps[len(gaps) // 2]
            if gaps[-1] <= 100 * median + 60:
                return (times[-1] - times[0]) / (len(times) - 1)
            return median
        value = mean(self.run["step_ms"][-RECENT:])
        return value / 1e3 if math.isfinite(value) else None

    @property
    def share(self):
        return self.step / self.total if self.begun and self.total else None

    @property
    def left(self):
        """The seconds until the last step, or None."""
        return (self.total - self.step) * self.seconds if self.total and self.seconds and not self.done else None

    def last(self, name):
        """The last finite number of a field, or None."""
        column = self.run[name]
        return next((value for value in reversed(column) if math.isfinite(value)), None)

    def recent(self, name):
        value = mean(self.run[name][-RECENT:])
        return value if math.isfinite(value) else None

    def recent_rate(self, name):
        """The mean of a rate per second, weighted with the time of the steps."""
        steps = [(rate, ms) for rate, ms in zip(self.run[name][-RECENT:], self.run["step_ms"][-RECENT:])
                 if math.isfinite(rate) and math.isfinite(ms)]
        time = sum(ms for _, ms in steps)
        return sum(rate * ms for rate, ms in steps) / time if time > 0 else self.recent(name)

    def diverged(self):
        return self.run.diverged()

    def status(self):
        """The status in a word or two, and its style."""
        if self.trouble:
            return "cannot be read", "red"
        if not self.begun:
            return "waiting for its first step", "yellow"
        if self.diverged():
            return "the loss is not finite", "red"
        if self.evaluates:
            return "evaluated", "green"
        if self.done:
            return "done", "green"
        if self.quiet:
            return f"no step for {clock(self.quiet)}", "yellow"
        return "running", "cyan"


def bar(share, width, ascii_only):
    """A bar of `width` characters, filled up to the share."""
    full = int(share * width + 1e-9)
    filled, empty = ("#", "-") if ascii_only else ("━", "─")
    text = Text(filled * full, style="green")
    text.append(empty * (width - full), style="dim")
    return text


def area(values, width, rows, ascii_only):
    """The values as filled columns in `rows` lines of text, the top line first. Much higher values at the beginning
    are cut, so that the rest is visible."""
    values = list(values)
    count = max(1, min(width, len(values)))
    bins = [mean(values[i * len(values) // count:(i + 1) * len(values) // count]) for i in range(count)]
    settled = [value for value in bins[len(bins) // 10:] if math.isfinite(value)] or [math.nan]
    low, high = min(settled), max(settled)
    levels = ASCII_LEVELS if ascii_only else LEVELS
    steps = rows * (len(levels) - 1)
    lines = []
    for row in reversed(range(rows)):
        line = ""
        for value in bins:
            if not math.isfinite(value):
                line += "x" if row == 0 else " "
                continue
            height = 1 + (steps - 1) * min(1, (value - low) / (high - low) if high > low else 0)
            line += levels[max(0, min(len(levels) - 1, round(height) - row * (len(levels) - 1)))]
        lines.append(line)
    return lines, low, high


def facts(state):
    """Pairs of name and value."""
    run, pairs = state.run, []

    def add(name, value, text):
        if value is not None:
            pairs.append((name, text(value)))

    add(f"loss, mean of {min(RECENT, len(state.run['loss']))}", state.recent("loss") if not state.diverged() else None, lambda value: f"{value:.4f}")
    validations = run.points("val_loss")[1]
    if validations:
        best = min(validations)
        add("validation", validations[-1],
            lambda value: f"{value:.4f}" + (f", best {best:.4f}" if best < value else ""))
    add("HellaSwag", state.last("hellaswag_acc_norm"), lambda share: f"{100 * share:.1f}%")
    add("grad norm", state.last("grad_norm"), lambda value: f"{value:.3g}")
    add("lr", state.last("lr"), lambda value: f"{value:.3g}")
    add("tokens/s", state.recent_rate("tokens_per_s"), short)
    add("MFU", state.recent_rate("mfu"), lambda share: f"{100 * share:.1f}%")
    add("ms/step", state.recent("step_ms"), lambda value: f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}")
    tokens = [value for value in run.tokens()[-1:] if math.isfinite(value)]
    add("tokens", tokens[0] if tokens else None, short)
    add("memory", sum(run.memory().values()) or None, lambda size: f"{bytes_text(size)} a process")
    return pairs


def fact_lines(pairs, width):
    """Lines that break between facts."""
    lines = []
    for name, value in pairs:
        if not lines or len(lines[-1]) + 3 + len(name) + 1 + len(value) > width:
            lines.append(Text())
        else:
            lines[-1].append("   ")
        lines[-1].append(f"{name} ", style="dim").append(value, style="bold")
    return lines


def progress_text(state):
    if not state.begun:
        return ""
    text = f"step {state.step:,}"
    if state.total:
        text += f" of {state.total:,}"
    if state.left is not None and not state.quiet:
        text += f", {clock(state.left)} left"
    return text


def panel(state, width, ascii_only):
    """A run in full."""
    inner = max(10, width - 4)
    overflow = "crop" if ascii_only else "ellipsis"
    lines = []
    status, style = state.status()
    words = progress_text(state)
    room = inner - len(words) - 7
    if state.share is not None and room >= 10:
        line = bar(state.share, room, ascii_only)
        line.append(f" {100 * state.share:3.0f}% ")
        lines.append(line.append(words))
    elif words:
        lines.append(Text(f"{words}, {100 * state.share:.0f}%" if state.share is not None else words))
    if state.begun:
        rows, low, high = area(state.run["loss"], max(5, inner - 8), PLOT_ROWS, ascii_only)
        for index, row in enumerate(rows):
            label = {0: f"{high:.3g}", PLOT_ROWS - 1: f"{low:.3g}"}.get(index, "") if math.isfinite(low) else ""
            line = Text(f"{label:>7} ", style="dim", no_wrap=True)
            lines.append(line.append(row, style="blue not dim"))
        lines += fact_lines(facts(state), inner)
    if state.trouble:
        lines.append(Text(state.trouble, style="red"))
    return Panel(Group(*lines) if lines else Text(""), title=Text(state.run.name, style="bold", overflow=overflow),
                 subtitle=Text(status, style=style, overflow=overflow), width=width, title_align="left",
                 subtitle_align="right", border_style="dim")


def table(states, width, ascii_only):
    """A line per run, with as many columns as the width allows."""
    def number(value, text):
        return text(value) if value is not None else ""

    name_width = min(max(len(state.run.name) for state in states), max(12, width // 4))
    columns = [("run", name_width, lambda state: state.run.name),
               ("done", 5, lambda state: number(state.share, lambda share: f"{100 * share:.0f}%") or (f"{state.step}" if state.begun else "")),
               ("loss", 7, lambda state: "nan" if state.diverged() else number(state.recent("loss"), lambda v: f"{v:.4f}")),
               ("val", 7, lambda state: number(state.last("val_loss"), lambda v: f"{v:.4f}")),
               ("left", 9, lambda state: number(state.left, clock) if not state.quiet else ""),
               ("tokens/s", 8, lambda state: number(state.recent_rate("tokens_per_s"), short)),
               ("state", 26, lambda state: Text(*state.status())),
               ("memory", 8, lambda state: number(sum(state.run.memory().values()) or None, bytes_text))]
    chosen, room = [], width
    for column in columns:
        if room < column[1] + 2:
            break
        chosen.append(column)
        room -= column[1] + 2
    overflow = "crop" if ascii_only else "ellipsis"
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", show_edge=False)
    for title, wide, _ in chosen:
        grid.add_column(title, justify="left" if title in ("run", "state") else "right", no_wrap=True, overflow=overflow,
                        max_width=name_width if title == "run" else None)
    plot_width = min(40, room - 18)
    if plot_width >= 8:
        grid.add_column("course of the loss", no_wrap=True)
    for state in states:
        cells = [cell(state) for _, _, cell in chosen]
        cells = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        if plot_width >= 8:
            cells.append(Text(area(state.run["loss"], plot_width, 1, ascii_only)[0][0] if state.begun else "", style="blue"))
        grid.add_row(*cells)
    return grid


def view(states, console, tall):
    """Panels if they fit, otherwise a table."""
    width, ascii_only = min(console.size.width, 140), console.options.ascii_only
    if len(states) * PANEL_ROWS <= tall:
        return Group(*(panel(state, width, ascii_only) for state in states))
    return Group(table(states, width, ascii_only), *(Text(state.trouble, style="red") for state in states if state.trouble))


class Watcher:
    def __init__(self, paths):
        self.followers = [Follower(path, name) for path, name in zip(paths, distinct_names(paths))]

    def states(self):
        states = []
        for follower in self.followers:
            trouble = ""
            try:
                follower.poll()
            except MetricsError as error:
                trouble = str(error)
            states.append(State(follower, trouble, time.time()))
        return states


@contextlib.contextmanager
def unechoed_keys():
    """Turns echo off while the block runs: typed characters, such as ^C for Ctrl-C, would shift the lines that are
    redrawn."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    without = termios.tcgetattr(sys.stdin)
    without[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSADRAIN, without)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def main(words=None):
    parser = argparse.ArgumentParser(description="Show runs on the terminal while they train.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's directory or its metrics file (default: the newest in "
                        "runs/)")
    parser.add_argument("--once", action="store_true", help="show the runs once, and exit")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="look for new lines this often (default: 1)")
    arguments = parser.parse_args(words)
    sys.stdout.reconfigure(errors="replace")  # a terminal may lack characters of names
    console = Console(highlight=False)
    once = arguments.once or not console.is_terminal
    try:
        require_interval(arguments.interval)
        watcher = Watcher([find_metrics(run, later=not once) for run in arguments.runs] or [newest_run()])
        if once:
            states = watcher.states()
            console.print(view(states, console, math.inf))
            sys.exit(1 if any(state.trouble for state in states) else 0)
        end_as_by_ctrl_c()
        with unechoed_keys(), Live(console=console, auto_refresh=False) as live:
            while True:
                begin = time.monotonic()
                live.update(view(watcher.states(), console, console.size.height - 1), refresh=True)
                # For runs of a million steps a look takes a second; leave nine tenths of the time to other processes.
                time.sleep(max(arguments.interval, 9 * (time.monotonic() - begin)))
    except MetricsError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass  # Watching ends this way.


if __name__ == "__main__":
    main()
