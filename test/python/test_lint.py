"""The quick checks of `make lint`: how the C++ files are formatted, and what shellcheck and pyflakes find; and that the files
of `make test-long` can be read."""

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
    "check-prose": (lambda: True, "mend these sentences (docs/terms.md, test/python/prose.py)"),
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


PROSE = {
    "dangling.h": ("// Of two ranks the first one counts.\n", "opens with a dangling 'Of'"),
    "second.cpp": ("int x;  // The first. Where it ends\n// no, this is another comment\n", "opens with a dangling 'Where'"),
    "words.md": ("A line.\nThe " + "word " * 35 + "end.\n", "37 words, the most are 35"),
    "cell.md": ("| a | Beside the shards nothing is kept |\n|---|---|\n", "opens with a dangling 'Beside'"),
    "doc.py": ('"""Behind this nothing follows."""\n', "opens with a dangling 'Behind'"),
    "hash.sh": ("# What is left over goes.\n", "opens with a dangling 'What'"),
    "term.py": ("x = 1  # the rehearsal of products\n", "'rehearsal' is retired, say autotune"),
}


@pytest.mark.parametrize("name", PROSE)
def test_a_sentence_that_must_be_read_twice_is_found(name, tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    text, finding = PROSE[name]
    (tmp_path / name).write_text(text)
    assert [finding in found for found in prose.findings(tmp_path / name, prose.retired_terms())] == [True]


def test_questions_code_and_plain_sentences_are_no_findings(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    (tmp_path / "plain.md").write_text("What is a mesh? It has ranks.\n\n    Of code nothing is read\n\n`Of` is a word.\n")
    (tmp_path / "plain.cpp").write_text('const char* text = "// Of a string";  // Officially, a rank counts.\n//    Of a picture\n')
    for name in ("plain.md", "plain.cpp"):
        assert list(prose.findings(tmp_path / name, prose.retired_terms())) == []
