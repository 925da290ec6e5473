"""The output of the dataset scripts: errors in one line, notes and progress. Not run by itself."""

import argparse
import contextlib
import os
import signal
import sys

from tqdm import tqdm


def fail(message):
    """Ends the script with one line: what is wrong, why, and what to do. Exit status 1."""
    sys.exit(f"error: {message}")


class Parser(argparse.ArgumentParser):
    """A parser whose help begins with the script's own description, with its line breaks."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(f"{message}; --help lists the options")


def say(message):
    """Prints one line on standard output without disturbing a progress bar."""
    try:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; continue without output
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def progress(what, unit, total=None, initial=0):
    """A progress bar on standard error, only on a terminal: a context with update(count)."""
    return tqdm(desc=what, total=total, initial=initial, unit=unit, unit_scale=True, disable=None, leave=False,
                dynamic_ncols=True)


def reason(error):
    """The system's message for an OSError; for other errors, the last line of the message."""
    return getattr(error, "strerror", None) or str(error).strip().splitlines()[-1:][0] if str(error) else type(error).__name__


@contextlib.contextmanager
def naming(path):
    """Makes errors of writing in the block name the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def plain_endings(again="continues from here"):
    """Makes Ctrl-C, SIGTERM and system errors in the block end the script with one line and no traceback. `again` is
    what the same command does then."""
    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command {again}", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {reason(error)}; after fixing that, the same command {again}")
    except MemoryError:
        fail(f"memory ran out; fewer --processes need less, and the same command {again}")
    finally:
        signal.signal(signal.SIGTERM, before)
