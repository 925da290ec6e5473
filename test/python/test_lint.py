"""The quick checks of `make lint`: how the C++ files are formatted, and what shellcheck and pyflakes find; and that the files
of `make test-long` can be read."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Target of the Makefile: whether its tool is here, and what mends what it finds.
CHECKS = {
    "check-format": (lambda: shutil.which("clang-format-14"), "`make format` formats these files"),
    "check-shell": (lambda: shutil.which("shellcheck"), "mend what shellcheck names"),
    "check-python": (lambda: importlib.util.find_spec("pyflakes"), "mend what pyflakes names"),
}


@pytest.mark.parametrize("target", CHECKS)
def test_is_clean(target, tmp_path):
    is_here, remedy = CHECKS[target]
    if not is_here():
        pytest.skip(f"the tool of `make {target}` is not installed; `make lint` installs it")
    # A build folder of its own: make notes its flags there, and those of a `make test` may differ from none.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", target, f"BUILD={tmp_path}", f"PYTHON={sys.executable}"]
    check = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    if check.returncode != 0:
        pytest.fail(f"{remedy}:\n{check.stdout}{check.stderr}", pytrace=False)


def test_long_suites_are_collected():
    """Otherwise what they import could go, and only `make test-long` would tell."""
    files = sorted((ROOT / "test/python").glob("long_*.py"))
    assert files
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *files]
    environment = {"BUILD_DIR": str(ROOT / "build"), **os.environ}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    # The second where all of them skip themselves here.
    assert found.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), found.stdout + found.stderr
