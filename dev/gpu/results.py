"""The results of a check: a JSON line for each result, written as soon as it is known, and the time limit of a part."""

import contextlib
import json
import time
import traceback

TIME_OVER = "the part's time was over"
LAST_LINES = 50  # of a program's output, in the line of a failure


class CheckFailed(Exception):
    """A result is wrong; the message says how. `output` is what the program printed, if one failed."""

    def __init__(self, message, output=""):
        super().__init__(message)
        self.output = output


class Late(CheckFailed):
    """A program took longer than its limit, or than the time that the part had left."""


class Skipped(Exception):
    """This machine cannot do the check; the message says why."""


class TimeOver(Skipped):
    """The part has no time left for the check; another run of it may have."""

    def __init__(self):
        super().__init__(TIME_OVER)


class Results:
    """The lines of one part of the check, in a file that also holds those of other parts.

    A line replaces an earlier one of the same part and name. A part's lines of other commits are removed when it begins.
    """

    def __init__(self, path, part, minutes, commit):
        self.path, self.part, self.commit = path, part, commit
        self.end = time.monotonic() + 60 * minutes
        self.failed = 0
        self.keep(lambda line: line["part"] != part or line.get("commit") == commit)

    def keep(self, wanted):
        kept = "".join(json.dumps(line) + "\n" for line in read(self.path) if wanted(line))
        if self.path.exists() and self.path.read_text() != kept:
            replace_text(self.path, kept)

    def has_passed(self, name):
        """Whether the check passed or measured at this commit, in this run of the part or an earlier one."""
        return any((line["part"], line["name"]) == (self.part, name) and line["status"] in ("passed", "measured")
                   for line in read(self.path))

    def left(self):
        """The number of the part's checks that still lack time."""
        return sum(line["part"] == self.part and line["status"] == "skipped" and line["detail"].startswith(TIME_OVER)
                   for line in read(self.path))

    def left_first(self, checks):
        """Sorts checks, which are tuples that begin with the name. Checks that passed at this commit come last, so that a new
        run of the part continues where the last one stopped."""
        return sorted(checks, key=lambda check: self.has_passed(check[0]))

    def attempt_all(self, checks):
        """Attempts each (name, check, arguments, seconds), like attempt()."""
        for name, check, arguments, seconds in self.left_first(checks):
            self.attempt(name, check, *arguments, seconds=seconds)

    def lack_time(self, name, detail, **figures):
        """Adds a skipped check, unless it passed before."""
        if not self.has_passed(name):
            self.add(name, "skipped", detail, **figures)

    def seconds_left(self):
        return self.end - time.monotonic()

    def add(self, name, status, detail="", **figures):
        """Adds a line. The status is passed, failed, skipped, or measured, if it cannot fail."""
        self.failed += status == "failed"
        self.keep(lambda line: (line["part"], line["name"]) != (self.part, name))
        line = {"part": self.part, "name": name, "status": status, "detail": detail, **figures, "commit": self.commit}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{status:8}  {self.part}: {name}{': ' if detail else ''}{detail}", flush=True)

    def attempt(self, name, check, *arguments, seconds=0):
        """Calls check(*arguments), which passes unless it raises. It returns a dictionary, which goes into the line; its
        status is `measured` if the check cannot fail.

        The check is skipped if fewer than `seconds` are left. Returns the dictionary, or {} if the check did not pass.
        """
        if seconds > 0 and self.seconds_left() < seconds:
            self.lack_time(name, f"{TIME_OVER}; it takes about {seconds} s")
            return {}
        start = time.monotonic()
        try:
            found = check(*arguments)
        except TimeOver as reason:
            self.lack_time(name, str(reason))
        except Skipped as reason:
            self.add(name, "skipped", str(reason))
        except CheckFailed as failure:
            taken = round(time.monotonic() - start, 1)
            if isinstance(failure, Late) and self.seconds_left() < 1:
                self.lack_time(name, TIME_OVER, seconds=taken)
            else:
                output = {"output": "\n".join(failure.output.splitlines()[-LAST_LINES:])} if failure.output else {}
                self.add(name, "failed", str(failure), seconds=taken, **output)
        except Exception as error:  # any other error must not hide the other results
            traceback.print_exc()
            self.add(name, "failed", f"{type(error).__name__}: {error}", seconds=round(time.monotonic() - start, 1))
        else:
            self.add(name, **{"status": "passed"} | found, seconds=round(time.monotonic() - start, 1))
            return found
        return {}


def read(path):
    """The complete lines; a run that was killed may have left an incomplete one."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def replace_text(path, text):
    """Replaces a file's text. If the process is killed, the file has either the old or the new text."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


def require(good, message):
    if not good:
        raise CheckFailed(message)
