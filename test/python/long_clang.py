"""`make CXX=clang++`: the trainer and the unit tests are built without a warning, the tests pass, and a model trains."""

import os
import pathlib
import shutil
import subprocess

import pytest

import program

ROOT = program.ROOT
BUILD = pathlib.Path(program.BUILD, "clang")

pytestmark = pytest.mark.skipif(not shutil.which("clang++"), reason="clang++ is not installed; `make deps CXX=clang++` installs it")


@pytest.fixture(scope="module")
def built():
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "SANITIZE")}
    command = ["make", f"--jobs={os.cpu_count()}", "CXX=clang++", "CUDA=0", "WERROR=1", f"BUILD={BUILD}", f"{BUILD}/train_gpt", f"{BUILD}/test/unit"]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]


def test_unit_tests_pass(built, tmp_path):
    done = subprocess.run([BUILD / "test/unit", "--gtest_brief=1"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_model_trains_as_with_gcc(built, tmp_path):
    """The first losses agree up to rounding."""
    options = [*program.SMALL, "--steps=20", "--device=cpu", "--lr=1e-3"]
    runs = [program.train(tmp_path / name, *options, program=binary) for name, binary in (("clang", BUILD / "train_gpt"), ("gcc", program.PROGRAM))]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-5)
