"""The programs of `make bench-cpu` and `make bench-pipeline` work, on a model whose steps take a moment. Their speed is not
tested here.
"""

import json
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
        assert ("adamw" in operations) == (number > 0), "a step begins with the update of the step before"
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
    assert result.stderr == "error: bench_step knows no command 'stop'; give ceilings, host or step\n"


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
