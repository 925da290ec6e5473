"""What the Python tests share: the seed of this run, and the programs under test."""

import os
import pathlib
import secrets
import signal
import tempfile

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def pytest_configure(config):
    # What a shell starts in the background ignores Ctrl-C, and what that starts would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # The algorithms that the trainer chooses are kept here, and not among the user's own.
    config.cache_of_tests = tempfile.TemporaryDirectory(prefix="cache-of-tests-")
    os.environ["XDG_CACHE_HOME"] = config.cache_of_tests.name
    config.seed = int(os.environ.get("SEED", secrets.randbelow(2**31)))


def pytest_unconfigure(config):
    config.cache_of_tests.cleanup()


def pytest_report_header(config):
    return f"random operands: repeat with SEED={config.seed}"


@pytest.fixture(scope="session")
def seed(request):
    return request.config.seed


@pytest.fixture(scope="session")
def op_probe():
    """The program that runs one operation (test/probe/op_probe.cpp)."""
    build = REPOSITORY / os.environ.get("BUILD_DIR", "build")
    folder = pathlib.Path(os.environ.get("TEST_PROGRAMS", build / "test"))
    programs = sorted(folder.glob("*/op_probe"))
    assert programs, f"{folder} has no op_probe: `make test-programs` builds it"
    return programs[0]
