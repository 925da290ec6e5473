"""What a person sees of the dataset scripts: errors in one line, notes and progress. Not run by itself."""

import argparse
import contextlib
import os
import signal
import sys

from tqdm import tqdm


def fail(message):
    """Ends the script with one line: what is wrong, why, and what would do. Exit status 1."""
    sys.exit(f"error: {message}")


class Parser(argparse.ArgumentParser):
    """Its help begins with the script's own description, as it is written there."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(f"{message}; --help lists the options")


def say(message):
    """One line on standard output, beside any bar that is drawn."""
    try:
        tqdm.write(message, file=sys.stdout)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; the work goes on
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def progress(what, unit, total=None, initial=0):
    """A bar on standard error, where that is a terminal: a context with update(count)."""
    return tqdm(desc=what, total=total, initial=initial, unit=unit, unit_scale=True, disable=None, leave=False,
                dynamic_ncols=True)


def reason(error):
    """Of an OSError, what the system says; of others, their last words."""
    return getattr(error, "strerror", None) or str(error).strip().splitlines()[-1:][0] if str(error) else type(error).__name__


@contextlib.contextmanager
def naming(path):
    """Within it the errors of writing say which file they are about."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def plain_endings():
    """Within it Ctrl-C, SIGTERM and what the system refuses end the script with one line and no traceback."""
    def stop(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {reason(error)}; when that is mended, the same command goes on from here")
    except MemoryError:
        fail("memory has run out; fewer --processes take less, and the same command goes on from here")
    finally:
        signal.signal(signal.SIGTERM, before)
