"""Defaults: batches for any number of processes, the warmup, the lines that are printed, and the commands that are
suggested after a run."""

import json
import pathlib
import re
import shlex
import shutil
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
    # Its configuration still tells what was given from what nobody gave.
    assert {"layers = 2", "# warmup-steps = 2"} <= set((tmp_path / "run/config.toml").read_text().splitlines())
    # An evaluation may share the windows as it likes.
    program.run(*QUIET, "--steps=0", f"--resume={tmp_path}/run", ranks=5)


def test_a_default_batch_grows_if_a_resumed_run_cannot_share_it(tmp_path):
    """Nobody gave the batch of 24 sequences, so three processes go on with 24, and five with 25. A given batch is kept."""
    options = [*TINY, *QUIET, f"--out-dir={tmp_path}/run", "--resume-if-any"]
    program.run(*options, "--steps=2", "--checkpoint-every=1")
    assert "note: --global-batch-tokens" not in program.run(*options, "--steps=3", ranks=3).stdout
    grown = program.run(*options, "--steps=4", ranks=5)
    assert "note: --global-batch-tokens is 400 (25 sequences instead of 24), which the processes share evenly" in grown.stdout
    assert program.Run(tmp_path / "run").column("tokens") == [384, 768, 1152, 1552]
    assert "# global-batch-tokens = 400" in (tmp_path / "run/config.toml").read_text().splitlines()
    given = program.run(*options, "--steps=5", "--global-batch-tokens=400", ranks=5)
    assert given.returncode == 0 and "\nglobal-batch-tokens = 400\n" in (tmp_path / "run/config.toml").read_text()
    refused = program.run(*options, "--steps=6", ranks=3, check=False)
    assert "--global-batch-tokens" in one_error(refused.stderr)


def test_a_run_behind_a_link_is_the_one_that_goes_on(tmp_path):
    (tmp_path / "else/folder").mkdir(parents=True)
    (tmp_path / "link").symlink_to("else/folder")
    for steps, folder in ((1, "x"), (2, "else/x")):
        program.run(*TINY, *QUIET, f"--steps={steps}", f"--out-dir={tmp_path}/{folder}")
    subprocess.run([program.ROOT / program.PROGRAM, *QUIET, "--steps=3", "--resume=link/../x"], cwd=tmp_path, check=True, capture_output=True)
    assert program.Run(tmp_path / "x").column("step") == [1] and program.Run(tmp_path / "else/x").column("step") == [1, 2, 3]


@pytest.mark.parametrize("how", ["moved", "copied"])
def test_a_configuration_in_a_run_means_the_run_there(how, tmp_path):
    program.run(*TINY, *QUIET, "--steps=2", f"--out-dir={tmp_path}/old")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    if how == "moved":
        shutil.rmtree(tmp_path / "old")
    for steps, config, folder in ((3, "new/config.toml", tmp_path), (4, "config.toml", tmp_path / "new")):
        subprocess.run([program.ROOT / program.PROGRAM, *QUIET, f"--steps={steps}", "--resume", f"--config={config}"], cwd=folder, check=True, capture_output=True)
        assert program.Run(tmp_path / "new").column("step") == list(range(1, steps + 1))
    assert how == "moved" or program.Run(tmp_path / "old").column("step") == [1, 2]
    program.run(*QUIET, "--steps=5", "--resume", f"--config={tmp_path}/new/config.toml", f"--out-dir={tmp_path}/new")


def settings_given(folder):
    """The lines of config.toml that are no comments, but for the folder's own name."""
    lines = (folder / "config.toml").read_text().splitlines()
    return {line for line in lines if line and not line.startswith(("#", "out-dir"))}


def test_resume_alone_goes_on_as_the_run_began(tmp_path):
    """Nobody has to repeat the options, and they need not be in config.toml."""
    text = tmp_path / "text"
    text.write_text("".join(f"{number} is followed by {number + 1}. " for number in range(500)))
    options = [*TINY, f"--train-data={text}", "--steps=6", "--seed=7", "--lr=3e-3", "--lr-schedule=linear", "--weight-decay=0.3",
               "--beta2=0.9", "--grad-clip=0.5", "--checkpoint-every=2", "--val-every=2", "--val-batches=1", "--sample-tokens=0",
               "--dtype=bf16", "--gradient-dtype=bf16", "--reduce-every=micro-batch", "--micro-batch-size=1"]
    whole = program.train(tmp_path / "whole", *options)
    for has_configuration in (True, False):
        folder = tmp_path / f"stopped-{has_configuration}"
        shutil.copytree(whole.out_dir, folder)
        shutil.rmtree(folder / "checkpoint-00000006")
        shutil.rmtree(folder / "checkpoint-00000004")
        if not has_configuration:
            (folder / "config.toml").unlink()
        # Nobody knows whether it was given if config.toml is missing; its default depends on the mesh.
        by_mesh = [] if has_configuration else ["--reduce-every=micro-batch"]
        text_of_run = program.run("--resume", f"--out-dir={folder}", *by_mesh).stdout
        assert "in the checkpoint" not in text_of_run
        assert program.Run(folder).losses == whole.losses
        validations = [[line.get("val_loss") for line in run.lines] for run in (program.Run(folder), whole)]
        assert validations[0] == validations[1]
        assert (folder / "checkpoint-00000004").is_dir()
        weights = "checkpoint-00000006/model.safetensors"
        assert (folder / weights).read_bytes() == (whole.out_dir / weights).read_bytes()
        assert len(settings_given(folder)) == (len(settings_given(whole.out_dir)) if has_configuration else 1)
        assert settings_given(folder) <= settings_given(whole.out_dir)
    (folder / "config.toml").unlink()
    shutil.rmtree(folder / "checkpoint-00000006")
    text.rename(tmp_path / "moved")
    refused = program.run("--resume", f"--out-dir={folder}", "--micro-batch-size=1", check=False)
    assert one_error(refused.stderr).endswith("(--train-data is that of the checkpoint)")
    (tmp_path / "moved").rename(text)
    # A setting that goes with another one is dropped if that one changes, and so is a micro-batch that does not divide a process's share.
    text_of_run = program.run(f"--resume={whole.out_dir}", f"--out-dir={tmp_path}/other", "--steps=7", "--dtype=fp32", ranks=24).stdout
    assert 'note: --gradient-dtype is "fp32", but was "bf16" in the checkpoint' in text_of_run
    text_of_run = program.run(f"--resume={whole.out_dir}", "--steps=0").stdout
    assert "in the checkpoint" not in text_of_run


@pytest.mark.parametrize(("micro_batch", "ranks", "sequences"), [(12, 2, 24), (12, 25, 25), (3, 7, 28)])
def test_a_micro_batch_of_the_run_before_changes_no_batch(micro_batch, ranks, sequences, tmp_path):
    program.run(*TINY, *QUIET, "--steps=1", f"--micro-batch-size={micro_batch}", f"--out-dir={tmp_path}/run")
    program.run("--resume", f"--out-dir={tmp_path}/run", "--steps=2", ranks=ranks)
    assert program.Run(tmp_path / "run").column("tokens") == [16 * 24, 16 * (24 + sequences)]


def test_a_resumed_run_says_what_changes_in_its_data_and_its_model(tmp_path):
    text = tmp_path / "text"
    text.write_text("A text for validation. " * 100)
    program.run(*TINY, *QUIET, "--steps=2", f"--out-dir={tmp_path}/run")
    go_on = [*QUIET, f"--out-dir={tmp_path}/run", "--resume"]
    note = f'note: --val-data is "{text}", but was not given in the checkpoint; without it, the last tenth of a training text is for validation'
    assert note in program.run(*go_on, "--steps=3", f"--val-data={text}").stdout
    assert note not in program.run(*go_on, "--steps=4", f"--val-data={text}").stdout
    assert "the last tenth" not in program.run(*go_on, "--steps=5").stdout  # it keeps the data
    # Another model that is named is not silently that of the checkpoint.
    for start in (["--resume", f"--out-dir={tmp_path}/run"], [f"--init={tmp_path}/run"]):
        refused = program.run(*QUIET, "--steps=6", "--model=mini", *start, check=False)
        assert one_error(refused.stderr)
    # Nothing that an evaluation says depends on a schedule that it does not know.
    assert "--lr" not in program.run(*QUIET, "--steps=0", f"--resume={tmp_path}/run").stdout


@pytest.mark.parametrize(("steps", "warmup"), [(30, 3), (9, 0)])
def test_the_default_warmup_is_a_tenth_of_the_steps(steps, warmup, tmp_path):
    run = program.train(tmp_path, *TINY, *QUIET, f"--steps={steps}", "--lr=1e-3")
    rates = run.column("lr")
    assert run.record["configuration"]["warmup-steps"] == warmup
    assert rates.index(max(rates)) == max(warmup - 1, 0) and max(rates) == pytest.approx(1e-3)


def test_steps_0_plans_what_does_not_fit(tmp_path):
    result = program.run("--model=gpt3-6.7b", "--layers=2000", "--device=cpu", "--steps=0", f"--metrics={tmp_path}/m")
    assert f"note: {tmp_path}/m is not written\n" in result.stdout and not (tmp_path / "m").exists()
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
    is_at_the_top = (program.ROOT / program.PROGRAM).parent.resolve() == program.ROOT.resolve()  # plot.py is found from there
    assert list(said) == ["go on with", "generate text with", *["draw the loss with"] * is_at_the_top]
    for command in said.values():
        done = subprocess.run(shlex.split(command), cwd=program.ROOT, capture_output=True, text=True, timeout=300 * program.PATIENCE)
        assert done.returncode == 0, done.stderr
        assert "rises" not in done.stdout
    assert (folder / "loss.png").exists() == is_at_the_top
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


def test_a_run_that_saved_only_its_best_checkpoint_goes_on_from_it(tmp_path):
    """As after a kill before the first usual checkpoint."""
    options = [*TINY, *QUIET, "--steps=6", "--val-every=2", "--keep-best", "--warmup-steps=0", "--lr=1e-3", "--lr-schedule=constant"]
    whole = program.train(tmp_path / "whole", *options)
    for how in ("--resume", "--resume-if-any"):
        folder = tmp_path / how.strip("-")
        shutil.copytree(whole.out_dir, folder)
        shutil.rmtree(folder / "checkpoint-00000006")
        (folder / "best/checkpoint-00000006").rename(folder / "elsewhere")
        assert "saved no checkpoint" in program.run(*QUIET, "--steps=6", "--resume", f"--out-dir={folder}", check=False).stderr
        (folder / "elsewhere").rename(folder / "best/checkpoint-00000006")
        assert "holds a run of 6 steps; add --resume, " in program.run(*options, f"--out-dir={folder}", check=False).stderr
        program.run(*options, how, "--steps=8", f"--out-dir={folder}")
        assert program.Run(folder).losses[:6] == whole.losses and len(program.Run(folder).losses) == 8


def test_the_best_checkpoint_on_other_data_is_not_replaced(tmp_path):
    """Whatever the name of the data."""
    texts = {name: "".join(chr(ord("a") + i * i * i % 677 % letters) for i in range(20_000)) for name, letters in (("easy", 2), ("hard", 26))}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "again").write_text(texts["easy"])
    out = {}
    for steps, name, lr in ((20, "easy", "1e-2"), (30, "hard", "1e-2"), (40, "again", "9"), (50, "again", "9")):
        out[steps] = program.run(*TINY, *QUIET, f"--train-data={tmp_path}/{name}", f"--steps={steps}", "--val-every=5", "--keep-best", f"--lr={lr}",
                                 "--resume-if-any", "--lr-schedule=constant", f"--out-dir={tmp_path}/run", "--grad-clip=0").stdout
        if steps == 40:
            shutil.rmtree(tmp_path / "run/best")
    losses = {line["step"]: line["val_loss"] for line in program.Run(tmp_path / "run").lines if "val_loss" in line}
    easy, hard, later = min((5, 10, 15, 20), key=losses.get), min((25, 30), key=losses.get), min((45, 50), key=losses.get)
    assert losses[easy] < min(losses[step] for step in losses if step > 20)
    assert f"best kept   {tmp_path}/run/best/checkpoint-{easy:08}" in out[20]
    note = f"note: --keep-best keeps nothing: {tmp_path}/run/best/checkpoint-{easy:08} was not validated on the same tokens"
    assert note in " ".join(out[30].split()) and f"{losses[hard]:.5f} after step {hard}" in out[30] and "best kept" not in out[30]
    assert f"{losses[easy]:.5f} after step {easy}" in out[40] and "best kept" not in out[40] and "--keep-best keeps nothing" not in out[40]
    assert f"best kept   {tmp_path}/run/best/checkpoint-{later:08}" in out[50]
    off = program.run(*QUIET, "--steps=51", "--val-every=0", "--resume", f"--out-dir={tmp_path}/run").stdout
    assert "note: --keep-best is off from now on: it needs validations, and --val-every is 0" in off


def test_the_validation_that_a_resumed_run_makes_up_for_counts(tmp_path):
    options = [*TINY, *QUIET, "--checkpoint-every=1", f"--out-dir={tmp_path}/run"]
    program.run(*options, "--steps=3", "--val-every=0")
    program.run(*options, "--steps=5", "--val-every=1", "--keep-best", f"--resume={tmp_path}/run/checkpoint-00000002", "--lr=90", "--grad-clip=0")
    assert [path.name for path in (tmp_path / "run/best").iterdir()] == ["checkpoint-00000002"]


def test_the_best_checkpoint_behind_a_link_is_of_its_run(tmp_path):
    program.run(*TINY, *QUIET, "--steps=2", "--val-every=1", "--keep-best", f"--out-dir={tmp_path}/run")
    (tmp_path / "link").symlink_to("run/best")
    program.run(*QUIET, "--steps=3", f"--resume={tmp_path}/link")
    assert program.Run(tmp_path / "run").column("step")[-1] == 3
    shutil.copytree(tmp_path / "run/best", tmp_path / "elsewhere/best")
    program.run(*QUIET, "--steps=4", f"--resume={tmp_path}/elsewhere/best")
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["best"]


def test_the_best_checkpoint_of_another_run_is_not_replaced(tmp_path):
    """A folder behind a link is not removed with the run."""
    options = [*TINY, *QUIET, "--steps=2", "--val-every=1", "--keep-best", f"--out-dir={tmp_path}/run"]
    program.run(*options)
    (tmp_path / "run/best").rename(tmp_path / "disk")
    (tmp_path / "run/best").symlink_to("../disk")
    [kept] = (tmp_path / "run/best").iterdir()
    out = program.run(*options, "--overwrite", "--seed=5").stdout
    assert f"note: --keep-best keeps nothing: {kept} is another run's; remove it, or choose another --out-dir" in " ".join(out.split())
    assert [kept] == list((tmp_path / "run/best").iterdir())


def test_a_run_in_a_folder_called_best_is_a_run(tmp_path):
    program.run(*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/x/best")
    program.run(*QUIET, "--steps=2", f"--resume={tmp_path}/x/best")
    assert program.Run(tmp_path / "x/best").column("step") == [1, 2]
    refused = program.run(*TINY, *QUIET, "--steps=1", "--keep-best", f"--out-dir={tmp_path}/x", check=False)
    assert one_error(refused.stderr) == f"--keep-best: {tmp_path}/x/best holds a run of its own; choose another --out-dir"
    program.run(*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/x")
    program.run(*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/x", "--overwrite", f"--init={tmp_path}/x/best")
    program.run(*QUIET, "--steps=3", "--resume", f"--out-dir={tmp_path}/x/best")
    assert {path.name for path in (tmp_path / "x/best").glob("checkpoint-*")} == {f"checkpoint-0000000{step}" for step in (1, 2, 3)}


def test_the_best_checkpoint_knows_its_loss(tmp_path):
    """The metrics of the earlier run are elsewhere."""
    options = [*TINY, *QUIET, "--val-every=5", "--lr-schedule=constant", "--keep-best", f"--out-dir={tmp_path}/run"]
    program.run(*options, "--steps=10", "--lr=1e-3", f"--metrics={tmp_path}/m")
    [kept] = (tmp_path / "run/best").iterdir()
    program.run(*options, "--steps=20", "--lr=1", "--grad-clip=0", "--resume")
    assert list((tmp_path / "run/best").iterdir()) == [kept]


def test_the_first_validation_is_kept_if_nothing_was(tmp_path):
    """The lowest loss is that of a run without --keep-best, so no checkpoint has it."""
    options = [*TINY, *QUIET, "--val-every=5", "--lr-schedule=constant", f"--out-dir={tmp_path}/run"]
    program.run(*options, "--steps=10", "--lr=1e-3")
    out = program.run(*options, "--steps=20", "--lr=1", "--grad-clip=0", "--resume", "--keep-best").stdout
    losses = {line["step"]: line["val_loss"] for line in program.Run(tmp_path / "run").lines if "val_loss" in line}
    assert min(losses[5], losses[10]) < min(losses[15], losses[20])
    best = min((15, 20), key=losses.get)
    assert [path.name for path in (tmp_path / "run/best").iterdir()] == [f"checkpoint-{best:08}"] and "best kept" in out


def test_a_configuration_in_a_run_means_that_run(tmp_path):
    """--resume does not take a newer run in runs/."""
    program.run(*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/runs/a")
    config = tmp_path / "runs/a/config.toml"
    config.write_text("\n".join(line for line in config.read_text().splitlines() if not line.startswith("out-dir")))
    program.run(*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/runs/b")
    subprocess.run([program.ROOT / program.PROGRAM, *QUIET, f"--config={config}", "--resume", "--steps=2"], cwd=tmp_path, check=True, capture_output=True)
    assert program.Run(tmp_path / "runs/a").column("step") == [1, 2] and program.Run(tmp_path / "runs/b").column("step") == [1]


def test_a_resumed_run_goes_on_naming_its_directory(tmp_path):
    def run(*options):
        subprocess.run([program.ROOT / program.PROGRAM, *QUIET, *options], cwd=tmp_path, check=True, capture_output=True)

    def given():
        return {line for line in (tmp_path / "runs/x/config.toml").read_text().splitlines() if not line.startswith("#")}

    run(*TINY, "--steps=0", "--export=w.safetensors", "--out-dir=w")
    run(*TINY, "--steps=1", "--init=w.safetensors", "--out-dir=runs/x")
    for steps, folder in enumerate((f"{tmp_path}/runs/x", "runs/x", "./runs/../runs/x/"), 2):
        run(f"--steps={steps}", f"--resume={folder}")
        named = folder if folder.startswith("/") else "runs/x"
        assert {f'out-dir = "{named}"', 'init = "w.safetensors"'} <= given()
    run("--steps=5", "--resume=runs/x", "--init=other.safetensors")  # it is ignored, with a note
    assert 'init = "w.safetensors"' in given()


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
    # Its configuration repeats it, as it was given.
    assert f"init = {str(given)!r}".replace("'", '"') in (second.out_dir / "config.toml").read_text()
    third = program.train(tmp_path / "third", f"--config={second.out_dir}/config.toml", ranks=2)
    assert third.losses == second.losses


def test_init_takes_a_run_for_the_first_start_of_a_scheduled_job(tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=1")
    second = program.train(tmp_path / "second", *QUIET, "--steps=1", f"--init={first.out_dir}", "--resume-if-any")
    assert second.record["configuration"]["channels"] == first.record["configuration"]["channels"]


def test_a_plan_leaves_its_directory_free(tmp_path):
    program.run(*TINY, *QUIET, "--steps=0", f"--out-dir={tmp_path}/run")
    assert program.train(tmp_path / "run", *TINY, *QUIET, "--steps=2").column("step") == [1, 2]
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run/checkpoint-00000002")  # as if it had just begun
    program.run(*TINY, *QUIET, "--steps=0", f"--out-dir={tmp_path}/run")
    program.run(*TINY, *QUIET, "--steps=0", f"--out-dir={tmp_path}/run", "--resume-if-any")
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == before and len(list((tmp_path / "run").iterdir())) == 3
    # An evaluation of given weights is a result.
    program.run(*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/weights")
    program.run(*QUIET, "--steps=0", f"--init={tmp_path}/weights", f"--out-dir={tmp_path}/evaluated")
    for more in (["--steps=2"], ["--steps=0", f"--init={tmp_path}/weights", "--resume-if-any"]):
        refused = program.run(*QUIET, *more, f"--out-dir={tmp_path}/evaluated", check=False)
        assert "holds a run of 0 steps" in one_error(refused.stderr), more
    # --resume DIR names no place for results.
    shutil.copytree(tmp_path / "weights/checkpoint-00000001", tmp_path / "copy/checkpoint-00000001")
    program.run(*QUIET, "--steps=0", f"--resume={tmp_path}/copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["checkpoint-00000001"]
    refused = program.run(*TINY, *QUIET, "--steps=2", f"--out-dir={tmp_path}/evaluated", check=False)
    assert "holds a run of 0 steps" in one_error(refused.stderr)


def test_init_refuses_a_damaged_checkpoint(tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=1")
    weights = first.out_dir / "checkpoint-00000001/model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    # Only the weights are read.
    (weights.parent / "optimizer.safetensors").unlink()
    program.run(*QUIET, f"--init={first.out_dir}", "--steps=1", f"--out-dir={tmp_path}/whole")
    weights.write_bytes(content)
    refused = program.run(*QUIET, f"--init={first.out_dir}", "--steps=1", f"--out-dir={tmp_path}/x", check=False)
    assert one_error(refused.stderr).startswith("--init: ") and "model.safetensors" in refused.stderr
    empty = program.run(*QUIET, f"--init={tmp_path}", "--steps=1", check=False)
    assert one_error(empty.stderr).startswith("--init: ")


def test_overwrite_keeps_the_old_run_if_the_new_one_cannot_write(tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=2", "--val-every=1", "--keep-best")
    before = {path.relative_to(first.out_dir): path.read_bytes() for path in first.out_dir.rglob("*") if path.is_file()}
    options = [*TINY, *QUIET, "--steps=1", f"--out-dir={first.out_dir}", "--overwrite"]
    refused = program.run(*options, "--metrics=/dev/full", check=False)
    assert "/dev/full" in one_error(refused.stderr)
    assert {path.relative_to(first.out_dir): path.read_bytes() for path in first.out_dir.rglob("*") if path.is_file()} == before
    # As after a start that was killed. Nobody else's files are removed.
    shutil.rmtree(first.out_dir / "best")
    (first.out_dir / "best").touch()
    (first.out_dir / "checkpoint-00000009").touch()
    (first.out_dir / "replaced-run").mkdir()
    (first.out_dir / "replaced-run/notes").touch()
    program.run(*options)
    names = ["best", "checkpoint-00000001", "checkpoint-00000009", "config.toml", "metrics.jsonl", "replaced-run", "run.json"]
    assert sorted(path.name for path in first.out_dir.iterdir()) == names and (first.out_dir / "replaced-run/notes").exists()


def test_overwrite_keeps_a_link_to_the_folder(tmp_path):
    options = [*TINY, *QUIET, "--steps=1", f"--out-dir={tmp_path}/link"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    program.run(*options)
    program.run(*options, "--overwrite")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "folder/checkpoint-00000001").is_dir()


def test_a_checkpoint_is_no_directory_for_results(tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=1")
    inside = f"--out-dir={first.out_dir}/checkpoint-00000001"
    for more in ([], ["--overwrite"]):
        refused = program.run(*TINY, *QUIET, "--steps=1", inside, *more, check=False)
        assert "is a checkpoint; name the directory of a run" in one_error(refused.stderr)


def test_overwrite_is_refused_where_it_would_lose_or_do_nothing(tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=1")
    (tmp_path / "link").symlink_to(first.out_dir / "checkpoint-00000001")
    for options, text in (([f"--init={first.out_dir}", f"--out-dir={first.out_dir}"], "--overwrite would remove"),
                          ([f"--init={tmp_path}/link", f"--out-dir={first.out_dir}"], "--overwrite would remove"),
                          ([f"--init={first.out_dir}/checkpoint-00000001/model.safetensors", f"--out-dir={first.out_dir}"],
                           "--overwrite would remove"),
                          ([f"--out-dir={first.out_dir}", "--resume"], "--overwrite replaces a run, and --resume continues it;"),
                          ([f"--out-dir={first.out_dir}", "--resume-if-any"], "and --resume-if-any continues it;"),
                          ([f"--out-dir={first.out_dir}", "--steps=0"], "and --steps 0 trains none;"), ([], "--overwrite needs --out-dir")):
        refused = program.run(*TINY, *QUIET, "--steps=1", "--overwrite", *options, check=False)
        assert text in one_error(refused.stderr)
    assert json.loads((first.out_dir / "checkpoint-00000001/manifest.json").read_text())["step"] == 1
