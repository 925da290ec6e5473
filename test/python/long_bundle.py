"""`make bundle` with nvcc: the programs are built, they start without a GPU, and together they are small enough."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["BUILD_DIR"])
PROGRAMS = [BUILD / "gpu" / name for name in ("train_gpt", "model_probe", "op_check", "kernels")]

pytestmark = pytest.mark.skipif(not PROGRAMS[-1].exists(), reason="built by nvcc with cuBLASLt, which are not both here")


def test_size(tmp_path):
    made = subprocess.run([ROOT / "dev/gpu/bundle.sh", tmp_path / "bundle", "none", *PROGRAMS], capture_output=True, text=True,
                          env={**os.environ, "PYTHON": sys.executable})
    assert made.returncode == 0, made.stderr


def test_kernels_and_ptx_conformance_are_in_it():
    listed = subprocess.run([PROGRAMS[-1], "--gtest_list_tests"], capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    for operation in ROOT.glob("dev/*.cu"):
        assert f"Lab.{operation.stem}.\n" in listed.stdout
    assert "Ptx" in listed.stdout
