#!/usr/bin/env python3
"""Turns the metrics of runs into TensorBoard's event files, and follows runs that go on.

    scripts/tensorboard.py runs/a                         writes runs/a/tensorboard/
    scripts/tensorboard.py runs/a runs/b --follow         goes on as the runs do, until Ctrl-C
    scripts/tensorboard.py runs/* --logdir /tmp/events    writes /tmp/events/a/, /tmp/events/b/ ...
    tensorboard --logdir runs

An event holds all numbers of a step, so that a step is in a file wholly or not at all. A second call goes on after the last
step that is there; where what is there is not how the run began, the files are written afresh. A run that was resumed from
an earlier step tells TensorBoard to forget what came after it, as a program does that starts again.
"""

import argparse
import contextlib
import itertools
import json
import math
import pathlib
import struct
import sys
import time

import interpreter

if __name__ == "__main__":
    interpreter.need("tensorboardX", "google.protobuf", "numpy")

# tensorboardX asks for PyTorch, which takes seconds to load; nothing here is a tensor.
sys.modules.setdefault("torch", None)
from tensorboardX import summary as summaries  # noqa: E402
from tensorboardX.event_file_writer import EventsWriter  # noqa: E402
from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: E402
from tensorboardX.proto.summary_pb2 import Summary  # noqa: E402

from metrics import Follower, MetricsError, distinct_names, end_as_by_ctrl_c, find_metrics, is_number, require_interval  # noqa: E402

SUFFIX = ".train_gpt"  # what tells our files from others in the same folder
TAGS = {"loss": "train/loss", "val_loss": "val/loss", "tokens_per_s": "tokens_per_second",
        "hellaswag_acc": "hellaswag/acc", "hellaswag_acc_norm": "hellaswag/acc_norm"}
NO_TAGS = {"step", "time"}


def tag_of(name):
    return TAGS.get(name, name)


def scalars(run, row):
    """The numbers of a step by tag. A loss that is not finite is one too, where the step trained: TensorBoard marks it."""
    values = {tag_of(name): value for name, value in run.columns.row(row).items() if name not in NO_TAGS}
    for name in ("loss", "grad_norm"):
        if run.trained[row] and math.isnan(run[name][row]) and name in run.columns.names():
            values[tag_of(name)] = math.nan
    return values


def as_float(value):
    """As the single precision of an event has it."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def step_event(run, row, wall_time):
    values = [Summary.Value(tag=tag, simple_value=as_float(value)) for tag, value in scalars(run, row).items()]
    return Event(wall_time=wall_time, step=int(run.steps[row]), summary=Summary(value=values))


def wall_times(run, last_change):
    """When each step ended: as recorded, or counted back from the next one, and the last from the file's change."""
    times, following, gap = [], last_change, 0.0
    for said, seconds in zip(reversed(run["time"]), reversed(run.step_seconds())):
        following = following - gap if math.isnan(said) else said
        gap = 0.0 if math.isnan(seconds) else seconds
        times.append(following)
    return times[::-1]


def about_events(run, wall_time):
    """What was run, for TensorBoard's tabs Text and HParams."""
    rows = "".join(f"| {name} | {json.dumps(value)} |\n" for name, value in run.configuration.items())
    texts = {"configuration": f"| option | value |\n|---|---|\n{rows}",
             "run": "    " + json.dumps(run.about, indent=2).replace("\n", "\n    ")}
    for tag, text in texts.items():
        yield Event(wall_time=wall_time, step=0, summary=summaries.text(tag, text))
    options = {name: value for name, value in run.configuration.items() if isinstance(value, (bool, str)) or is_number(value)}
    if options:
        for summary in summaries.hparams(options, {"train/loss": 0, "val/loss": 0}):
            yield Event(wall_time=wall_time, step=0, summary=summary)


def is_about(event):
    """Whether it is one of about_events."""
    return any(value.HasField("metadata") for value in event.summary.value)


def whole_events(path):
    """The events of a file but one that is not whole, as the last of a call that was killed. Lengths are believed."""
    data = memoryview(path.read_bytes())
    begin = 0
    while begin + 12 <= len(data):
        end = begin + 12 + struct.unpack_from("<Q", data, begin)[0]
        if end + 4 > len(data):
            break
        yield Event.FromString(data[begin + 12:end])
        begin = end + 4


class EventFolder:
    """The event files of one run."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self._writer = None

    def is_open(self):
        return self._writer is not None

    def files(self):
        return sorted(self.folder.glob(f"events.[0-9]*.out.tfevents.*{SUFFIX}"))

    def rows_there(self, run):
        """How many of the run's rows the files hold, as TensorBoard reads them; None where they hold something else."""
        there = []  # (step, numbers), as bytes: a NaN is not like itself
        try:
            for event in itertools.chain.from_iterable(map(whole_events, self.files())):
                if event.session_log.status == SessionLog.START:
                    there = [known for known in there if known[0] < event.step]
                elif event.HasField("summary") and not is_about(event):
                    there.append((event.step, event.summary.SerializeToString()))
        except Exception:  # protobuf's, of a file that was damaged
            return None
        wanted = (step_event(run, row, 0.0) for row in range(len(there)))
        same = len(there) <= len(run) and all(known == (event.step, event.summary.SerializeToString())
                                              for known, event in zip(there, wanted))
        return len(there) if there and same else None

    def begin(self, forget_from=None, in_place_of=()):
        """A new file; TensorBoard forgets what it has of the steps from `forget_from` on. Other files of ours may go."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Files are read in the order of their names; a name that was read before is not read again.
        files = self.files()
        number = max([0, *(int(path.name.split(".")[1]) for path in files)]) + 1
        empty = {path for path in files if path.stat().st_size == 0}  # each look at a disk that is full leaves one
        for path in empty.union(in_place_of):
            path.unlink()
        self._writer = EventsWriter(str(self.folder / f"events.{number:06}"), SUFFIX)
        if forget_from is not None:
            self.write(Event(wall_time=time.time(), step=forget_from, session_log=SessionLog(status=SessionLog.START)))

    def begin_afresh(self, run, wall_time):
        self.begin(forget_from=0, in_place_of=self.files())
        for event in about_events(run, wall_time):
            self.write(event)

    def write(self, event):
        self._writer.write_event(event)

    def flush(self):
        self._writer.flush()

    def close(self):
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


class Converter:
    """One run: what its metrics gain goes into its events."""

    def __init__(self, path, name, folder):
        self.follower = Follower(path, name)
        self.events = EventFolder(folder)
        self.rows = None  # that the events hold; not known before the first look

    def advance(self):
        """Writes what is new; returns how many steps that were. After an error nobody knows what the events hold, nor of which
        rows the next look tells: it compares them again, and goes on in a new file."""
        try:
            return self._advance()
        except OSError as error:
            self.forget()
            raise MetricsError(f"cannot write {error.filename or self.events.folder}: {error.strerror or error}") from None
        except MetricsError:
            self.forget()
            raise

    def forget(self):
        self.rows = None
        with contextlib.suppress(OSError):  # there is no room for what is left
            self.events.close()

    def _advance(self):
        kept = self.follower.poll()
        run = self.follower.run
        if kept is None and (self.rows is not None or not self.follower.lines):
            return 0
        times = wall_times(run, self.follower.last_change)
        begin = times[0] if times else self.follower.last_change
        if self.rows is None:
            kept = self.events.rows_there(run)
        elif kept == 0:
            kept = None  # nothing of it is as it was
        if kept is None:
            self.events.begin_afresh(run, begin)
            kept = 0
        elif self.rows is not None and kept < self.rows:
            self.events.begin(forget_from=int(run.steps[kept - 1]) + 1)
        elif kept < len(run) and not self.events.is_open():
            self.events.begin()
        for row in range(kept, len(run)):
            self.events.write(step_event(run, row, times[row]))
        if self.events.is_open():
            self.events.flush()
        self.rows = len(run)
        return len(run) - kept


def folder_of(path, name, logdir):
    """Where a run's event files lie."""
    if logdir:
        return pathlib.Path(logdir) / name
    return path.parent / "tensorboard" / ("" if path.name == "metrics.jsonl" else path.stem)


def report(converter, steps):
    text = f"{steps:,} step{'' if steps == 1 else 's'}" if steps else "nothing new"
    print(f"{converter.follower.run.name}: {text} into {converter.events.folder}", flush=True)


def follow(converters, interval):
    """Until it is ended. A file that is wrong now may be right later: each complaint is made once."""
    complaints = set()
    while True:
        for converter in converters:
            first = converter.rows is None
            try:
                steps = converter.advance()
                if first and converter.rows is not None:
                    report(converter, steps)
            except MetricsError as error:
                if str(error) not in complaints:
                    print(f"error: {error}", file=sys.stderr, flush=True)
                    complaints.add(str(error))
        time.sleep(interval)


def main(words=None):
    parser = argparse.ArgumentParser(description="Turns the metrics of runs into TensorBoard's event files.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory or its metrics file")
    parser.add_argument("--logdir", metavar="DIR", help="where a folder per run is made (default: tensorboard/ in each run's "
                        "directory)")
    parser.add_argument("--follow", action="store_true", help="goes on as the runs do, also those that begin later")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks (default 2)")
    arguments = parser.parse_args(words)
    converters = []
    try:
        require_interval(arguments.interval)
        paths = [find_metrics(run, later=arguments.follow) for run in arguments.runs]
        names = distinct_names(paths)
        converters = [Converter(path, name, folder_of(path, name, arguments.logdir)) for path, name in zip(paths, names)]
        if arguments.follow:
            end_as_by_ctrl_c()
            follow(converters, arguments.interval)
        for converter in converters:
            steps = converter.advance()
            if not converter.follower.lines:
                raise MetricsError(f"{converter.follower.path} is empty")
            report(converter, steps)
    except MetricsError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass  # how following ends
    finally:
        for converter in converters:
            converter.events.close()


if __name__ == "__main__":
    main()
