"""How the parts of `make gpu-check` (dev/gpu/) handle their results and their time, and the report, without its programs."""

import pathlib
import subprocess
import sys
import types

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "dev/gpu"))
import kernel_times  # noqa: E402
import machine  # noqa: E402
import main  # noqa: E402
import part_bench  # noqa: E402
import part_first  # noqa: E402
import part_kernels  # noqa: E402
import part_lab  # noqa: E402
import part_model  # noqa: E402
import op_cases  # noqa: E402
import programs  # noqa: E402
import report  # noqa: E402
import results  # noqa: E402


def by_name(folder):
    return {line["name"]: line for line in results.read(folder / "gpu.jsonl")}


def test_results_are_written_at_once(tmp_path):
    path = tmp_path / "gpu.jsonl"
    path.write_text('{"part": "model", "name": "of another commit", "status": "passed", "commit": "old"}\n'
                    '{"part": "bench", "name": "kept", "status": "passed"}\n'
                    '{"part": "model", "name": "first", "status": "passed", "commit": "new", "detail": "replaced"}\n')
    found = results.Results(path, "model", minutes=1, commit="new")

    def look():
        return {"detail": "", "names": [line["name"] for line in results.read(path)]}

    assert found.attempt("first", look)["names"] == ["kept", "first"]
    assert found.attempt("second", look)["names"] == ["kept", "first"]
    assert found.attempt("long", look, seconds=100) == {}
    found.attempt("wrong", lambda: results.require(False, "it is wrong"))
    found.attempt("error", lambda: 1 // 0)
    assert [line["status"] for line in results.read(path)[1:]] == ["passed", "passed", "skipped", "failed", "failed"]
    assert found.failed == 2 and "ZeroDivisionError" in path.read_text()


def test_half_a_line_is_nobodys_result(tmp_path):
    """A run that was killed leaves such a line."""
    path = tmp_path / "gpu.jsonl"
    path.write_text('{"part": "bench", "name": "kept", "status": "passed", "commit": "new"}\n{"part": "mod')
    results.Results(path, "model", 1, "new").attempt("first", lambda: {"detail": "fine"})
    assert [line["name"] for line in results.read(path)] == ["kept", "first"] and path.read_text().count("\n") == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_trainer_that_hangs_is_told(monkeypatch, tmp_path):
    slow = tmp_path / "train_gpt"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setattr(programs, "TRAIN_GPT", slow)
    monkeypatch.setattr(main, "TRAINER_SECONDS", 1)
    assert main.no_gpu() == "train_gpt was ended after 1 s; does nvidia-smi answer?"


def test_a_check_of_its_own_process_that_hangs_is_ended(monkeypatch, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("import time\nprint('it hangs', flush=True)\ntime.sleep(1000)\n")
    monkeypatch.setattr(part_first, "__file__", str(script))
    monkeypatch.setattr(part_first, "GRACE_SECONDS", 2)
    with pytest.raises(results.Late, match="the check was ended after 1 s") as late:
        part_first.alone("te-fp8 against the CPU device", True, 1)
    assert late.value.output == "it hangs\n"


def test_a_part_goes_on_where_it_stopped(tmp_path):
    """Checks that passed at this commit come last. They stay passed if no time is left for them."""
    def part(commit, minutes):
        found = results.Results(tmp_path / "gpu.jsonl", "model", minutes, commit)
        tried = []

        def attempt(name):
            tried.append(name)
            if name == "late":
                raise results.TimeOver
            return {"detail": ""}

        found.attempt_all([(name, attempt, (name,), seconds) for name, seconds in (("first", 0), ("late", 0), ("long", 100), ("last", 0))])
        return tried, found.left()

    assert part("new", minutes=1) == (["first", "late", "last"], 2)
    assert part("new", minutes=2) == (["late", "long", "first", "last"], 1)
    # No passed result is lost.
    found = results.Results(tmp_path / "gpu.jsonl", "model", 1, "new")
    found.attempt("long", lambda: 1 // 0, seconds=100)
    assert found.has_passed("long") and found.left() == 1
    assert part("newer", minutes=2) == (["first", "late", "long", "last"], 1)


def test_what_passed_stays_passed_without_time(tmp_path):
    def over():
        raise results.TimeOver

    found = results.Results(tmp_path / "gpu.jsonl", "kernels", 1, "new")
    found.attempt("check", lambda: {"detail": "12 passed"})
    found.attempt("check", over)
    assert found.has_passed("check") and found.left() == 0


def run_kernels(monkeypatch, folder, take, minutes=1):
    """The part `kernels` with two suites, whose programs are take(results, command, seconds). Returns the Results."""
    found = results.Results(folder / "gpu.jsonl", "kernels", minutes, "new")
    monkeypatch.setattr(part_kernels, "list_suites", lambda: {"detail": "", "suites": ["A", "B"]})
    monkeypatch.setattr(part_kernels, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(programs, "run", lambda command, seconds: take(found, command, seconds))
    part_kernels.run(found, tiny=False)
    return found


def test_the_kernels_go_on_where_they_stopped(monkeypatch, tmp_path):
    """A sanitizer's run takes 3 of the part's 60 seconds, by its clock. The part begins no run in the last 10 seconds."""
    def take(found, command, _):
        if "--tool" not in command:
            return subprocess.CompletedProcess(command, 0, "[       OK ] A.a (1 ms)\n", "")
        found.end -= 3
        return subprocess.CompletedProcess(command, 0, "========= ERROR SUMMARY: 0 errors\n", "")

    checks = 3 + 2 * len(part_kernels.SANITIZED)
    left = run_kernels(monkeypatch, tmp_path, take).left()
    assert 0 < left < checks - 2
    again = run_kernels(monkeypatch, tmp_path, take)
    assert again.left() == again.failed == 0
    assert sum(line["status"] == "passed" for line in by_name(tmp_path).values()) == checks


@pytest.mark.parametrize("minutes, said", [(1, results.TIME_OVER), (5, "it takes longer than 100 s")])
def test_a_sanitizer_that_the_end_cuts_off_lacks_time(minutes, said, monkeypatch, tmp_path):
    def take(_, command, seconds):
        if "--tool" in command:
            raise results.Late(f"ended after {seconds} s")
        return subprocess.CompletedProcess(command, 0, "[       OK ] A.a (1 ms)\n", "")

    found = run_kernels(monkeypatch, tmp_path, take, minutes)
    cut = by_name(tmp_path)["compute-sanitizer memcheck, Ptx*"]
    assert (cut["status"], cut["detail"]) == ("skipped", said)
    assert (found.left() > 0) == (said == results.TIME_OVER)


@pytest.mark.parametrize("minutes, status", [(0.03, "skipped"), (1, "failed")])
def test_timings_of_kernels_that_the_end_cuts_off_lack_time(minutes, status, monkeypatch, tmp_path):
    """Cut off in the middle of a line. If time was left, the program is to blame."""
    slow = tmp_path / "kernels"
    slow.write_text("""#!/bin/sh
echo '{"operation": "gelu", "shape": [8], "variant": 1, "microseconds": 5, "share": 0.5}' > $2
printf '{"operation"' >> $2
exec sleep 100
""")
    slow.chmod(0o755)
    found = results.Results(tmp_path / "gpu.jsonl", "bench", minutes, "new")
    monkeypatch.setattr(programs, "KERNELS", slow)
    monkeypatch.setattr(programs.Clock, "end", found.end)
    monkeypatch.setattr(part_bench, "KERNEL_SECONDS", 2)
    found.attempt(part_bench.BESIDE, part_bench.kernels, found, False)
    cut = by_name(tmp_path)[part_bench.BESIDE]
    assert cut["status"] == status and found.failed == (status == "failed")
    assert cut["detail"] == (results.TIME_OVER if status == "skipped" else "ended after 1 timings")


def test_the_lab_goes_on_where_it_stopped(monkeypatch, tmp_path):
    """The second of two operations hangs in the first run. In the next run it comes first, and the other, timed before, hangs.
    Timings of another commit are not kept."""
    slow = tmp_path / "kernels"
    slow.write_text(f"""#!/bin/sh
[ $1 = --time ] || {{ printf 'Gelu.\\n  a\\nLab.gelu_forward.\\n  b\\nLab.matmul_forward.\\n  c\\n'; exit; }}
echo $3 >> {tmp_path}/timed
n=$(wc -l < {tmp_path}/timed)
echo "{{\\"operation\\": \\"$3\\", \\"run\\": $n}}" > $2
case $n in 2|4) printf '{{"operation"' >> $2; exec sleep 100 ;; esac
""")
    slow.chmod(0o755)
    monkeypatch.setattr(programs, "KERNELS", slow)
    monkeypatch.setattr(part_lab, "SECONDS", 0)
    monkeypatch.setattr(part_lab, "report", lambda timings: {"detail": str(results.read(timings))})

    def run(commit):
        found = results.Results(tmp_path / "gpu.jsonl", "lab", 0.03, commit)
        monkeypatch.setattr(programs.Clock, "end", found.end)
        part_lab.run(found, False)
        assert found.failed == 0
        status = [by_name(tmp_path)[f"every variant of {operation}"]["status"] for operation in ("gelu_forward", "matmul_forward")]
        return status, [(line["operation"], line["run"]) for line in results.read(tmp_path / "timings.jsonl")]

    assert run("new") == (["passed", "skipped"], [("gelu_forward", 1), ("matmul_forward", 2)])
    assert run("new") == (["passed", "passed"], [("gelu_forward", 1), ("matmul_forward", 3)])
    monkeypatch.setattr(part_lab, "SECONDS", 100)
    assert run("newer") == (["skipped", "skipped"], [])


def test_a_bench_goes_on_where_it_stopped(tmp_path):
    """Models with all results come last. The first model has all its measurements; the second lacks one turn that had no
    time."""
    found = results.Results(tmp_path / "gpu.jsonl", "bench", minutes=1, commit="new")
    models = ["124M", "1558M", "350M"]
    for model in models[:2]:
        found.add(f"{model}, turn 1, PyTorch", "passed")
        found.add(part_bench.outside(model), "skipped", "there is no profiler here")
    found.add("1558M, turn 2, PyTorch", "skipped", f"{results.TIME_OVER}; it takes about 20 s")
    assert part_bench.left_first(found, models) == ["1558M", "350M", "124M"]
    found.add("1558M, turn 2, PyTorch", "passed")
    assert part_bench.left_first(found, models) == ["350M", "124M", "1558M"]


def turn(model, program, tokens, **more):
    return {"part": "bench", "name": f"{model}, {program}", "status": "passed", "detail": "", "model": model, "program": program,
            "tokens_a_second": tokens, "flops_a_second": tokens * 1e9, "batch": 64, "clocks": {"clocks.sm": "1980 MHz"},
            "clocks_while": {"clocks.sm": "1700 MHz", "slowed by": "power cap"}} | more


def test_report():
    lines = [{"part": "bench", "name": "machine", "status": "measured", "detail": "", "gpu": "NVIDIA H200", "driver": "580.1",
              "commit": "abc1234", "date": "today"},
             {"part": "bench", "name": "rates", "status": "passed", "detail": "a large product", "product_flops_a_second": 8e14},
             turn("124M", "train_gpt, flash attention", 400_000, between_steps=0.01),
             turn("124M", "train_gpt, cudnn attention", 600_000, between_steps=0.02),
             turn("124M", "train_gpt, cudnn attention", 660_000, between_steps=0.02),
             turn("124M", "PyTorch", 500_000, outside_kernels=0.05),
             turn("1558M", "train_gpt, flash attention", 49_000, flops_a_second=494.5e12),
             {"part": "bench", "name": "124M, time outside kernels, train_gpt", "status": "passed", "detail": "", "model": "124M",
              "outside_kernels": 0.04},
             {"part": "model", "name": "a check", "status": "failed", "detail": "off by 1 | 2"},
             {"part": "model", "name": "another", "status": "passed", "detail": "fine"}]
    goals = {goal: (found, share) for goal, found, share in report.goals(lines)}
    assert goals["124M: 550,000 tokens/s"] == ("630,000", pytest.approx(630 / 550))
    assert goals["124M: 1.2 times PyTorch"] == ("1.26 times", pytest.approx(1.05))
    assert goals["1558M: 50% of 989 TFLOP/s"] == ("50.0%", pytest.approx(1.0))
    assert goals["124M: below 2% of the time outside kernels"] == ("4.00%", pytest.approx(0.5))
    text = report.markdown(lines)
    assert "# train_gpt on NVIDIA H200" in text and "commit abc1234, today" in text and "driver 580.1" in text
    assert ("| 124M | train_gpt, cudnn attention | 64 | 630,000 | 600,000 to 660,000 | 63.7% | 78.8% | 1.26 | 2.00% | 4.00% |" in text)
    assert "| 124M | PyTorch | 64 | 500,000 |  | 50.6% | 62.5% | 1.00 |  | 5.00% |" in text
    assert "| 1980 MHz | 1700 MHz |" in text and "power cap" in text
    assert "## model: 1 passed, 1 failed, 0 skipped" in text and "| FAILED | a check | off by 1 \\| 2 |" in text
    assert report.markdown([]).startswith("# train_gpt")
    # The goals are for the H100 and the H200.
    assert report.goals([{**lines[0], "gpu": "NVIDIA A100"}, *lines[1:]]) == []


def test_time_outside_kernels(tmp_path):
    """Overlapping spans count once. Time before the steps does not count."""
    file = tmp_path / "times"
    file.write_text("0 10\n100 120\n110 150\n105 107\n175 200\n19")
    spans = kernel_times.read(file)
    assert len(spans) == 5
    assert kernel_times.outside(spans) == pytest.approx(1 - 85 / 200)
    assert kernel_times.outside(spans, 100) == pytest.approx(25 / 100)
    assert kernel_times.outside(spans, 90) == pytest.approx(25 / 90)


class Losses:
    """A run with these losses."""

    def __init__(self, losses):
        self.losses = losses


@pytest.mark.parametrize("apart, passes", [(0.0099, True), (-0.0099, True), (0.0101, False), (-0.0101, False)])
def test_many_steps_end_within_one_percent(apart, passes, monkeypatch, tmp_path):
    """Only the mean of the last 20 losses counts, not the earlier ones or which of them differ."""
    losses = {"cuda": [9.0] * 180 + [2 * (1 + 2 * apart), 2.0] * 10, "cpu": [5.0] * 180 + [2.0] * 20}
    monkeypatch.setattr(programs, "train", lambda *_, device: Losses(losses[device]))
    found = results.Results(tmp_path / "gpu.jsonl", "model", 1, "new")
    found.attempt("steps", part_model.many_steps, part_model.Extent(tiny=False), tmp_path)
    assert by_name(tmp_path)["steps"]["status"] == ("passed" if passes else "failed")


@pytest.mark.parametrize("dtype, bound", [("fp32", 1e-5), ("bf16", 0.25)])
def test_losses_of_two_devices_are_within_both_their_bounds(dtype, bound, monkeypatch, tmp_path):
    """Each is within a bound of the exact loss: 1e-5 in fp32, as the project promises, and in bf16 the bound derived for the
    model."""
    model_bounds = pytest.importorskip("model_bounds")
    monkeypatch.setattr(model_bounds, "training_bound_bf16", lambda *_, **__: 0.25)
    data = types.SimpleNamespace(folder=tmp_path, options=lambda *_: [], weights={}, sizes=None, tokens=None)
    monkeypatch.setattr(part_model, "experiment", lambda *_: data)
    for apart, passes in ((1.99, True), (-1.99, True), (2.01, False), (-2.01, False)):
        losses = {"cuda": [3.0, 2.0 + apart * bound], "cpu": [3.0, 2.0]}
        monkeypatch.setattr(programs, "train", lambda *_, device="cuda", of=losses: Losses(of[device]))
        found = results.Results(tmp_path / "gpu.jsonl", "model", 1, "new")
        found.attempt("steps", part_model.against_cpu, part_model.Extent(tiny=False), tmp_path, dtype, "flash", 2)
        assert by_name(tmp_path)["steps"]["status"] == ("passed" if passes else "failed")


# The tests of the parts run them at a tiny extent.
def test_what_is_done_on_a_gpu():
    model, bench = part_model.Extent(tiny=False), part_bench.Extent(tiny=False)
    assert (model.fp32_steps, model.bf16_steps, model.long_steps, model.ranks) == (20, 5, 200, [2, 4])
    assert (bench.T, bench.V, bench.turns, bench.device, [*bench.models]) == (1024, 50304, 2, "cuda", ["124M", "1558M", "350M", "774M"])
    assert {"--model=gpt2", "--micro-batch-size=4", "--global-batch-tokens=8192"} <= set(part_first.gpt2(model, 2))
    assert set(part_kernels.SANITIZED) - {"Ptx*"} <= set(op_cases.OPERATIONS)
    assert set(part_kernels.ROUNDED_AT_RANDOM) <= set(op_cases.OPERATIONS)


@pytest.mark.parametrize("name, published", [("124M", 124_439_808), ("350M", 354_823_168), ("774M", 774_030_080), ("1558M", 1_557_611_200)])
def test_parameters_and_operations_of_a_model(name, published):
    layers, heads, channels, _ = part_bench.MODELS[name]
    assert channels // heads == 64
    assert part_bench.parameters(layers, channels, 1024, 50257) == published
    assert part_bench.flops_a_token(layers, channels, 1024, 50257) == 6 * published + 6 * layers * channels * 1024


def test_a_tool_that_hangs_says_nothing(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 30\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(machine, "SECONDS", 0.1)
    assert machine.query(["name"]) is None and machine.clocks() == {}
