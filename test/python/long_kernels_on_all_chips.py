"""Every kernel compiles for every chip from sm_80 on that the compiler knows."""

import pathlib
import re
import subprocess

import pytest

from test_kernel_report import ROOT, cuda_compiler


def chips():
    listed = subprocess.run([cuda_compiler(), "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return sorted({int(number) for number in re.findall(r"sm_(\d+)", listed)} & set(range(80, 122)))


@pytest.mark.parametrize("lab", sorted(path.stem for path in (ROOT / "dev").glob("*.cu")))
def test_compiles(lab, tmp_path):
    all_chips = chips()
    assert {80, 86, 89, 90, 100, 120} <= set(all_chips)
    codes = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in all_chips]
    fmt = ["-DFMT_CONSTEVAL=", "-DFMT_USE_CONSTEXPR=1"]
    command = [cuda_compiler(), "-std=c++20", "--threads", "0", *fmt, *codes, "-I.", "-Itest", "-c", f"dev/{lab}.cu"]
    built = subprocess.run([*command, "-o", tmp_path / "out.o"], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert built.returncode == 0, built.stderr
    assert pathlib.Path(tmp_path, "out.o").stat().st_size > 0
