"""Reads the metrics of runs and follows growing files. Metrics are JSON lines: first `run`, then one line per
step. A resumed run that differs writes another `run` line where it continues; the last one counts.

The records of a run become columns of numbers, which plot.py, tensorboard.py and watch.py show. Uses only Python's
standard library.
"""

import array
import json
import math
import os
import pathlib
import signal

NAN = float("nan")
LARGEST = 1e100  # larger numbers count as infinite: their sums would overflow, and they cannot be drawn
LAST_STEP = 2**53  # a double represents all whole numbers up to this one


class MetricsError(Exception):
    """The error of a metrics file, in one line."""


def is_value(value):
    """Whether it is a number, finite or not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_number(value):
    """Whether it is a number that can be used in calculations."""
    return is_value(value) and abs(value) <= LARGEST


def as_double(value):
    if value is None or value != value:
        return NAN
    return float(value) if abs(value) <= LARGEST else math.copysign(math.inf, value > 0 or -1)


def flat(fields):
    """{"loss": 2, "phase_ms": {"forward": 5}} -> ("loss", 2.0), ("phase_ms/forward", 5.0). null, which JSON has for
    numbers that are not finite, becomes NaN. Other values are left out."""
    for name, value in fields.items():
        if is_value(value) or value is None:
            yield name, as_double(value)
        elif isinstance(value, dict):
            for inner, number in flat(value):
                yield f"{name}/{inner}", number


class Columns:
    """A row per step and a column per field; NaN if a line lacks the field."""

    def __init__(self):
        self.rows = 0
        self._columns = {}

    def __getitem__(self, name):
        """The column as an array of doubles; all NaN if no line has the field."""
        return self._columns.get(name) or array.array("d", [NAN]) * self.rows

    def names(self):
        return list(self._columns)

    def append(self, fields):
        for name, value in flat(fields):
            if name not in self._columns:
                self._columns[name] = array.array("d", [NAN]) * self.rows
            self._columns[name].append(value)
        self.rows += 1
        for column in self._columns.values():
            if len(column) < self.rows:
                column.append(NAN)

    def row(self, index):
        """The numbers of one step by name, without NaN."""
        return {name: column[index] for name, column in self._columns.items() if not math.isnan(column[index])}

    def cut(self, rows):
        """Keeps the first rows."""
        self.rows = min(rows, self.rows)
        for column in self._columns.values():
            del column[self.rows:]

    def alike(self, other):
        """The number of leading rows that are bit for bit equal in both."""
        rows = min(self.rows, other.rows)
        for name in {*self._columns, *other._columns}:
            mine, theirs = self[name][:rows], other[name][:rows]
            if mine.tobytes() != theirs.tobytes():
                rows = next(i for i in range(rows) if mine[i:i + 1].tobytes() != theirs[i:i + 1].tobytes())
        return rows


class Run:
    """The contents of a metrics file: `about`, the object of its last `run` line, and the columns of its steps."""

    def __init__(self, name):
        self.name = name
        self.about = {}
        self.columns = Columns()
        # For each row, whether it is a training step. An evaluation of given weights has no loss.
        self.trained = bytearray()

    def __len__(self):
        return self.columns.rows

    def __getitem__(self, name):
        return self.columns[name]

    @property
    def steps(self):
        return self.columns["step"]

    @property
    def configuration(self):
        value = self.about.get("configuration")
        return value if isinstance(value, dict) else {}

    def diverged(self):
        """Whether the loss of the last step is not finite."""
        last = self.trained.rfind(True)
        return last >= 0 and not math.isfinite(self["loss"][last])

    def points(self, name):
        """The rows and values of a field that only some lines have, such as val_loss."""
        column = self.columns[name]
        rows = [row for row, value in enumerate(column) if math.isfinite(value)]
        return rows, [column[row] for row in rows]

    def tokens(self):
        """The tokens trained on after each step; NaN if neither the line nor the configuration says so. (The
        configuration of an evaluation is not that of the steps that made its weights.)"""
        batch = self.configuration.get("global-batch-tokens")
        batch = batch if is_number(batch) else NAN
        return [step * (batch if trained else NAN) if math.isnan(said) else said
                for step, said, trained in zip(self.steps, self.columns["tokens"], self.trained)]

    def step_seconds(self):
        """The seconds of each step. A line without them gets those of the step before."""
        seconds, last = [], NAN
        for value in self.columns["step_ms"]:
            last = last if math.isnan(value) else value / 1e3
            seconds.append(last)
        known = next((value for value in seconds if not math.isnan(value)), NAN)
        return [known if math.isnan(value) else value for value in seconds]

    def hours(self):
        """The hours spent on steps until the end of each step. Validation, saving and the time between a stop and the
        resumption do not count, so a resumed run continues where it stopped."""
        total, hours = 0.0, []
        for seconds in self.step_seconds():
            total += seconds / 3600
            hours.append(total)
        return hours

    def memory(self):
        """The bytes of a process by arena; in a pipeline, those of the stage that needs the most."""
        pipeline = self.about.get("pipeline")
        stages = pipeline.get("memory") if isinstance(pipeline, dict) else None
        stages = stages if isinstance(stages, list) and stages else [self.about.get("memory")]
        stages = [{arena: size for arena, size in stage.items() if is_number(size) and size > 0}
                  for stage in stages if isinstance(stage, dict)]
        return max(stages, key=lambda stage: sum(stage.values()), default={})

    def take(self, line):
        """Adds a line. A step that is not after the last one replaces that step and all later ones: a run was resumed
        there. Returns the number of rows before the line."""
        if "step" not in line:
            self.about = line["run"]
            return len(self)
        while len(self) and self.steps[-1] >= line["step"]:
            self.columns.cut(len(self) - 1)
        del self.trained[len(self):]
        self.trained.append("loss" in line)
        self.columns.append(line)
        return len(self) - 1


def parse_line(text, number, path):
    """One line as an object; MetricsError with the file and the line number if it is not a metrics line."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        raise MetricsError(f"{path}, line {number}: not JSON") from None
    if not isinstance(line, dict):
        line = {}
    if isinstance(line.get("run"), dict):
        return {"run": line["run"]}
    if number == 1:
        raise MetricsError(f"{path}, line 1: no `run` object; is this a metrics file?")
    # An evaluation of weights that are not trained has no training loss.
    loss = line.get("loss", None if "val_loss" in line or "hellaswag_acc_norm" in line else "")
    if not is_value(line.get("step")) or not (is_value(loss) or loss is None):
        raise MetricsError(f"{path}, line {number}: no numbers `step` and `loss`")
    if not 0 <= line["step"] <= LAST_STEP or line["step"] % 1:
        raise MetricsError(f"{path}, line {number}: `step` is not a whole number from 0 to 2^53")
    for key, value in line.items():
        if key == "val_loss" and not is_value(value) and value is not None:
            raise MetricsError(f"{path}, line {number}: `{key}` is not a number")
    return line


class Follower:
    """A run's metrics file, which may grow, be replaced or cut (as a resumed run does), or not exist yet."""

    def __init__(self, path, name=None):
        self.path = pathlib.Path(path)
        self.run = Run(name or name_of(self.path))
        self.last_change = 0.0  # time of the file's last change, in seconds since 1970
        self.lines = 0  # number of lines read
        self._inode = None
        self._offset = 0  # place of the first unread byte, after the last whole line
        self._last_line = b""

    def poll(self):
        """Reads new lines. Returns how many of the known rows are unchanged: all of them if the file only grew.
        Returns None if nothing changed. MetricsError if the file is not a metrics file."""
        try:
            with open(self.path, "rb") as file:
                state = os.fstat(file.fileno())
                self.last_change = state.st_mtime
                if state.st_ino == self._inode and self._goes_on(file):
                    return self._append(file)
                return self._begin_again(file, state.st_ino)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MetricsError(f"cannot read {self.path}: {error.strerror}") from None

    def _goes_on(self, file):
        """Whether the last line that was read is still in its place."""
        file.seek(self._offset - len(self._last_line))
        return file.read(len(self._last_line)) == self._last_line

    def _begin_again(self, file, inode):
        old = self.run
        self.run = Run(old.name)
        self._inode, self._offset, self._last_line, self.lines = inode, 0, b"", 0
        file.seek(0)
        self._append(file)
        # Rows of another run (with another `run` line) are never kept.
        kept = old.columns.alike(self.run.columns) if old.about == self.run.about else 0
        return None if kept == len(old) == len(self.run) and old.about == self.run.about else kept

    def _append(self, file):
        data = file.read()
        data = data[:data.rfind(b"\n") + 1]  # a line that is being written is not whole
        if not data:
            return None
        kept = len(self.run)
        for line in data.splitlines(keepends=True):
            try:
                text = line.decode()
            except UnicodeDecodeError:
                raise MetricsError(f"cannot read {self.path}: not text") from None
            kept = min(kept, self.run.take(parse_line(text, self.lines + 1, self.path)))
            self.lines += 1
            self._offset += len(line)
            self._last_line = line
        return kept


def name_of(path):
    """The name of a run: its directory, or its metrics file if that does not have the default name."""
    path = pathlib.Path(path).absolute()
    return path.parent.name if path.name == "metrics.jsonl" else path.stem


def distinct_names(paths):
    """Names of runs, with as many parent folders as are necessary to distinguish them."""
    paths = [pathlib.Path(path).absolute() for path in paths]
    parts = [[*path.parts[1:-2], name_of(path)] if path.name == "metrics.jsonl" else [*path.parts[1:-1], name_of(path)]
             for path in paths]
    names = []
    for path, own in zip(paths, parts):
        others = [part for other, part in zip(paths, parts) if other != path]
        depth = 1
        while depth < len(own) and any(other[-depth:] == own[-depth:] for other in others):
            depth += 1
        names.append("/".join(own[-depth:]))
    return names


def find_metrics(argument, later=False):
    """The metrics file for an argument: a run's directory or the file itself. With `later`, it need not exist yet."""
    path = pathlib.Path(argument)
    if path.is_dir():
        path = path / "metrics.jsonl"
        if not path.is_file() and not later:
            raise MetricsError(f"{path.parent} has no metrics.jsonl; give a run's directory or its metrics file")
    elif not path.is_file():
        if not later or path.exists():
            raise MetricsError(f"there is no {path}; give a run's directory or its metrics file")
        if path.suffix != ".jsonl":
            path = path / "metrics.jsonl"
    return path


def newest_run(has_steps=False):
    """The metrics file in runs/ that was written last, or the last one with a step; MetricsError if there is none."""
    files = sorted(pathlib.Path("runs").glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files:
        if not has_steps or any('"loss":' in line for line in open(path, errors="replace")):
            return path
    raise MetricsError(f"no run in runs/{' has a step' if files else ''}; give a run's directory or its metrics file")


def read_run(path, name=None):
    """The run of a metrics file with at least one step; MetricsError otherwise."""
    follower = Follower(path, name)
    follower.poll()
    if not len(follower.run):
        raise MetricsError(f"{path} has no step" if follower.lines else f"{path} is empty")
    return follower.run


def require_interval(interval):
    """Checks the seconds between two looks at the files, a user's option; MetricsError if it is not positive."""
    if not interval > 0:
        raise MetricsError(f"--interval {interval:g} is not a number of seconds; give one such as 1")


def end_as_by_ctrl_c():
    """Makes SIGTERM end a script that follows files, as Ctrl-C does."""
    def end(number, frame):
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
