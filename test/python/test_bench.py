"""The programs of `make bench-cpu` and `make bench-pipeline` work, on a model whose steps take a moment. Their speed is not
tested here.
"""

import json
import os
import re
import subprocess
import sys
import types

import program

sys.path.insert(0, str(program.ROOT / "dev/cpu"))
import bench_cpu  # noqa: E402

BENCH = program.ROOT / program.BUILD / "dev/bench_step"
# Given here, so that no large products are needed to measure them.
CEILINGS = {"flops": {"fp32": 1e11, "bf16": 2e11}, "bytes": 1e10}


def test_steps_are_timed_by_operation(capsys):
    bench = bench_cpu.Program("train_gpt", [str(BENCH), "1", *program.SMALL, "--dtype=bf16", "--micro-batch-size=8"])
    assert bench.about["tokens"] == 384 and bench.about["parameters"] > 0
    for _ in range(3):
        bench.step()
    bench.end()
    assert bench.process.returncode == 0
    assert bench.steps[-1]["loss"] < bench.steps[0]["loss"] < 6
    for number, step in enumerate(bench.steps):
        operations = step["operations"]
        assert {"encoder_forward", "attention_backward"} <= operations.keys()
        assert ("optimizer_update" in operations) == (number > 0), "a step begins with the update of the step before"
        # Two layers, and three micro-batches of eight sequences.
        assert operations["attention_forward"]["calls"] == 6
        assert operations["attention_forward"]["dtype"] == "bf16"
        assert sum(work["ms"] for work in operations.values()) < step["ms"]

    bench_cpu.print_breakdown(bench, CEILINGS)
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["operation", "calls", "ms", "of", "step", "GFLOP/s", "GB/s", "of", "ceiling"]
    assert re.fullmatch(r" +all else +[\d.]+ +[\d.]+%", rows[-1]), rows[-1]
    assert len(rows) == 2 + len(bench.steps[0]["operations"])


def test_what_no_operation_took_is_of_the_same_step(capsys):
    def step(total, add, fill):
        work = {"calls": 1, "flops": 1e6, "bytes": 1e6, "dtype": "fp32"}
        return {"ms": total, "operations": {"add": {"ms": add, **work}, "fill": {"ms": fill, **work}}}

    # The medians of the two operations are 3 and 3, that of the step is 4.5.
    steps = [step(6.5, 3, 3), step(4.5, 3, 1), step(4.5, 1, 3)]
    bench_cpu.print_breakdown(types.SimpleNamespace(steps=steps, median_ms=lambda: 4.5), CEILINGS)
    assert re.fullmatch(r" +all else +0\.50 +11\.1%", capsys.readouterr().out.splitlines()[-1])


def test_the_host_is_timed_alone():
    result = subprocess.run([BENCH, "1", *program.SMALL], input="host\n", capture_output=True, text=True, check=False,
                            timeout=60 * program.PATIENCE)
    assert result.returncode == 0 and json.loads(result.stdout.splitlines()[1])["us"] > 0, result.stderr


def test_what_is_no_command_is_one_line():
    result = subprocess.run([BENCH, "1", *program.SMALL], input="stop\n", capture_output=True, text=True, check=False,
                            timeout=60 * program.PATIENCE)
    assert result.returncode == 1
    assert result.stderr == "error: bench_step knows no command 'stop'; give ceilings, reads, host or step\n"


def test_pipelines_are_timed_and_simulated():
    schedules = ["1f1b", "interleaved"]
    command = [sys.executable, "dev/cpu/bench_pipeline.py", program.PROGRAM, "--model", "tiny", "--layers", "8", "--turns", "1",
               "--global-batch-tokens", "768", "--micro-batch-size", "3", "--schedules", *schedules]
    result = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True, check=False,
                            timeout=120 * program.PATIENCE)
    assert result.returncode == 0, result.stderr
    title, *table = [line for line in result.stdout.splitlines() if line]
    assert title.startswith("tiny, 8 layers, fp32, 4 micro-batches of 3 sequences")
    assert [row.split()[:2] for row in table[2:]] == [[stages, schedule] for stages in "24" for schedule in schedules]
    for row in table[2:]:
        step, expected, of_step, measured, simulated, ratio, means, own, waits, would = map(float, re.findall(r"[\d.]+", row.split("|", 1)[1]))
        assert abs(of_step - expected / step) < 0.01 and expected > means * measured - 1
        assert row.split("|")[1].split()[-1] == ("met" if abs(of_step - 1) <= 0.05 else "missed")
        assert 0 < measured < 2 * step and simulated > 0 and 0 < ratio < 2 and 0 < means < 2 and 0 < own <= 1 and 0 < waits < 100 and 0 < would < 100


# What bench_generation.py needs of the wheel: it takes half a millisecond for a token.
LLAMA = """
import types
__version__ = "0"
class CommonParams(types.SimpleNamespace):
    def __init__(self):
        super().__init__(model=types.SimpleNamespace(), cpuparams=types.SimpleNamespace(), cpuparams_batch=types.SimpleNamespace())
class Server:
    def __init__(self, parameters):
        assert open(parameters.model.path, "rb").read(4) == b"GGUF" and parameters.cpuparams.n_threads == 1
    def handle_completions(self, request):
        return {"timings": {"predicted_n": request["max_tokens"], "predicted_per_token_ms": 0.5}}
"""


def test_generation_is_timed_beside_llama(tmp_path):
    (tmp_path / "xllamacpp.py").write_text(LLAMA)
    command = [sys.executable, "dev/cpu/bench_generation.py", program.PROGRAM, BENCH, "--layers=1", "--tokens=9", "--turns=1",
               "--threads=1"]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"LLAMA_PYTHON": sys.executable, "PYTHONPATH": path}
    result = subprocess.run(command, cwd=program.ROOT, env=environment, capture_output=True, text=True, check=False,
                            timeout=120 * program.PATIENCE)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[3:]]
    assert [row[:3] for row in rows] == [[dtype, "1", name] for dtype in ("fp32", "bf16") for name in ("train_gpt", "llama.cpp")]
    for ours, llama in zip(rows[::2], rows[1::2]):
        median, best, tokens, least = map(float, ours[3:])
        assert median >= best > 0 and abs(tokens * median - 1e3) < 10 and least > 0
        assert abs(float(llama[7]) - median / 0.5) < 0.02


def test_a_python_without_llama_is_named():
    command = [sys.executable, "dev/cpu/bench_generation.py", program.PROGRAM, BENCH]
    result = subprocess.run(command, cwd=program.ROOT, env=os.environ | {"LLAMA_PYTHON": "/bin/false"}, capture_output=True, text=True,
                            check=False, timeout=60 * program.PATIENCE)
    assert result.returncode == 1 and result.stderr == "error: LLAMA_PYTHON=/bin/false cannot import xllamacpp; give a Python that can\n"
