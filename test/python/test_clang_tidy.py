"""clang-tidy finds nothing in any C++ and CUDA file: the part of `make lint` that takes minutes. (test_lint.py has the rest.)"""

import os
import subprocess

import pytest

import program

# The build belongs to the make that started the tests, and its sanitizers change nothing here.
pytestmark = pytest.mark.skipif("SANITIZE" in os.environ, reason="clang-tidy reads the same files with and without sanitizers")


def test_no_file_has_a_finding():
    installed = subprocess.run(["scripts/deps.sh", "lint"], cwd=program.ROOT, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    command = ["make", "clang-tidy", "--keep-going", f"--jobs={os.cpu_count()}", "--output-sync=target", f"BUILD={program.BUILD}"]
    check = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True)
    if check.returncode != 0:
        findings = [line for line in check.stdout.splitlines() if not line.startswith(("clang-tidy ", "compile "))]
        pytest.fail("\n".join(["mend what clang-tidy names:", *findings]) + "\n" + check.stderr, pytrace=False)
