"""--dtype fp16 and its loss scaling."""

import json
import re

import pytest

import boxes
import old_checkpoint
import program
import safetensors_numpy

SMALL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--dtype=fp16", "--device=cpu"]
# A micro-batch's gradient has the same bits on every mesh. The norm adds squares in another order, so it may not matter.
ALIKE = ["--micro-batch-size=3", "--lr=1e-3", "--steps=12", "--val-every=0", "--grad-clip=0"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FROM_THE_TOP = "--initial-loss-scale=1152921504606846976"  # 2^60


def train(out_dir, *options, ranks=1):
    return program.train(out_dir, *SMALL, *ALIKE, *options, ranks=ranks, env=ONE_THREAD)


def trajectory(run):
    return [(line["loss"], line["lr"], line["loss_scale"], line["skipped_steps"]) for line in run.lines]


@pytest.mark.parametrize("meshes", [
    [(1, []), (2, ["--pipeline-parallel=2"]), (2, ["--pipeline-parallel=2", "--pipeline-schedule=zb-h1"]), (1, ["--recompute=block"])],
    [(4, ["--reduce-every=micro-batch", f"--zero-stage={stage}"]) for stage in range(4)],
    [(2, ["--tensor-parallel=2"]), (4, ["--tensor-parallel=2", "--pipeline-parallel=2"])],
], ids=["stages", "zero", "tensor"])
def test_meshes_train_the_same_run(meshes, tmp_path):
    """Bit for bit, with the overflows from a scale of 2^60 on, which all ranks skip."""
    runs = [train(tmp_path / str(number), "--steps=50", FROM_THE_TOP, *options, ranks=ranks) for number, (ranks, options) in enumerate(meshes)]
    for run in runs[1:]:
        assert trajectory(run) == trajectory(runs[0])
    assert 10 < runs[0].lines[-1]["skipped_steps"] < 45


def test_a_skipped_step_changes_nothing(tmp_path):
    """The scale halves with each overflow, and the weights stay those of the start until a step is applied."""
    run = train(tmp_path / "run", FROM_THE_TOP, "--checkpoint-every=4", "--steps=8")
    assert run.column("grad_norm") == 8 * [None] and run.column("skipped_steps") == list(range(1, 9))
    assert run.column("loss_scale") == [2.0**(60 - step) for step in range(8)]
    assert len(set(run.column("lr"))) == 1  # that of the step that is not applied yet
    program.run(*SMALL, "--sample-tokens=0", "--steps=0", f"--export={tmp_path}/start.safetensors")
    start = safetensors_numpy.load(tmp_path / "start.safetensors")
    for step in (4, 8):
        weights = boxes.weights(tmp_path / f"run/checkpoint-{step:08}")
        assert all((weights[name] == value).all() for name, value in start.items())


def test_resume_continues_the_scale(tmp_path):
    whole = train(tmp_path / "whole", FROM_THE_TOP, "--steps=60", "--lr-schedule=constant", "--loss-scale-window=4")
    first = train(tmp_path / "parts", FROM_THE_TOP, "--steps=30", "--lr-schedule=constant", "--loss-scale-window=4")
    assert first.lines[-1]["skipped_steps"] > 0
    again = program.train(tmp_path / "parts", "--resume", "--steps=60", "--device=cpu", env=ONE_THREAD)
    assert trajectory(again) == trajectory(whole) and again.column("grad_norm") == whole.column("grad_norm")
    scales = whole.column("loss_scale")
    assert any(later > earlier for earlier, later in zip(scales, scales[1:])), scales
    state = json.loads((tmp_path / "parts/checkpoint-00000060/manifest.json").read_text())
    assert state["skipped_steps"] == whole.lines[-1]["skipped_steps"] and state["loss_scale"]["scale"] >= 1


def test_resume_in_another_dtype(tmp_path):
    train(tmp_path, FROM_THE_TOP, "--steps=4")
    result = program.run(f"--out-dir={tmp_path}", "--resume", "--steps=6", "--dtype=fp32", "--sample-tokens=0")
    assert "loss-scale" not in result.stderr
    back = program.run(f"--out-dir={tmp_path}", "--resume", "--steps=8", "--dtype=fp16", "--sample-tokens=0")
    assert "the checkpoint has no loss scale, so it starts afresh" in back.stdout
    lines = program.Run(tmp_path).lines
    assert "loss_scale" not in lines[4] and lines[6]["loss_scale"] == 65536 and lines[7]["skipped_steps"] >= 4


def test_resume_with_a_fixed_scale(tmp_path):
    """What says how the scale adapts is no longer of use."""
    train(tmp_path, FROM_THE_TOP, "--loss-scale-window=4", "--steps=2")
    program.run(f"--out-dir={tmp_path}", "--resume", "--steps=4", "--loss-scale=1024", "--sample-tokens=0")
    program.run(f"--out-dir={tmp_path}", "--resume", "--steps=6", "--initial-loss-scale=2048", "--sample-tokens=0")
    assert program.Run(tmp_path).column("loss_scale")[2:4] == [1024, 1024]


def test_advice_on_the_rate_counts_applied_steps(tmp_path):
    """The schedule stands still in a skipped step, and so do the advice after a run and the note of a resume."""
    options = ["--initial-loss-scale=1099511627776", "--sample-tokens=0"]
    out = program.run(f"--out-dir={tmp_path}", *SMALL, *options, "--steps=40").stdout
    last = program.Run(tmp_path).lines[-1]
    assert last["skipped_steps"] > 5 and f"--lr-schedule constant --lr {last['lr']:.3g}" in out
    again = program.run(f"--out-dir={tmp_path}", "--resume", "--steps=80", "--sample-tokens=0").stdout
    following = program.Run(tmp_path).lines[40]["lr"]
    assert f"the learning rate rises from {last['lr']:.3g} to {following:.3g}" in " ".join(again.split())


def test_a_fixed_scale_ends_at_the_tenth_overflow(tmp_path):
    result = program.run(f"--out-dir={tmp_path}", *SMALL, *ALIKE, "--sample-tokens=0", "--loss-scale=1152921504606846976", check=False)
    assert result.returncode == 1 and "step 10: the gradient overflowed in 10 steps in a row at --loss-scale" in result.stderr
    assert result.stderr.count("\n") == 1


def test_skipped_steps_in_a_row_count_across_a_resume(tmp_path):
    """Those of another scale do not count, nor those of checkpoints that do not tell them."""
    run = [f"--out-dir={tmp_path}", "--sample-tokens=0", "--steps=30"]
    program.run(*run, *SMALL, *ALIKE, "--loss-scale=1152921504606846976", "--steps=6")
    manifest = tmp_path / "checkpoint-00000006/manifest.json"

    def last_step(*options):
        result = program.run(*run, f"--resume={manifest.parent}", *options, check=False)
        assert result.returncode == 1
        return int(re.search(r"step (\d+): the gradient overflowed in 10 steps in a row", result.stderr)[1])

    assert last_step() == 10
    assert last_step("--loss-scale=576460752303423488") == 16
    told = json.loads(manifest.read_text())
    assert told.pop("skipped_in_a_row") == told["skipped_steps"] == 6
    manifest.write_text(json.dumps(old_checkpoint.sealed(told), indent=2, ensure_ascii=False) + "\n")
    assert last_step() == 16


def test_the_loss_is_that_of_fp32(tmp_path):
    """The mean of the last ten of 60 losses of four layers, within 0.5%."""
    model = ["--layers=4", "--heads=4", "--channels=128", "--seq-len=64", "--steps=60", "--lr=1e-3", "--device=cpu", "--val-every=0"]
    means = []
    for dtype in ("fp32", "fp16"):
        losses = program.train(tmp_path / dtype, *model, f"--dtype={dtype}").losses
        means.append(sum(losses[-10:]) / 10)
    assert means[1] == pytest.approx(means[0], rel=0.005) and means[1] != means[0]


@pytest.mark.parametrize("options, line", [
    (["--dtype=fp16", "--loss-scale=3"], "--loss-scale 3 is no power of two from 1 to 2^60"),
    (["--dtype=fp16", "--initial-loss-scale=0"], "--initial-loss-scale 0 is no power of two from 1 to 2^60"),
    (["--dtype=fp16", "--loss-scale=8", "--loss-scale-window=3"], "--loss-scale fixes the scale, which --loss-scale-window adapts"),
    (["--dtype=fp16", "--gradient-dtype=bf16"], "--gradient-dtype bf16 needs --dtype bf16, but --dtype is fp16"),
    (["--dtype=bf16", "--loss-scale=8"], "--loss-scale needs --dtype fp16"),
    (["--loss-scale-hysteresis=2"], "--loss-scale-hysteresis needs --dtype fp16"),
    (["plan", "--model=gpt2", "--gpus=8", "--dtype=fp16", "--attention=cudnn"], "--attention cudnn needs --dtype bf16, but --dtype is fp16"),
])
def test_options_without_a_meaning(options, line):
    result = program.run(*options, "--steps=1", check=False)
    assert result.returncode == 1 and line in result.stderr and result.stderr.count("\n") == 1
