"""Defaults: batches for any number of processes, the warmup, the lines that are printed, and the commands that are
suggested after a run."""

import json
import pathlib
import re
import shlex
import subprocess

import numpy as np
import pytest

import program
import safetensors_numpy
from refused import one_error

TINY = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16"]
QUIET = ["--sample-tokens=0", "--val-batches=1"]
BATCH = 24  # sequences of the default batch


@pytest.mark.parametrize("ranks", [1, 2, 5, 7, 16])
def test_the_default_batch_fits_any_number_of_processes(ranks, tmp_path):
    result = program.run(*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/run", ranks=ranks)
    sequences = -(-BATCH // ranks) * ranks
    assert program.Run(tmp_path / "run").column("tokens") == [16 * sequences]
    note = f"note: --global-batch-tokens is {16 * sequences} ({sequences} sequences instead of {BATCH}), which the processes share evenly"
    assert (note in result.stdout) == (sequences != BATCH)


def test_the_default_batch_fits_an_interleaved_pipeline(tmp_path):
    options = ["--layers=10", *TINY[1:], *QUIET, "--steps=1", "--pipeline-parallel=5", "--virtual-stages=2", f"--out-dir={tmp_path}/run"]
    assert "(25 sequences instead of 24)" in program.run(*options, ranks=5).stdout


def test_a_batch_that_was_given_is_not_changed():
    result = program.run(*TINY, "--steps=1", f"--global-batch-tokens={16 * BATCH}", ranks=5, check=False)
    assert "--global-batch-tokens 384 is not a multiple of 80" in one_error(result.stderr)


def test_a_resumed_run_keeps_its_batch_and_warmup_on_another_mesh(tmp_path):
    """On four processes the default batch would be 24 sequences, and with 40 steps the default warmup would be 4."""
    program.run(*TINY, *QUIET, "--steps=20", f"--out-dir={tmp_path}/run", ranks=7)
    program.run(*QUIET, "--steps=40", "--resume", f"--out-dir={tmp_path}/run", ranks=4)
    run = program.Run(tmp_path / "run")
    assert run.column("tokens") == [16 * 28 * step for step in range(1, 41)]
    configuration = run.record["configuration"]
    assert (configuration["warmup-steps"], configuration["layers"]) == (2, 2)
    # Its configuration is whole again: it holds what the checkpoint gave.
    assert {"layers = 2", "warmup-steps = 2"} <= set((tmp_path / "run/config.toml").read_text().splitlines())
    # An evaluation may share the windows as it likes.
    program.run(*QUIET, "--steps=0", f"--resume={tmp_path}/run", ranks=5)


@pytest.mark.parametrize(("steps", "warmup"), [(30, 3), (9, 0)])
def test_the_default_warmup_is_a_tenth_of_the_steps(steps, warmup, tmp_path):
    run = program.train(tmp_path, *TINY, *QUIET, f"--steps={steps}", "--lr=1e-3")
    rates = run.column("lr")
    assert run.record["configuration"]["warmup-steps"] == warmup
    assert rates.index(max(rates)) == max(warmup - 1, 0) and max(rates) == pytest.approx(1e-3)


def test_steps_0_plans_what_does_not_fit():
    result = program.run("--model=gpt3-6.7b", "--layers=2000", "--device=cpu", "--steps=0")
    assert re.search(r"^note: does not fit here: needs [\d.]+ TiB, [\d.]+ [KMGT]iB free", result.stdout, re.MULTILINE), result.stdout
    assert "  model       " in result.stdout


def test_a_refusal_names_the_model_that_was_named():
    """Not --layers, which nobody gave."""
    available = int(re.search(r"MemAvailable: +(\d+) kB", pathlib.Path("/proc/meminfo").read_text())[1]) << 10
    needed = 100 << 30
    if available > needed:
        pytest.skip(f"this machine has {available >> 30} GiB of memory, which is enough for the model")
    refused = program.run("--model=gpt3-6.7b", "--device=cpu", "--steps=1", check=False)
    assert one_error(refused.stderr).startswith("--model gpt3-6.7b: ") and "give a smaller --model" in refused.stderr


def shown_steps(text):
    return [int(step) for step in re.findall(r"^ *(\d+)  +\d+\.\d+  ", text, re.MULTILINE)]


@pytest.mark.parametrize(("options", "steps"), [([], [1, 10, 20, 25]), (["--log-every=7"], [1, 7, 14, 21, 25]), (["--log-every=1"], list(range(1, 26))),
                                                (["--quiet"], [])])
def test_lines_of_steps(options, steps, tmp_path):
    text = program.run(*TINY, "--sample-tokens=4", "--val-batches=1", "--steps=25", f"--out-dir={tmp_path}", *options).stdout
    assert shown_steps(text) == steps
    assert len(program.Run(tmp_path).lines) == 25  # the metrics have all
    assert "validation after step 25" in text and "go on with" in text and "sample after step 25" in text
    assert ("  parameters  " in text) == (options != ["--quiet"])


def commands(text):
    """The commands after a run, by what they are for."""
    return dict(re.findall(r"^([a-z ]+ with)\n  (.*)$", text, re.MULTILINE))


def test_a_finished_run_suggests_what_to_do_next(tmp_path):
    folder = tmp_path / "a run"
    text = program.run(*TINY, *QUIET, "--steps=20", "--lr=1e-3", f"--out-dir={folder}", "--prompt=x").stdout
    said = commands(text)
    assert list(said) == ["go on with", "generate text with", "draw the loss with"]
    for command in said.values():
        done = subprocess.run(shlex.split(command), cwd=program.ROOT, capture_output=True, text=True, timeout=300 * program.PATIENCE)
        assert done.returncode == 0, done.stderr
        assert "rises" not in done.stdout
    assert (folder / "loss.png").exists()
    rates = program.Run(folder).column("lr")
    # It goes on at the last rate, in the three digits of the printed command.
    assert len(rates) == 40 and rates[20:] == pytest.approx([rates[19]] * 20, rel=5e-3)


def test_a_schedule_that_begins_again_is_warned_of(tmp_path):
    folder = tmp_path / "run"
    program.run(*TINY, *QUIET, "--steps=20", "--lr=1e-3", f"--out-dir={folder}")
    text = program.run(*QUIET, "--steps=40", "--resume", f"--out-dir={folder}").stdout
    rates = program.Run(folder).column("lr")
    found = re.search(r"the learning rate rises from (\S+) to (\S+), because the earlier schedule ended at step 20; to keep it, give (.*)", text)
    assert [float(found[1]), float(found[2])] == pytest.approx(rates[19:21], rel=5e-3)
    assert found[3] == f"--lr-schedule constant --lr {found[1]}"


def test_a_higher_rate_that_was_given_is_no_surprise(tmp_path):
    folder = tmp_path / "run"
    program.run(*TINY, *QUIET, "--steps=4", "--lr=1e-3", "--lr-schedule=constant", f"--out-dir={folder}")
    text = program.run(*QUIET, "--steps=8", "--lr=2e-3", "--lr-schedule=constant", "--resume", f"--out-dir={folder}").stdout
    assert "rises" not in text and "note: --lr is 0.002, but was 0.001 in the checkpoint" in text


def test_a_micro_batch_that_was_given_fits_the_default_batch(tmp_path):
    text = program.run(*TINY, *QUIET, "--steps=1", "--micro-batch-size=16", f"--out-dir={tmp_path}/run").stdout
    assert "note: --global-batch-tokens is 512 (32 sequences instead of 24)" in text
    for size, why in ((2**14 + 1, " is out of range"), (2**40, ": ")):
        refused = program.run(*TINY, "--steps=1", f"--micro-batch-size={size}", ranks=2, check=False)
        assert one_error(refused.stderr).startswith(f"--micro-batch-size {size}{why}")


def test_a_stopped_run_suggests_to_go_on_only(tmp_path):
    """A longer run that goes on within its schedule is no reason for a warning."""
    program.run(*TINY, *QUIET, "--steps=20", "--checkpoint-every=10", f"--out-dir={tmp_path}/run")
    text = program.run(*QUIET, "--steps=20", f"--resume={tmp_path}/run/checkpoint-00000010", f"--out-dir={tmp_path}/other").stdout
    assert "rises" not in text


def test_the_best_checkpoint_is_kept(tmp_path):
    """The rate is so high that the loss rises again, so the best validation is not the last."""
    options = [*TINY, *QUIET, "--steps=40", "--val-every=5", "--keep-best", f"--out-dir={tmp_path}/run", "--lr-schedule=constant"]
    for lr in ("3e-2", "1e-1", "3e-1"):
        text = program.run(*options, f"--lr={lr}", "--grad-clip=0", "--overwrite").stdout
        losses = {line["step"]: line["val_loss"] for line in program.Run(tmp_path / "run").lines if "val_loss" in line}
        best = min(losses, key=losses.get)
        if best != 40:
            break
    assert best != 40
    [kept] = (tmp_path / "run/best").iterdir()
    assert kept.name == f"checkpoint-{best:08}" and f"best kept   {kept}" in text
    looked = program.run(*QUIET, "--steps=0", f"--resume={tmp_path}/run/best").stdout
    assert float(re.search(r"validation after step \d+: loss (\S+)", looked)[1]) == pytest.approx(losses[best], abs=1e-5)
    # A resumed run knows the best loss of the run before it.
    last = max(losses)
    again = program.run(*QUIET, "--steps=45", "--val-every=5", "--keep-best", "--resume", f"--out-dir={tmp_path}/run", "--lr=1e-9").stdout
    assert program.Run(tmp_path / "run").lines[-1]["val_loss"] > losses[best] and last == 40
    assert list((tmp_path / "run/best").iterdir()) == [kept] and "best kept" not in again


def test_keep_best_needs_validations():
    refused = program.run(*TINY, "--keep-best", "--val-every=0", check=False)
    assert one_error(refused.stderr) == "--keep-best needs validations during training; give --val-every 1 or more"


@pytest.mark.parametrize("named", ["run", "checkpoint", "file"])
def test_init_takes_a_checkpoint(named, tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=3", "--checkpoint-every=2")
    checkpoint = first.out_dir / "checkpoint-00000003"
    given = {"run": first.out_dir, "checkpoint": checkpoint, "file": checkpoint / "model.safetensors"}[named]
    sizes = TINY if named == "file" else []  # a directory knows its model
    second = program.train(tmp_path / "second", *sizes, *QUIET, "--steps=2", f"--init={given}", "--lr=0", ranks=2)
    assert second.column("step") == [1, 2]
    weights, others = (safetensors_numpy.load(path) for path in (checkpoint / "model.safetensors",
                                                                 second.out_dir / "checkpoint-00000002/model.safetensors"))
    assert all(np.array_equal(weights[name], others[name]) for name in weights)
    # Its configuration repeats it.
    third = program.train(tmp_path / "third", f"--config={second.out_dir}/config.toml", ranks=2)
    assert third.losses == second.losses


def test_init_refuses_a_damaged_checkpoint(tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=1")
    weights = first.out_dir / "checkpoint-00000001/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    refused = program.run(*QUIET, f"--init={first.out_dir}", "--steps=1", f"--out-dir={tmp_path}/x", check=False)
    assert one_error(refused.stderr).startswith("--init: ") and "model.safetensors" in refused.stderr
    empty = program.run(*QUIET, f"--init={tmp_path}", "--steps=1", check=False)
    assert one_error(empty.stderr).startswith("--init: ")


def test_overwrite_is_refused_where_it_would_lose_or_do_nothing(tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=1")
    for options, text in (([f"--init={first.out_dir}", f"--out-dir={first.out_dir}"], "--overwrite would remove"),
                          ([f"--out-dir={first.out_dir}", "--resume"], "leave one of them out"), ([], "--overwrite needs --out-dir")):
        refused = program.run(*TINY, *QUIET, "--steps=1", "--overwrite", *options, check=False)
        assert text in one_error(refused.stderr)
    assert json.loads((first.out_dir / "checkpoint-00000001/manifest.json").read_text())["step"] == 1
