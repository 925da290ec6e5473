"""--fp8: products of the blocks in 8 bits, on the CPU (on GPUs: test_simulated_fp8.py), and in plans."""

import json

import pytest

import program

SMALL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--dtype=bf16", "--device=cpu"]
ALIKE = ["--micro-batch-size=3", "--lr=1e-3", "--steps=12", "--val-every=0", "--grad-clip=0"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def train(out_dir, *options, ranks=1, scaling="delayed"):
    return program.train(out_dir, *SMALL, *ALIKE, f"--fp8={scaling}", *options, ranks=ranks, env=ONE_THREAD)


def trajectory(run):
    return [(line["loss"], line["lr"], line["skipped_steps"]) for line in run.lines]


@pytest.mark.parametrize("meshes", [
    [(1, []), (2, ["--pipeline-parallel=2"]), (2, ["--pipeline-parallel=2", "--pipeline-schedule=zb-h1"]), (1, ["--recompute=block"]),
     (1, ["--recompute=selective"])],
    [(4, ["--reduce-every=micro-batch", f"--zero-stage={stage}"]) for stage in range(4)],
    [(2, ["--tensor-parallel=2"]), (4, ["--tensor-parallel=2", "--pipeline-parallel=2"])],
], ids=["stages", "zero", "tensor"])
def test_meshes_train_the_same_run(meshes, tmp_path):
    """Bit for bit where bf16 does: the scales are those of all ranks and micro-batches."""
    runs = [train(tmp_path / str(number), *options, ranks=ranks) for number, (ranks, options) in enumerate(meshes)]
    for run in runs[1:]:
        assert trajectory(run) == trajectory(runs[0])
    assert len(runs[0].losses) == 12 and runs[0].lines[-1]["skipped_steps"] == 0


def test_a_history_survives_another_mesh(tmp_path):
    """Scales depend on the history of steps, which a checkpoint holds whole."""
    whole = train(tmp_path / "whole", "--lr-schedule=constant", "--fp8-history=3", "--checkpoint-every=8")
    train(tmp_path / "parts", "--lr-schedule=constant", "--fp8-history=3", "--steps=7")
    for steps in (8, 12):
        again = program.train(tmp_path / "parts", "--resume", f"--steps={steps}", "--device=cpu", "--pipeline-parallel=2", ranks=2, env=ONE_THREAD)
        # After one step, two of the three are those of the checkpoint.
        state, expected = (json.loads((tmp_path / f"{run}/checkpoint-{steps:08}/manifest.json").read_text())["fp8"] for run in ("parts", "whole"))
        assert state == expected
    assert trajectory(again) == trajectory(whole)
    # Four products of each of two blocks, with three operands each.
    assert [len(step) for step in state["seen"]] == [24] * 3 and state["amax"] == [max(step) for step in zip(*state["seen"])]


def test_an_evaluation_has_the_scales_of_the_checkpoint(tmp_path):
    run = program.train(tmp_path, *SMALL, *ALIKE, "--fp8=delayed", "--val-every=12", "--val-batches=4", env=ONE_THREAD)
    after = [line["val_loss"] for line in run.lines if "val_loss" in line][-1]
    text = program.run(f"--resume={tmp_path}", "--steps=0", "--sample-tokens=0", "--val-batches=4", "--device=cpu", env=ONE_THREAD).stdout
    assert f"validation after step 12: loss {after:.5f}" in text
    other = program.run(f"--resume={tmp_path}", "--steps=0", "--sample-tokens=0", "--val-batches=4", "--device=cpu", "--fp8=none", env=ONE_THREAD).stdout
    assert f"loss {after:.5f}" not in other


def test_scaling_may_begin_and_end_with_a_resume(tmp_path):
    train(tmp_path, "--steps=3", "--fp8-history=4")
    program.run(f"--out-dir={tmp_path}", "--resume", "--steps=6", "--fp8=none", "--sample-tokens=0")
    back = program.run(f"--out-dir={tmp_path}", "--resume", "--steps=9", "--fp8=delayed", "--sample-tokens=0")
    assert "the checkpoint has no history of products in 8 bits, so their scales start afresh" in back.stdout
    lines = program.Run(tmp_path).lines
    assert len(lines) == 9 and "skipped_steps" not in lines[4]


@pytest.mark.more
def test_the_loss_is_near_that_of_bf16(tmp_path):
    """The first step's differs in its bits. The mean of the last ten of 60 losses of four layers is within 1%."""
    model = ["--layers=4", "--heads=4", "--channels=128", "--seq-len=64", "--steps=60", "--lr=1e-3", "--device=cpu", "--val-every=0", "--dtype=bf16"]
    first, means = [], []
    for scaling in ("none", "current", "delayed"):
        losses = program.train(tmp_path / scaling, *model, f"--fp8={scaling}").losses
        first.append(losses[0])
        means.append(sum(losses[-10:]) / 10)
    assert len(set(first)) == 3 and len(set(means)) == 3
    assert means[1] == pytest.approx(means[0], rel=0.01) and means[2] == pytest.approx(means[0], rel=0.01)


@pytest.mark.parametrize("model", ["llama-tiny", "qwen3-tiny", "nanochat-tiny"])
def test_families_and_their_samples(model, tmp_path):
    """Packed products, a product that reads several inputs' sums, and generation with the scales of the last step."""
    run = program.train(tmp_path, f"--model={model}", "--dtype=bf16", "--fp8=delayed", "--device=cpu", "--steps=8", "--sample-tokens=20",
                        "--sample-every=4", "--val-every=4", "--val-batches=1")
    assert len(run.losses) == 8 and run.losses[-1] < run.losses[0] and run.lines[-1]["skipped_steps"] == 0


@pytest.mark.parametrize("options, line", [
    (["--gpu=a100"], "products in 8 bits: 80 against 89; add --fp8 none"),
    (["--tensor-parallel=8"], "channels of products in 8 bits: 24 against 16; add --fp8 none"),
], ids=["Ampere", "channels"])
def test_plans_without_products_in_8_bits(options, line):
    model = ["--model=gpt2", "--layers=2", "--heads=8", "--channels=64", "--gpus=8", "--precision=te-fp8"]
    result = program.run("plan", *model, *options, check=False)
    assert result.returncode == 2, result.stdout
    assert line in " ".join(result.stdout.split()), result.stdout


def test_a_plan_has_the_rate_of_8_bits():
    seconds = {}
    for precision in ("bf16", "te-fp8"):
        result = program.run("plan", "--model=llama3-8b", "--gpus=64", "--zero-stage=3", "--seq-len=8192",
                             "--global-batch-tokens=4194304", f"--precision={precision}", "--json")
        seconds[precision] = json.loads(result.stdout)["time"]["expected_seconds"]
    assert 0.6 < seconds["te-fp8"] / seconds["bf16"] < 0.9


@pytest.mark.parametrize("options, line", [
    (["--fp8=delayed"], "--fp8 delayed needs --dtype bf16, but --dtype is fp32"),
    (["--dtype=fp16", "--fp8=current"], "--fp8 current needs --dtype bf16, but --dtype is fp16"),
    (["--dtype=bf16", "--fp8=current", "--fp8-history=4"], "--fp8-history needs --fp8 delayed"),
    (["--dtype=bf16", "--fp8=delayed", "--fp8-history=0"], "--fp8-history 0 is out of range"),
    (["plan", "--model=gpt2", "--gpus=8", "--dtype=bf16", "--fp8=current"], "--fp8 current computes on the CPU only"),
])
def test_options_without_a_meaning(options, line):
    result = program.run(*options, check=False)
    assert result.returncode == 1 and line in result.stderr and result.stderr.count("\n") == 1
