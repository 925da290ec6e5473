#!/usr/bin/env python3
"""Converts the metrics of runs to TensorBoard's event files, and follows growing runs.

    scripts/tensorboard.py runs/a                         writes runs/a/tensorboard/
    scripts/tensorboard.py runs/a runs/b --follow         goes on as the runs do, until Ctrl-C
    scripts/tensorboard.py runs/* --logdir /tmp/events    writes /tmp/events/a/, /tmp/events/b/ ...
    tensorboard --logdir runs

An event holds all numbers of a step, so a step is in a file completely or not at all. A second call continues after
the last step in the files. If these differ from the run's beginning, the files are written again from scratch. If a
run was resumed from an earlier step, TensorBoard is told to forget the later steps, as by any restarted program.
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

# tensorboardX imports PyTorch, which takes seconds to load; this script has no tensors.
sys.modules.setdefault("torch", None)
from tensorboardX import summary as summaries  # noqa: E402
from tensorboardX.event_file_writer import EventsWriter  # noqa: E402
from tensorboardX.proto.event_pb2 import Event, SessionLog  # noqa: E402
from tensorboardX.proto.summary_pb2 import Summary  # noqa: E402

from metrics import Follower, MetricsError, distinct_names, end_as_by_ctrl_c, find_metrics, is_number, require_interval  # noqa: E402

SUFFIX = ".train_gpt"  # distinguishes our files from others in the same folder
TAGS = {"loss": "train/loss", "val_loss": "val/loss", "tokens_per_s": "tokens_per_second",
        "hellaswag_acc": "hellaswag/acc", "hellaswag_acc_norm": "hellaswag/acc_norm"}
NO_TAGS = {"step", "time"}


def tag_of(name):
    return TAGS.get(name, name)


def scalars(run, row):
    """The numbers of a step by tag. Includes a training loss that is not finite, which TensorBoard marks."""
    values = {tag_of(name): value for name, value in run.columns.row(row).items() if name not in NO_TAGS}
    for name in ("loss", "grad_norm"):
        if run.trained[row] and math.isnan(run[name][row]) and name in run.columns.names():
            values[tag_of(name)] = math.nan
    return values


def as_float(value):
    """The value in single precision, as an event has it."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def step_event(run, row, wall_time):
    values = [Summary.Value(tag=tag, simple_value=as_float(value)) for tag, value in scalars(run, row).items()]
    return Event(wall_time=wall_time, step=int(run.steps[row]), summary=Summary(value=values))


def wall_times(run, last_change):
    """The end times of the steps: as recorded, or counted back from the next step. The last one comes from the file's
    change time."""
    times, following, gap = [], last_change, 0.0
    for said, seconds in zip(reversed(run["time"]), reversed(run.step_seconds())):
        following = following - gap if math.isnan(said) else said
        gap = 0.0 if math.isnan(seconds) else seconds
        times.append(following)
    return times[::-1]


def about_events(run, wall_time):
    """The description of the run, for TensorBoard's tabs Text and HParams."""
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
    """Whether the event is from about_events."""
    return any(value.HasField("metadata") for value in event.summary.value)


def whole_events(path):
    """The events of a file, without an incomplete one, such as the last of a killed call. Lengths are not verified."""
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
        """The number of the run's rows that the files hold, as TensorBoard reads them; None if they hold anything
        else."""
        there = []  # (step, numbers), as bytes, because NaN is not equal to itself
        try:
            for event in itertools.chain.from_iterable(map(whole_events, self.files())):
                if event.session_log.status == SessionLog.START:
                    there = [known for known in there if known[0] < event.step]
                elif event.HasField("summary") and not is_about(event):
                    there.append((event.step, event.summary.SerializeToString()))
        except Exception:  # protobuf's exceptions for a damaged file
            return None
        wanted = (step_event(run, row, 0.0) for row in range(len(there)))
        same = len(there) <= len(run) and all(known == (event.step, event.summary.SerializeToString())
                                              for known, event in zip(there, wanted))
        return len(there) if there and same else None

    def begin(self, forget_from=None, in_place_of=()):
        """Begins a new file. TensorBoard forgets the steps from `forget_from` on. The files `in_place_of` are
        removed."""
        self.close()
        self.folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files in the order of their names, and does not read a file again.
        files = self.files()
        number = max([0, *(int(path.name.split(".")[1]) for path in files)]) + 1
        empty = {path for path in files if path.stat().st_size == 0}  # every attempt on a full disk leaves one
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
    """One run: writes new metrics to its events."""

    def __init__(self, path, name, folder):
        self.follower = Follower(path, name)
        self.events = EventFolder(folder)
        self.rows = None  # rows that the events hold; unknown before the first look

    def advance(self):
        """Writes new steps; returns their number. After an error it is unknown which rows the files
        hold. The next call then compares them with the run again, and continues in a new file."""
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
        with contextlib.suppress(OSError):  # a full disk: buffered data cannot be written
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
            kept = None  # all of it has changed
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
    """The folder of a run's event files."""
    if logdir:
        return pathlib.Path(logdir) / name
    return path.parent / "tensorboard" / ("" if path.name == "metrics.jsonl" else path.stem)


def report(converter, steps):
    text = f"{steps:,} step{'' if steps == 1 else 's'}" if steps else "nothing new"
    print(f"{converter.follower.run.name}: {text} into {converter.events.folder}", flush=True)


def follow(converters, interval):
    """Follows the runs until the script is ended. An invalid file may become valid later, so each complaint is
    printed once."""
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
    parser = argparse.ArgumentParser(description="Convert the metrics of runs to TensorBoard's event files.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's directory or its metrics file")
    parser.add_argument("--logdir", metavar="DIR", help="write a folder per run into DIR (default: tensorboard/ in each run's "
                        "directory)")
    parser.add_argument("--follow", action="store_true", help="keep converting while the runs go on, including runs that begin later")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="with --follow, look for new lines this often (default: 2)")
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
        pass  # Following ends this way.
    finally:
        for converter in converters:
            converter.events.close()


if __name__ == "__main__":
    main()
