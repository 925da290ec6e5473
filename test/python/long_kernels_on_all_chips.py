"""Every kernel compiles for every chip from sm_80 on that the compiler knows. The kernels of llmc/ spill no more than the known
amounts."""

import pathlib
import re
import subprocess
import sys

import pytest

from test_kernel_report import OF_LLMC, READER, ROOT, cuda_compiler, parse

# Bytes of stack, at most. llmc/device/cuda/attention_forward.cuh gives the reason.
KNOWN_SPILLS = {"attention_forward_kernel6": 16}


def chips():
    listed = subprocess.run([cuda_compiler(), "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return sorted({int(number) for number in re.findall(r"sm_(\d+)", listed)} & set(range(80, 122)))


SOURCES = sorted(path.relative_to(ROOT) for folder in ("llmc/device/cuda", "dev") for path in (ROOT / folder).glob("*.cu"))


@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_compiles(source, tmp_path):
    all_chips = chips()
    assert {80, 86, 89, 90, 100, 120} <= set(all_chips)
    codes = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in all_chips]
    fmt = ["-DFMT_CONSTEVAL=", "-DFMT_USE_CONSTEXPR=1"]
    command = [cuda_compiler(), "-std=c++20", "--threads", "0", *fmt, *codes, "-Xptxas", "-v", "-I.", "-Itest", "-c", source]
    built = subprocess.run([*command, "-o", tmp_path / "out.o"], cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert built.returncode == 0, built.stderr
    assert pathlib.Path(tmp_path, "out.o").stat().st_size > 0
    (tmp_path / "log").write_text(built.stderr)
    report = parse(subprocess.run([sys.executable, READER, tmp_path / "log"], capture_output=True, text=True, check=True).stdout)
    assert {chip for chip, _ in report} == set(all_chips)
    for (chip, name), (_, stack, spills, *_) in report.items():
        known = max((most for kernel, most in KNOWN_SPILLS.items() if kernel in name), default=0) if chip >= 100 else 0
        assert not name.startswith(OF_LLMC) or (stack <= known and (stack or not spills)), f"{name} on sm_{chip}: {stack} bytes of stack"
