"""The folder of a run: which one is meant, what a resumed run takes from it, and what may be written into it."""

import json
import os
import pathlib
import shutil
import subprocess

import numpy as np
import pytest

import boxes
import program
from refused import one_error

TINY = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16"]
QUIET = ["--sample-tokens=0", "--val-batches=1"]


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
        assert boxes.contents(folder / "checkpoint-00000006") == boxes.contents(whole.out_dir / "checkpoint-00000006")
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


def test_a_resumed_run_says_what_changes_in_its_data_and_its_model(tmp_path):
    text = tmp_path / "text"
    text.write_text("A text for validation. " * 100)
    program.run(*TINY, *QUIET, "--steps=2", f"--out-dir={tmp_path}/run")
    go_on = [*QUIET, f"--out-dir={tmp_path}/run", "--resume"]
    note = f'note: --val-data is "{text}", but was not given in the checkpoint; without it, the last tenth of a training text is for validation'
    other = program.run(*go_on, "--steps=3", f"--val-data={text}", check=False)
    assert "was trained on other data: --train-data: the embedded stories: 2,000,000 tokens instead of 1,800,000 (" in one_error(other.stderr)
    assert note in program.run(*go_on, "--steps=3", f"--val-data={text}", "--new-data").stdout
    assert note not in program.run(*go_on, "--steps=4", f"--val-data={text}").stdout
    assert "the last tenth" not in program.run(*go_on, "--steps=5").stdout  # it keeps the data
    # Another model that is named is not silently that of the checkpoint.
    for start in (["--resume", f"--out-dir={tmp_path}/run"], [f"--init={tmp_path}/run"]):
        refused = program.run(*QUIET, "--steps=6", "--model=mini", *start, check=False)
        assert one_error(refused.stderr)
    # Nothing that an evaluation says depends on a schedule that it does not know.
    assert "--lr" not in program.run(*QUIET, "--steps=0", f"--resume={tmp_path}/run").stdout


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


def test_a_long_prompt_is_read_back_with_all_other_settings(tmp_path):
    """A command line's arguments have at most 128 KiB each, and a control character is written as six."""
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=1")
    prompt = "A sentence. It's \"long\".\a" * 4000
    given = [f"--init={first.out_dir}", "--reduce-every=micro-batch", f"--prompt={prompt}"]
    program.run(*QUIET, "--steps=2", *given, f"--out-dir={tmp_path}/run")
    before = settings_given(tmp_path / "run")
    assert any(line.startswith("prompt") for line in before) and len(before) > 4
    text = program.run("--steps=3", "--resume", f"--out-dir={tmp_path}/run").stdout
    assert "not known" not in text and settings_given(tmp_path / "run") == before - {"steps = 2"} | {"steps = 3"}
    assert program.Run(tmp_path / "run").record["configuration"]["prompt"] == prompt
    program.run(f"--config={tmp_path}/run/config.toml", f"--out-dir={tmp_path}/again")


def test_a_configuration_that_cannot_be_read_is_not_passed_over_silently(tmp_path):
    program.run(*TINY, *QUIET, "--steps=1", "--reduce-every=micro-batch", f"--out-dir={tmp_path}")
    (tmp_path / "config.toml").write_text("steps = 1\nnonsense\n")
    text = " ".join(program.run(*QUIET, "--steps=2", "--resume", f"--out-dir={tmp_path}").stdout.split())
    assert f"note: {tmp_path}/config.toml, line 2: " in text
    assert "it is not known whether the run was given --reduce-every, --init and --out-dir, and they are not kept: give them again" in text


def test_names_that_no_record_can_hold_are_refused(tmp_path):
    """JSON holds UTF-8. Such a name comes from --resume, the current folder, or a folder in runs/; options refuse it themselves."""
    odd = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    program.run(*TINY, *QUIET, "--steps=2", "--checkpoint-every=1", f"--out-dir={tmp_path}/plain")
    shutil.copytree(tmp_path / "plain", odd / "runs" / odd.name)
    go_on = [program.ROOT / program.PROGRAM, *QUIET, "--steps=3"]

    def expect_refusal(name, folder, *options):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        result = subprocess.run([*go_on, *options], cwd=folder, capture_output=True)
        assert result.returncode == 1 and result.stderr == b"error: " + os.fsencode(name) + \
            b": this name is not valid UTF-8, so no record of a run can hold it; rename it\n"
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    run = odd / "runs" / odd.name
    expect_refusal(run, tmp_path, f"--resume={run}")
    expect_refusal(run, tmp_path, f"--config={run}/config.toml", "--resume")
    expect_refusal(run / "checkpoint-00000001", tmp_path, f"--resume={run}/checkpoint-00000001", f"--out-dir={tmp_path}/other")
    expect_refusal(f"runs/{odd.name}", odd, "--resume")
    expect_refusal(run, tmp_path, f"--resume={run}", "--steps=0", f"--metrics={tmp_path}/m.jsonl")
    # Relative names do, and so does a start that records nothing.
    subprocess.run([*go_on, *TINY, "--out-dir=here"], cwd=odd, check=True, capture_output=True)
    subprocess.run([*go_on, "--steps=4", "--resume=here"], cwd=odd, check=True, capture_output=True)
    subprocess.run([*go_on, "--steps=0", f"--resume={run}"], cwd=odd, check=True, capture_output=True)
    assert program.Run(odd / "here").column("step") == [1, 2, 3, 4]


@pytest.mark.parametrize("named", ["run", "checkpoint", "file"])
def test_init_takes_a_checkpoint(named, tmp_path):
    first = program.train(tmp_path / "first", *TINY, *QUIET, "--steps=3", "--checkpoint-every=2")
    checkpoint = first.out_dir / "checkpoint-00000003"
    given = {"run": first.out_dir, "checkpoint": checkpoint, "file": checkpoint / "weights-00000-1.safetensors"}[named]
    sizes = TINY if named == "file" else []  # a directory knows its model
    second = program.train(tmp_path / "second", *sizes, *QUIET, "--steps=2", f"--init={given}", "--lr=0", ranks=2)
    assert second.column("step") == [1, 2]
    weights, others = (boxes.weights(path) for path in (checkpoint, second.out_dir / "checkpoint-00000002"))
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
    weights = first.out_dir / "checkpoint-00000001/weights-00000-1.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    # Only the weights are read.
    (weights.parent / "state-00000-1.safetensors").unlink()
    program.run(*QUIET, f"--init={first.out_dir}", "--steps=1", f"--out-dir={tmp_path}/whole")
    weights.write_bytes(content)
    refused = program.run(*QUIET, f"--init={first.out_dir}", "--steps=1", f"--out-dir={tmp_path}/x", check=False)
    assert one_error(refused.stderr).startswith("--init: ") and "weights-00000-1.safetensors" in refused.stderr
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
                          ([f"--init={first.out_dir}/checkpoint-00000001/weights-00000-1.safetensors", f"--out-dir={first.out_dir}"],
                           "--overwrite would remove"),
                          ([f"--out-dir={first.out_dir}", "--resume"], "--overwrite replaces a run, and --resume continues it;"),
                          ([f"--out-dir={first.out_dir}", "--resume-if-any"], "and --resume-if-any continues it;"),
                          ([f"--out-dir={first.out_dir}", "--steps=0"], "and --steps 0 trains none;"), ([], "--overwrite needs --out-dir")):
        refused = program.run(*TINY, *QUIET, "--steps=1", "--overwrite", *options, check=False)
        assert text in one_error(refused.stderr)
    assert json.loads((first.out_dir / "checkpoint-00000001/manifest.json").read_text())["step"] == 1
