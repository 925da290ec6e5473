"""--keep-best: which checkpoint is kept in best/, and when none is."""

import re
import shutil

import pytest

import program
from refused import one_error

TINY = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16"]
QUIET = ["--sample-tokens=0", "--val-batches=1"]


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
    """As after a kill before the first regular checkpoint."""
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
                                 "--resume-if-any", "--new-data", "--lr-schedule=constant", f"--out-dir={tmp_path}/run", "--grad-clip=0").stdout
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


def test_keep_best_needs_validations():
    refused = program.run(*TINY, "--keep-best", "--val-every=0", check=False)
    assert one_error(refused.stderr) == "--keep-best needs validations during training; give --val-every 1 or more"
