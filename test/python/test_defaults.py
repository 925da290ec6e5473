"""Defaults: batches for any number of processes, the warmup, the lines that are printed, and the commands that are
suggested after a run."""

import pathlib
import re
import shlex
import subprocess

import pytest

import program
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


@pytest.mark.parametrize(("micro_batch", "ranks", "sequences"), [(12, 2, 24), (12, 25, 25), (3, 7, 28)])
def test_a_micro_batch_of_the_run_before_changes_no_batch(micro_batch, ranks, sequences, tmp_path):
    program.run(*TINY, *QUIET, "--steps=1", f"--micro-batch-size={micro_batch}", f"--out-dir={tmp_path}/run")
    program.run("--resume", f"--out-dir={tmp_path}/run", "--steps=2", ranks=ranks)
    assert program.Run(tmp_path / "run").column("tokens") == [16 * 24, 16 * (24 + sequences)]


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
    text = program.run(*TINY, *QUIET, "--steps=20", "--lr=1e-3", f"--out-dir={folder}", "--prompt=x", f"--export={tmp_path}/an export/").stdout
    said = commands(text)
    is_at_the_top = (program.ROOT / program.PROGRAM).parent.resolve() == program.ROOT.resolve()  # plot.py is found from there
    assert list(said) == ["go on with", "generate text with", *["draw the loss with"] * is_at_the_top]
    for command in said.values():
        done = subprocess.run(shlex.split(command), cwd=program.ROOT, capture_output=True, text=True, timeout=300 * program.PATIENCE)
        assert done.returncode == 0, done.stderr
        assert "rises" not in done.stdout
    assert (folder / "loss.png").exists() == is_at_the_top
    assert (tmp_path / "an export/config.json").exists() and (tmp_path / "an export-40/config.json").exists()
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
