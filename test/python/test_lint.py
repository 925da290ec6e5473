"""The quick checks of `make lint`: how the C++ files are formatted, what shellcheck and pyflakes find, and retired terms. And
the files of `make test-long` can be read."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

import prose

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Target of the Makefile: whether its tool is installed, and how to fix what it finds.
CHECKS = {
    "check-format": (lambda: shutil.which("clang-format-14"), "`make format` formats these files"),
    "check-shell": (lambda: shutil.which("shellcheck"), "mend what shellcheck names"),
    "check-python": (lambda: importlib.util.find_spec("pyflakes"), "mend what pyflakes names"),
    "check-prose": (lambda: True, "say it in the terms of docs/terms.md, in shorter lines"),
}


@pytest.mark.parametrize("target", CHECKS)
def test_is_clean(target, tmp_path):
    is_here, remedy = CHECKS[target]
    if not is_here():
        pytest.skip(f"the tool of `make {target}` is not installed; `make lint` installs it")
    # A build folder of its own: make notes its flags there. This call has no flags, but `make test` may have some.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", target, f"BUILD={tmp_path}", f"PYTHON={sys.executable}"]
    check = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    if check.returncode != 0:
        pytest.fail(f"{remedy}:\n{check.stdout}{check.stderr}", pytrace=False)


def test_long_suites_are_collected():
    """If a module that they import is removed, this test fails; otherwise only `make test-long` would."""
    files = sorted((ROOT / "test/python").glob("long_*.py"))
    assert files
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *files]
    environment = {"BUILD_DIR": str(ROOT / "build"), **os.environ}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    # NO_TESTS_COLLECTED: all of them skip themselves on this machine.
    assert found.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), found.stdout + found.stderr


# File: its text, and what is found in it.
PROSE = {
    "term.py": ("x = 1  # the rehearsal of products\n", "term.py:1: 'rehearsal' is retired, say autotune"),
    "ending.md": ("It is\nrehearsing.\n", "ending.md:2: 'rehearse' is retired, say autotune"),
    "two_lines.h": ("// It makes all values\n// again: making\n// again.\n", "two_lines.h:2: 'make again' is retired, say recompute"),
    "message.cpp": ('fail("after two meetings");\n', "message.cpp:1: 'meeting' is retired, say rendezvous"),
    "plain.cpp": ('fail("a rendezvous of all ranks");\n', None),
    "wide.h": ("// " + "x" * 120 + "\n", "wide.h:1: 123 columns, the most are 120: // " + "x" * 77),
}


@pytest.mark.parametrize("name", PROSE)
def test_retired_terms_and_wide_lines_are_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    text, finding = PROSE[name]
    (tmp_path / name).write_text(text)
    assert list(prose.findings(tmp_path / name, prose.retired_terms())) == [finding] * (finding is not None)
