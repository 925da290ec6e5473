"""A stopped run resumes with the same bits from the files in its directory. Unusable files are refused."""

import json
import shutil
import subprocess

import numpy as np
import pytest

import boxes
import program
import safetensors_numpy
from old_checkpoint import write_sealed, write_version_2
from program import digest

MODEL = [*program.SMALL, "--lr=1e-3"]
WEIGHTS, STATE = "weights-00000-1.safetensors", "state-00000-1.safetensors"
DTYPES = [["--dtype=fp32"], ["--dtype=bf16"], ["--dtype=bf16", "--gradient-dtype=bf16", "--stochastic-rounding"],
          ["--dtype=bf16", "--moments-dtype=bf16", "--master-dtype=none"], ["--dtype=fp32", "--moments-dtype=8bit"]]


def train_beside(folder, *options):
    """Trains a second run in the folder of a first, as programs before 0.2 did: a checkpoint of the same step is replaced."""
    place = folder.with_name(f"{folder.name}-second")
    program.train(place, *options)
    number = 1
    while (folder / f"metrics.jsonl.{number}").exists():
        number += 1
    (folder / "metrics.jsonl").rename(folder / f"metrics.jsonl.{number}")
    shutil.copytree(place, folder, dirs_exist_ok=True)
    shutil.rmtree(place)


@pytest.mark.parametrize("dtypes", DTYPES, ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_goes_on_bit_identically(ranks, dtypes, tmp_path):
    options = [*MODEL, "--steps=20", "--checkpoint-every=7", *dtypes]
    whole = program.train(tmp_path / "whole", *options, "--export", tmp_path / "whole.safetensors", ranks=ranks)
    checkpoints = sorted(path.name for path in (tmp_path / "whole").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-00000007", "checkpoint-00000014", "checkpoint-00000020"]

    # As if the run had died at step 17: its checkpoints and its metrics up to there remain.
    stopped = tmp_path / "stopped"
    shutil.copytree(tmp_path / "whole", stopped)
    shutil.rmtree(stopped / "checkpoint-00000020")
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(lines[:18]) + '{"step": 18, "lo')

    resumed = program.train(stopped, *options, "--resume", "--export", tmp_path / "resumed.safetensors", ranks=ranks)
    assert resumed.column("step") == list(range(1, 21))
    assert resumed.losses == whole.losses
    assert resumed.column("grad_norm") == whole.column("grad_norm")
    assert resumed.lines[-1]["val_loss"] == whole.lines[-1]["val_loss"]
    assert digest(tmp_path / "resumed.safetensors") == digest(tmp_path / "whole.safetensors")

    # The same when a directory's name is given and the results go into another one.
    branch = program.train(tmp_path / "branch", *options, "--resume", tmp_path / "whole" / "checkpoint-00000007",
                           ranks=ranks)
    assert branch.column("step") == list(range(8, 21))
    assert branch.losses == whole.losses[7:]


def test_a_checkpoint_loads_on_another_number_of_processes(tmp_path):
    options = [*MODEL, "--steps=20", "--checkpoint-every=10"]
    whole = program.train(tmp_path / "whole", *options)
    other = program.train(tmp_path / "other", *options, "--resume", tmp_path / "whole" / "checkpoint-00000010", ranks=4)
    assert np.abs(np.array(other.losses) - whole.losses[10:]).max() <= 1e-5  # as the project promises for fp32


@pytest.mark.parametrize("ranks", [1, 2])
def test_resume_without_a_run_is_an_error(ranks, tmp_path):
    result = program.run(*MODEL, "--steps=2", f"--out-dir={tmp_path}/run", "--sample-tokens=0", "--resume", ranks=ranks, check=False)
    assert (result.returncode, result.stdout) == (1, "") and not (tmp_path / "run").exists()
    assert result.stderr == f"error: --resume: there is no run in {tmp_path}/run to resume; leave it out to begin a run, or give " \
        "--resume-if-any\n"


def test_resume_if_any_starts_fresh_where_there_is_nothing(tmp_path):
    for steps, said in ((2, f"note: there is no run in {tmp_path} to resume: starting from step 0"), (3, "after step 2")):
        result = program.run(*MODEL, f"--steps={steps}", f"--out-dir={tmp_path}", "--sample-tokens=0", "--resume-if-any")
        assert said in result.stdout
        assert program.Run(tmp_path).column("step") == list(range(1, steps + 1))
    both = program.run(*MODEL, "--resume", "--resume-if-any", check=False)
    assert both.stderr == "error: --resume-if-any and --resume are both given; leave one of them out\n"


def test_resume_alone_without_a_directory_goes_on_with_the_newest_run(tmp_path):
    def run(*options):
        return subprocess.run([program.ROOT / program.PROGRAM, *MODEL, "--sample-tokens=0", *options], cwd=tmp_path,
                              capture_output=True, text=True, check=True, timeout=program.PATIENCE * 60).stdout

    assert "there is no run in runs to resume: starting from step 0" in run("--steps=2", "--resume-if-any")
    run("--steps=3", "--seed=5", "--out-dir=runs/other")
    assert "resuming from runs/other/checkpoint-00000003 after step 3" in run("--steps=4", "--seed=5", "--resume")
    # A resumed run is the newest.
    [first] = [folder for folder in (tmp_path / "runs").iterdir() if folder.name != "other"]
    run("--steps=5", f"--out-dir=runs/{first.name}", "--resume")
    run("--steps=0", "--out-dir=runs/plan")  # hides no run, nor does an evaluation
    run("--steps=0", "--init=runs/other", "--out-dir=runs/evaluated")
    assert f"resuming from runs/{first.name}/checkpoint-00000005" in run("--steps=6", "--resume")


def test_resume_takes_the_checkpoint_saved_last(tmp_path):
    """A shorter run in the directory of a longer one resumes from its own checkpoint."""
    program.train(tmp_path, *MODEL, "--steps=6", "--checkpoint-every=3")
    train_beside(tmp_path, *MODEL, "--steps=2", "--seed=5")
    result = program.run(*MODEL, "--steps=4", "--seed=5", f"--out-dir={tmp_path}", "--sample-tokens=0", "--resume")
    assert "checkpoint-00000002" in result.stdout
    assert program.Run(tmp_path).column("step") == [1, 2, 3, 4]


def test_resume_takes_an_earlier_runs_checkpoint_where_the_last_run_has_none(tmp_path):
    """As if the second run in a directory had died before its first checkpoint."""
    program.train(tmp_path, *MODEL, "--steps=6", "--checkpoint-every=3")
    train_beside(tmp_path, *MODEL, "--steps=4", "--seed=5")
    shutil.rmtree(tmp_path / "checkpoint-00000004")
    result = program.run(*MODEL, "--steps=7", f"--out-dir={tmp_path}", "--sample-tokens=0", "--resume")
    assert "checkpoint-00000006 after step 6" in result.stdout
    assert program.Run(tmp_path).column("step") == [7]
    assert len((tmp_path / "metrics.jsonl.1").read_text().splitlines()) == 7  # those of the first run
    assert len((tmp_path / "metrics.jsonl.2").read_text().splitlines()) == 5


def damage(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["manifest.json", "checksums-00000.json", WEIGHTS, STATE])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_newest_checkpoint_is_passed_over(ranks, file, tmp_path):
    """The next whole one is taken, by all processes, and a note names the damaged one. The bits are those of a run that stopped
    there."""
    out_dir = tmp_path / "a run"
    whole = program.train(out_dir, *MODEL, "--steps=8", "--checkpoint-every=2", ranks=ranks)
    shutil.copytree(out_dir, tmp_path / "named")
    for folder in (out_dir, tmp_path / "named"):
        for step, damaged in ((8, file), (6, WEIGHTS), (4, "manifest.json")):
            damage(folder / f"checkpoint-{step:08}" / damaged)
    options = [*MODEL, "--steps=8", "--sample-tokens=0"]
    result = program.run(*options, f"--out-dir={out_dir}", "--resume", ranks=ranks)
    assert f"note: the checkpoint is damaged: {out_dir}/checkpoint-00000008/{file}" in said(result)
    assert f"resuming from {out_dir}/checkpoint-00000002 after step 2" in said(result)
    assert program.Run(out_dir).losses == whole.losses
    # The folder of a run means the newest one, too, as for text.
    assert "checkpoint-00000006" not in said(program.run(*options, "--resume", out_dir, "--steps=9", ranks=ranks))
    text = program.run("--generate", "--sample-tokens=5", "--resume", tmp_path / "named", ranks=ranks)
    is_said = f"note: the checkpoint is damaged: {tmp_path}/named/checkpoint-00000008/{file}" in text.stderr
    assert text.stdout and is_said == (file != STATE)  # which is not read for a text
    # One that is named is refused, with the newest whole one.
    out_dir = tmp_path / "named"
    refused = program.run(*options, f"--out-dir={out_dir}", "--resume", out_dir / "checkpoint-00000008/", ranks=ranks, check=False)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert f"checkpoint-00000008/{file}" in refused.stderr
    assert refused.stderr.endswith(f"; to use the newest whole checkpoint: --resume {out_dir}/checkpoint-00000002\n")
    # If none is whole, none is taken.
    damage(out_dir / "checkpoint-00000002" / STATE)
    before = sorted(path.read_bytes() for path in out_dir.rglob("*.json*"))
    refused = program.run(*options, f"--out-dir={out_dir}", "--resume", ranks=ranks, check=False)
    assert refused.returncode == 1 and refused.stderr.count("\n") == 1
    assert f"error: the checkpoint is damaged: {out_dir}/checkpoint-00000008/{file}" in refused.stderr
    assert sorted(path.read_bytes() for path in out_dir.rglob("*.json*")) == before


def test_a_damaged_checkpoint_before_a_later_one_needs_no_note(tmp_path):
    program.train(tmp_path, *MODEL, "--steps=6", "--checkpoint-every=3")
    damage(tmp_path / "checkpoint-00000003/manifest.json")
    result = program.run(*MODEL, f"--out-dir={tmp_path}", "--steps=8", "--resume", "--sample-tokens=0")
    assert "is damaged" not in result.stdout and program.Run(tmp_path).column("step") == list(range(1, 9))


def test_a_finished_run_with_a_damaged_end_trains_it_again(tmp_path):
    """And what its last checkpoint had been needs no longer hold: the memory of a run that trains."""
    whole = program.train(tmp_path, *MODEL, "--steps=6", "--checkpoint-every=3")
    damage(tmp_path / "checkpoint-00000006" / STATE)
    result = program.run(*MODEL, f"--out-dir={tmp_path}", "--steps=6", "--resume", "--sample-tokens=0")
    assert "after step 3" in said(result) and program.Run(tmp_path).losses == whole.losses


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_is_verified(ranks, tmp_path):
    program.train(tmp_path / "x", *MODEL, "--steps=4", "--checkpoint-every=2", ranks=ranks)
    newest, first = (tmp_path / f"x/checkpoint-{step:08}" for step in (4, 2))
    old = write_version_2(first, tmp_path / "old")
    for given, found in ((newest, newest), (first, first), (tmp_path / "x", newest), (old, old)):
        result = program.run("--verify-checkpoint", given, ranks=ranks)
        files = [path for path in found.iterdir() if path.name != "manifest.json"]
        size = sum(path.stat().st_size for path in files)
        assert result.stdout == f"{found} is whole: step {2 if found in (first, old) else 4}, {len(files)} files, {size:,} bytes\n"
        assert result.stderr == ""
    damage(newest / "state-00000-1.safetensors")
    damage(first / "manifest.json")
    for given, file in ((tmp_path / "x", newest / "state-00000-1.safetensors"), (first, first / "manifest.json"), (tmp_path / "none", "none")):
        refused = program.run("--verify-checkpoint", given, ranks=ranks, check=False)
        assert refused.returncode == 1 and refused.stdout == "" and refused.stderr.count("\n") == 1
        assert refused.stderr.startswith("error: --verify-checkpoint: ") and str(file) in refused.stderr
    shutil.copy(newest / "manifest.json", tmp_path / "x/checkpoint-00000002/manifest.json")
    assert "checksums" in program.run("--verify-checkpoint", first, check=False).stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_checkpoint_of_version_2_goes_on(ranks, tmp_path):
    whole = program.train(tmp_path / "a", *MODEL, "--steps=6", "--checkpoint-every=3", ranks=ranks)
    old = write_version_2(tmp_path / "a/checkpoint-00000003", tmp_path / "old/checkpoint-00000003")
    again = program.train(tmp_path / "b", *MODEL, "--steps=6", "--resume", old, ranks=ranks)
    assert again.losses == whole.losses[3:]
    assert boxes.contents(tmp_path / "b/checkpoint-00000006") == boxes.contents(tmp_path / "a/checkpoint-00000006")
    damage(old / "optimizer.safetensors")
    expect_error("optimizer.safetensors does not have the checksum", *MODEL, "--steps=6", f"--out-dir={tmp_path}/c", "--resume", old)
    program.run(*MODEL, "--steps=0", "--sample-tokens=0", f"--init={old}")  # which reads the weights alone
    damage(old / "model.safetensors")
    expect_error("model.safetensors does not have the checksum", *MODEL, "--steps=0", f"--init={old}")


def test_resume_takes_no_checkpoint_of_a_branch_that_was_left(tmp_path):
    """A run that resumed from an older checkpoint, and died before it saved one, resumes from there again."""
    whole = program.train(tmp_path, *MODEL, "--steps=9", "--checkpoint-every=3")
    program.train(tmp_path, *MODEL, "--steps=5", "--resume", tmp_path / "checkpoint-00000003")
    shutil.rmtree(tmp_path / "checkpoint-00000005")
    result = program.run(*MODEL, "--steps=7", f"--out-dir={tmp_path}", "--sample-tokens=0", "--resume")
    assert "resuming from" in result.stdout and "checkpoint-00000003" in result.stdout
    assert program.Run(tmp_path).column("step") == [1, 2, 3, 4, 5, 6, 7]
    assert program.Run(tmp_path).losses[:3] == whole.losses[:3]


def test_metrics_of_another_run_are_not_continued(tmp_path):
    program.train(tmp_path, *MODEL, "--steps=6")
    train_beside(tmp_path, *MODEL, "--steps=3", "--seed=5")
    resumed = program.train(tmp_path, *MODEL, "--steps=8", "--resume", tmp_path / "checkpoint-00000006")
    assert resumed.column("step") == [7, 8] and resumed.record["configuration"]["seed"] == 1


def said(result):
    """The output as one line, without its line breaks."""
    return " ".join(result.stdout.split())


def test_looking_at_a_checkpoint_leaves_its_run_as_it_is(tmp_path):
    program.train(tmp_path, *MODEL, "--steps=6", "--checkpoint-every=3")
    before = {name: digest(tmp_path / name) for name in ("metrics.jsonl", "run.json", "config.toml")}
    for options in (["--steps=0", "--resume", tmp_path / "checkpoint-00000003"],
                    ["--steps=3", "--resume", tmp_path / "checkpoint-00000003"]):
        result = program.run(*MODEL, "--sample-tokens=0", *options)
        assert "validation after" in result.stdout and "records are not changed" in result.stdout
        assert {name: digest(tmp_path / name) for name in before} == before
    # The message says that the evaluation is not recorded. With a file for it, it is recorded.
    result = program.run(*MODEL, "--sample-tokens=0", "--steps=0", "--resume", tmp_path, f"--out-dir={tmp_path}")
    assert f"results are not added to {tmp_path}/metrics.jsonl; to record them, give --metrics a new file" in said(result)
    assert {name: digest(tmp_path / name) for name in before} == before
    result = program.run(*MODEL, "--sample-tokens=0", "--steps=0", "--resume", tmp_path, f"--metrics={tmp_path}/look.jsonl")
    assert "records are not changed" in said(result) and "not added" not in said(result)
    look = [json.loads(line) for line in (tmp_path / "look.jsonl").read_text().splitlines()]
    assert look[-1]["step"] == 6 and "val_loss" in look[-1] and len(look) == 2
    resumed = program.train(tmp_path, *MODEL, "--steps=7", "--resume")
    assert resumed.column("step") == list(range(1, 8))


def test_a_runs_directory_stands_for_its_newest_checkpoint(tmp_path):
    whole = program.train(tmp_path / "a", *MODEL, "--steps=6", "--checkpoint-every=3")
    result = program.run(*MODEL, "--sample-tokens=0", "--steps=7", "--resume", tmp_path / "a")
    assert "checkpoint-00000006 after step 6" in said(result)
    assert program.Run(tmp_path / "a").losses[:6] == whole.losses
    # A run that has not saved yet resumes from the checkpoint that it started from, in the directory of its own results.
    program.train(tmp_path / "b", *MODEL, "--steps=4", "--resume", tmp_path / "a/checkpoint-00000003")
    shutil.rmtree(tmp_path / "b/checkpoint-00000004")
    program.run(*MODEL, "--sample-tokens=0", "--steps=5", "--resume", tmp_path / "b")
    assert program.Run(tmp_path / "b").column("step") == [4, 5] and program.Run(tmp_path / "a").column("step") == list(range(1, 8))


def test_the_newest_checkpoint_is_the_one_that_was_saved_last(tmp_path):
    """A later run in the same directory has reached fewer steps. Without run.json, nothing says whose checkpoints these are."""
    program.train(tmp_path, *MODEL, "--steps=8", "--checkpoint-every=4")
    train_beside(tmp_path, *MODEL, "--steps=2", "--seed=5")
    (tmp_path / "run.json").unlink()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} >= {"checkpoint-00000002", "checkpoint-00000008"}
    result = program.run(*MODEL, "--seed=5", "--sample-tokens=0", "--steps=3", "--resume", tmp_path)
    assert "checkpoint-00000002 after step 2" in said(result)


def set_clock(checkpoint, seconds):
    """As if the checkpoint had been saved that much later."""
    path = checkpoint / "manifest.json"
    manifest = json.loads(path.read_text())
    write_sealed(path, manifest | {"saved_at": manifest["saved_at"] + round(seconds * 1e9)})


@pytest.mark.parametrize("has_record", [True, False])
def test_a_clock_that_was_set_back_hides_no_steps(has_record, tmp_path):
    program.train(tmp_path, *MODEL, "--steps=6", "--checkpoint-every=2", "--val-every=2", "--keep-best")
    set_clock(tmp_path / "checkpoint-00000002", 3600)
    [best] = (tmp_path / "best").iterdir()
    set_clock(best, 7200)
    if not has_record:
        (tmp_path / "run.json").unlink()
    for options in (["--steps=0", f"--resume={tmp_path}"], ["--steps=0", "--resume", f"--out-dir={tmp_path}"]):
        assert "checkpoint-00000006 after step 6" in said(program.run(*MODEL, "--sample-tokens=0", *options))
    texts = [program.run("--generate", "--sample-tokens=20", f"--resume={tmp_path}{name}").stdout for name in ("", "/checkpoint-00000006", "/checkpoint-00000002")]
    assert texts[0] == texts[1] != texts[2]
    program.run(*MODEL, f"--init={tmp_path}", "--steps=1", "--lr=0", f"--out-dir={tmp_path}/second", "--sample-tokens=0")
    weights = [boxes.weights(path) for path in (tmp_path / "second/checkpoint-00000001", tmp_path / "checkpoint-00000006")]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])
    # The newest whole one, if the newest is damaged.
    (tmp_path / "checkpoint-00000006" / WEIGHTS).write_bytes(b"")
    shutil.rmtree(tmp_path / "best")
    result = program.run(*MODEL, "--sample-tokens=0", "--steps=7", "--resume", f"--out-dir={tmp_path}")
    assert f"resuming from {tmp_path}/checkpoint-00000004 after step 4" in said(result)


@pytest.mark.parametrize("has_record", [True, False])
def test_a_clock_that_was_set_back_revives_no_branch(has_record, tmp_path):
    """The branch that was left has more steps, and one of its checkpoints has a time in the future."""
    program.train(tmp_path, *MODEL, "--steps=9", "--checkpoint-every=3")
    program.train(tmp_path, *MODEL, "--steps=5", "--resume", tmp_path / "checkpoint-00000003")
    set_clock(tmp_path / "checkpoint-00000006", 3600)
    if not has_record:
        (tmp_path / "run.json").unlink()
    result = program.run(*MODEL, "--steps=7", f"--out-dir={tmp_path}", "--sample-tokens=0", "--resume")
    assert "checkpoint-00000005 after step 5" in said(result)


def test_a_run_whose_beginning_is_gone_begins_afresh(tmp_path):
    program.train(tmp_path / "a", *MODEL, "--steps=2")
    program.train(tmp_path / "b", *MODEL, "--steps=4", "--resume", tmp_path / "a/checkpoint-00000002")
    shutil.rmtree(tmp_path / "b/checkpoint-00000004")  # as if it had been killed before it saved
    shutil.rmtree(tmp_path / "a")
    assert program.train(tmp_path / "b", *MODEL, "--steps=3", "--resume-if-any").column("step") == [1, 2, 3]


def test_damage_of_another_run_and_foreign_folders_are_passed_over(tmp_path):
    program.train(tmp_path, *MODEL, "--steps=8", "--checkpoint-every=2")
    (tmp_path / "checkpoint-00000006/manifest.json").write_text("")
    (tmp_path / "checkpoint-99").mkdir()
    train_beside(tmp_path, *MODEL, "--steps=4", "--seed=5")
    assert program.train(tmp_path, *MODEL, "--steps=5", "--seed=5", "--resume").column("step") == [1, 2, 3, 4, 5]


def test_metrics_go_where_a_link_leads(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "metrics").touch()
    (tmp_path / "run/metrics.jsonl").symlink_to("../metrics")
    assert program.train(tmp_path / "run", *MODEL, "--steps=2").column("step") == [1, 2]
    assert (tmp_path / "run/metrics.jsonl").is_symlink() and len((tmp_path / "metrics").read_text().splitlines()) == 3


def test_a_new_run_without_steps_records_itself_and_loses_no_steps(tmp_path):
    """Readers of the metrics then see this run. The metrics of the earlier run are kept next to them."""
    program.train(tmp_path / "a", *MODEL, "--steps=6")
    metrics = tmp_path / "a/metrics.jsonl"
    program.run(*MODEL, "--sample-tokens=0", "--steps=0", "--seed=5", f"--out-dir={tmp_path}/b", f"--metrics={metrics}")
    look = program.Run(tmp_path / "a")
    assert look.lines == [] and look.record["configuration"]["seed"] == 5
    assert not (tmp_path / "b").exists()  # it has no weights: it is a plan
    assert len((tmp_path / "a/metrics.jsonl.1").read_text().splitlines()) == 7


def test_resume_needs_neither_the_first_weights_nor_order_in_the_directory(tmp_path):
    program.run(*MODEL, "--steps=0", "--sample-tokens=0", f"--out-dir={tmp_path}/a", f"--export={tmp_path}/w.safetensors")
    options = [*MODEL, f"--init={tmp_path}/w.safetensors"]
    program.train(tmp_path / "b", *options, "--steps=2")
    (tmp_path / "w.safetensors").unlink()
    (tmp_path / "b/checkpoint-old").mkdir()
    (tmp_path / "b/checkpoint-notes.txt").write_text("mine")
    assert program.train(tmp_path / "b", *options, "--steps=3", "--resume").column("step") == [1, 2, 3]


def test_runs_of_the_same_second_have_directories_of_their_own(tmp_path):
    processes = [subprocess.Popen([str(program.ROOT / program.PROGRAM), *MODEL, "--steps=1", "--sample-tokens=0"],
                                  cwd=tmp_path, stdout=subprocess.DEVNULL) for _ in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    assert len(list((tmp_path / "runs").iterdir())) == 4


def test_a_directory_of_results_can_be_moved(tmp_path):
    program.train(tmp_path / "a", *MODEL, "--steps=2")
    program.train(tmp_path / "a", *MODEL, "--steps=4", "--resume")
    shutil.rmtree(tmp_path / "a" / "checkpoint-00000004")
    (tmp_path / "a").rename(tmp_path / "b")
    program.train(tmp_path / "b", *MODEL, "--steps=4", "--resume")
    assert (tmp_path / "b" / "checkpoint-00000004").is_dir()


def test_a_resumed_run_says_what_it_is_where_it_goes_on(tmp_path):
    """Its steps and mesh may differ. If several tries complete no step, only the last one's line stays."""
    def lines():
        return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]

    program.train(tmp_path, *MODEL, "--steps=2")
    program.train(tmp_path, *MODEL, "--steps=4", "--val-every=2", "--val-batches=1", "--zero-stage=3", "--resume", ranks=2)
    first, *one, second, three, four = lines()
    assert [line["step"] for line in (*one, three, four)] == [1, 2, 3, 4]
    # The resumed run added it to the line of step 2: the first run, with other options, had not measured it.
    assert "val_loss" in one[1]
    assert (first["run"]["configuration"]["steps"], first["run"]["mesh"]["world"]) == (2, 1)
    assert (second["run"]["configuration"]["steps"], second["run"]["mesh"]["world"]) == (4, 2)

    shutil.rmtree(tmp_path / "checkpoint-00000004")
    program.train(tmp_path, *MODEL, "--steps=3", "--resume")
    assert ["run" in line for line in lines()] == [True, False, False, True, False]
    assert lines()[3]["run"]["mesh"]["world"] == 1


@pytest.mark.parametrize("ending", ["", "/", "/."])
def test_a_resumed_run_stays_in_its_directory(ending, tmp_path):
    program.train(tmp_path / "run", *MODEL, "--steps=2")
    program.run(*MODEL, "--steps=4", "--sample-tokens=0", f"--resume={tmp_path}/run/checkpoint-00000002{ending}")
    assert program.Run(tmp_path / "run").column("step") == [1, 2, 3, 4]
    assert (tmp_path / "run" / "checkpoint-00000004").is_dir()


def expect_error(text, *options):
    result = program.run(*options, check=False)
    assert result.returncode == 1
    assert result.stderr.count("error:") == 1 and text in result.stderr, result.stderr


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    expect_error("no checkpoint", *MODEL, f"--out-dir={tmp_path}", "--resume", tmp_path / "nowhere")
    expect_error("manifest.json", *MODEL, f"--out-dir={tmp_path}", "--resume", tmp_path)
    for empty in (["--resume="], ["--resume", ""]):
        expect_error("the directory's name is empty", *MODEL, f"--out-dir={tmp_path}", *empty)


def test_damage_and_another_model_are_refused(tmp_path):
    program.train(tmp_path / "run", *MODEL, "--steps=1")
    checkpoint = tmp_path / "run" / "checkpoint-00000001"
    expect_error("--layers", *MODEL, "--layers=3", f"--out-dir={tmp_path / 'x'}", "--resume", checkpoint)
    for file in (WEIGHTS, STATE, "checksums-00000.json"):
        damaged = tmp_path / f"damaged-{file}"
        shutil.copytree(checkpoint, damaged)
        content = bytearray((damaged / file).read_bytes())
        content[-3] ^= 1
        (damaged / file).write_bytes(content)
        expect_error(file, *MODEL, f"--out-dir={tmp_path / 'x'}", "--resume", damaged)
        (damaged / file).write_bytes(content[:-5])
        expect_error(file, *MODEL, f"--out-dir={tmp_path / 'x'}", "--resume", damaged)
    damaged = tmp_path / "damaged-manifest"
    shutil.copytree(checkpoint, damaged)
    (damaged / "manifest.json").write_text((damaged / "manifest.json").read_text()[:-20])
    expect_error("manifest.json", *MODEL, f"--out-dir={tmp_path / 'x'}", "--resume", damaged)


def test_a_checkpoint_holds_what_it_says(tmp_path):
    run = program.train(tmp_path, *MODEL, "--steps=3", "--export", tmp_path / "export.safetensors")
    checkpoint = tmp_path / "checkpoint-00000003"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert (manifest["step"], manifest["samples"]) == (3, 72)
    assert manifest["configuration"] == run.record["configuration"]
    assert not list(tmp_path.glob("*.partial"))
    weights = boxes.weights(checkpoint)
    exported = safetensors_numpy.load(tmp_path / "export.safetensors")
    moments = boxes.state(checkpoint)
    assert weights.keys() == exported.keys()
    for name, tensor in weights.items():
        assert np.array_equal(tensor, exported[name])
        state = [moments[f"optim.state.{name}.{of}"] for of in ("exp_avg", "exp_avg_sq")]
        assert state[0].shape == state[1].shape == tensor.shape and (state[1] >= 0).all()


@pytest.mark.parametrize(("done", "options", "reason"), [
    (8, ["--steps=80"], "because the schedule has 80 steps instead of 10"),
    (8, ["--steps=10"], None),
    (8, ["--lr-schedule=constant"], "because the schedule has changed"),
    (10, ["--steps=80"], "because the earlier schedule ended at step 10"),
    (2, ["--steps=10"], None),  # during warmup
    (2, ["--steps=80"], None),
    (2, ["--lr=3e-3"], ""),
    (8, ["--steps=80", "--lr-schedule=constant", "--lr=1e-5"], None),
])
def test_a_rate_that_rises_is_said(done, options, reason, tmp_path):
    base = [*program.SMALL, "--lr=1e-3", "--sample-tokens=0", "--val-batches=1", f"--out-dir={tmp_path}"]
    program.run(*base, "--steps=10", "--warmup-steps=4", "--lr-schedule=linear", f"--checkpoint-every={done}")
    shutil.rmtree(tmp_path / "checkpoint-00000010") if done < 10 else None
    for path in tmp_path.glob("checkpoint-*"):
        if path.name != f"checkpoint-{done:08}":
            shutil.rmtree(path)
    text = said(program.run(*base, "--resume", *options))
    assert f"after step {done}" in text
    assert ("note: the learning rate rises from" in text) == (reason is not None)
    assert not reason or f"{reason}; to keep it, give --lr-schedule constant --lr " in text
    if reason is not None:
        rates = program.Run(tmp_path).column("lr")
        assert f"from {rates[done - 1]:.3g} to {rates[done]:.3g}" in text
