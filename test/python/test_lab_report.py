"""The report of `make bench` from invented timings: every figure in its place, and a picture."""

import json
import os
import pathlib
import subprocess
import sys

REPORT = pathlib.Path(__file__).resolve().parents[2] / "dev/lab/report.py"


KERNEL = {"name": "a_kernel5", "registers": 40, "local_bytes": 0, "shared_bytes": 2048, "occupancy": 0.75}


def timing(operation, variant, microseconds, block=128, flops=0.0, **more):
    size = 2e9
    return {"operation": operation, "dtype": "bf16", "shape": [8192, 768], "sizes": ["rows", "channels"],
            "variant": variant, "story": "a story", "block": block, "microseconds": microseconds, "bytes": size,
            "kernels": [KERNEL] if block else [], "flops": flops, "share": 0.5, "gpu": "Test GPU 80GB",
            "copy_bytes_a_second": 2e12, "product_flops_a_second": 7e14} | more


LINES = [timing("layernorm_forward", "1", 4000), timing("layernorm_forward", "5", 2000),
         timing("matmul_forward", "5", 1000, flops=4e11), timing("matmul_forward", "cuBLASLt", 800, block=0, flops=4e11)]


def report(tmp_path, lines, **environment):
    (tmp_path / "timings").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return subprocess.run([sys.executable, REPORT, tmp_path / "timings", tmp_path / "results"], capture_output=True, text=True,
                          env={**os.environ, **environment})


def test_tables_and_picture(tmp_path):
    done = report(tmp_path, LINES)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results/test-gpu-80gb.md").read_text()
    assert "# The kernel lab on one Test GPU 80GB" in text
    assert "2000 GB/s (bytes read and written)" in text and "700 TFLOP/s" in text
    assert "## layernorm_forward, bf16, 8192 rows, 768 channels" in text
    assert "| 5 | a story | 128 | 2000.0 | 1000 |  | 50% | a_kernel5: 40, 2048, 75% |" in text
    assert "| cuBLASLt | a story |  | 800.0 | 2500 | 500.0 | 50% |  |" in text
    picture = (tmp_path / "results/test-gpu-80gb.svg").read_text()
    assert picture.startswith("<?xml") and "</svg>" in picture


def test_without_matplotlib_there_is_no_picture(tmp_path):
    (tmp_path / "matplotlib.py").write_text("raise ImportError('none here')\n")
    done = report(tmp_path, LINES, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "No picture" in (tmp_path / "results/test-gpu-80gb.md").read_text()
    assert [path.suffix for path in (tmp_path / "results").iterdir()] == [".md"]


def test_a_library_that_was_not_there(tmp_path):
    keys = ("operation", "dtype", "shape")
    missing = {key: LINES[0][key] for key in keys} | {"variant": "cuDNN", "missing": "no library here"}
    done = report(tmp_path, [*LINES[:2], missing, *LINES[2:]])
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "results/test-gpu-80gb.md").read_text()
    assert "75% |\n\ncuDNN was not timed: no library here\n\n## matmul_forward" in text
    assert "| cuDNN" not in text


def test_without_timings(tmp_path):
    done = report(tmp_path, [])
    assert done.returncode == 1 and "has no timings" in done.stderr
