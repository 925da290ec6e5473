"""scripts/metrics.py: how it reads metrics files, and follows files that change."""

import math

import pytest
from made_runs import ABOUT, append, as_text, falling, full_line, full_lines, write_lines

import metrics
import plot
import tensorboard
import watch


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def same_as_read_afresh(follower):
    fresh = metrics.read_run(follower.path)
    assert follower.run.about == fresh.about
    assert list(follower.run.steps) == list(fresh.steps)
    assert len(follower.run) == len(fresh) == follower.run.columns.alike(fresh.columns)


def test_fields_become_columns(path):
    run = metrics.read_run(write_lines(path, [full_line(1, 3.0), full_line(2, None, val_loss=2.5), full_line(3, 2.0, note="x")]))
    assert run.name == "run" and run.about == ABOUT
    assert list(run.steps) == [1, 2, 3]
    assert run["loss"][0] == 3.0 and math.isnan(run["loss"][1])
    assert list(run["phase_ms/backward"]) == [60.0] * 3
    assert run.points("val_loss") == ([1], [2.5])
    assert len(run["never"]) == 3 and all(map(math.isnan, run["never"]))
    assert "note" not in run.columns.names() and "val_loss" not in run.columns.row(0)


def test_a_growing_file_is_read_on(path):
    follower = metrics.Follower(path)
    assert follower.poll() is None  # it is not there yet
    write_lines(path, [])
    assert follower.poll() == 0 and follower.poll() is None
    text = as_text(full_lines(falling(3)))
    for position in range(1, len(text), 50):  # a line is whole only when its end is written
        path.write_text(as_text([{"run": ABOUT}]) + text[:position])
        follower.poll()
        assert len(follower.run) == text[:position].count("\n")
    path.write_text(as_text([{"run": ABOUT}]) + text)
    follower.poll()
    append(path, full_lines([1.0], first=4))
    assert follower.poll() == 3 and len(follower.run) == 4
    assert follower.poll() is None
    same_as_read_afresh(follower)


@pytest.mark.parametrize("lines, about, kept", [
    (full_lines(falling(6)), ABOUT, 6),  # resumed from step 6
    (full_lines(falling(6)) + full_lines([0.5, 0.4], first=7), ABOUT, 6),  # and went on before the follower read it
    (full_lines(falling(9)) + [full_line(10, falling(10)[-1], val_loss=1.0)], ABOUT, 9),  # the last step was validated later
    (full_lines(falling(10)) + full_lines([0.5], first=11), ABOUT, 10),
    (full_lines([90.0, *falling(10)[1:]]), ABOUT, 0),
    (full_lines(falling(10)), ABOUT | {"identity": "another"}, 0),
    ([], ABOUT | {"identity": "another"}, 0),
])
@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_a_file_that_is_written_again(path, lines, about, kept, how):
    write_lines(path, full_lines(falling(10)))
    follower = metrics.Follower(path)
    assert follower.poll() == 0
    if how == "replaced":
        write_lines(path, lines, about)
    else:
        path.write_text(as_text([{"run": about}, *lines]))
    assert follower.poll() == kept
    assert len(follower.run) == len(lines)
    if lines:
        same_as_read_afresh(follower)
    assert follower.poll() is None


def test_another_file_with_the_same_last_line(path):
    write_lines(path, full_lines([5.5, 4.5]))
    follower = metrics.Follower(path)
    follower.poll()
    write_lines(path, full_lines([3.5, 4.5, 2.5]))
    assert follower.poll() == 0 and list(follower.run["loss"]) == [3.5, 4.5, 2.5]


def test_the_same_file_again_is_no_change(path):
    write_lines(path, full_lines(falling(5)))
    follower = metrics.Follower(path)
    follower.poll()
    write_lines(path, full_lines(falling(5)))
    assert follower.poll() is None
    path.unlink()
    assert follower.poll() is None and len(follower.run) == 5


def test_steps_that_are_appended_again_replace_those_that_were(path):
    """`--metrics` to a stream leaves such a file when a run is resumed: the lines of both runs, one after the other."""
    write_lines(path, full_lines(falling(10)))
    follower = metrics.Follower(path)
    follower.poll()
    append(path, [{"run": ABOUT | {"commit": "later"}}, *full_lines([0.5, 0.4], first=8)])
    assert follower.poll() == 7
    assert list(follower.run.steps) == list(range(1, 10)) and list(follower.run["loss"][-2:]) == [0.5, 0.4]
    assert follower.run.about["commit"] == "later"
    same_as_read_afresh(follower)


def test_a_damaged_line_is_said_until_it_is_mended(path):
    write_lines(path, full_lines(falling(2)))
    follower = metrics.Follower(path)
    follower.poll()
    with open(path, "a") as file:
        file.write("{oops\n")
    for _ in range(2):
        with pytest.raises(metrics.MetricsError, match="line 4: not JSON"):
            follower.poll()
    assert len(follower.run) == 2
    write_lines(path, full_lines(falling(3)))
    assert follower.poll() == 2


def test_hours_are_those_of_steps(path):
    lines = [full_line(step, 1.0, step_ms=ms) for step, ms in ((1, 500.0), (2, 100.0), (3, None), (7, 300.0))]
    run = metrics.read_run(write_lines(path, lines))
    assert run.hours() == pytest.approx([0.5 / 3600, 0.6 / 3600, 0.7 / 3600, 1.0 / 3600])
    bare = metrics.read_run(write_lines(path, [{"step": 5, "loss": 1.0}, {"step": 6, "loss": 1.0, "tokens": 7}]))
    assert all(map(math.isnan, bare.hours()))
    assert bare.tokens() == [5 * 1536, 7]


def test_memory_is_that_of_the_largest_stage(path):
    stages = [{"parameters": 10, "activations": 5, "master": 0}, {"parameters": 8, "activations": 9}]
    about = ABOUT | {"pipeline": {"memory": stages}}
    assert metrics.read_run(write_lines(path, full_lines([1.0]), about)).memory() == {"parameters": 8, "activations": 9}
    assert "master" not in metrics.read_run(write_lines(path, full_lines([1.0]))).memory()
    assert metrics.read_run(write_lines(path, full_lines([1.0]), {"memory": "much"})).memory() == {}


def test_names_tell_runs_apart():
    names = metrics.distinct_names
    assert names(["runs/a/metrics.jsonl", "runs/b/metrics.jsonl", "c.jsonl"]) == ["a", "b", "c"]
    assert names(["x/run/metrics.jsonl", "y/run/metrics.jsonl", "y/z/metrics.jsonl"]) == ["x/run", "y/run", "z"]
    assert names(["x/run/metrics.jsonl", "x/run/metrics.jsonl"]) == ["run", "run"]


@pytest.mark.parametrize("key", ["loss", "val_loss", "step_ms", "tokens", "tokens_per_s", "mfu", "hellaswag_acc_norm", "time"])
@pytest.mark.filterwarnings("error")
def test_numbers_that_are_too_large_are_none(tmp_path, capsys, key):
    """Scripts that show a run treat them as infinite, and still show the finite numbers."""
    huge = [10**400, -10**400, 1e308, -5e307, 1e308, math.inf, math.nan]
    lines = [full_line(step, 2.0) | {key: value} for step, value in enumerate([1.0, *huge, 1.5], 1)]
    about = ABOUT | {"parameters": 10**400, "unigram_loss": 1e308, "memory": {"moments": 10**400, "master": 8},
                     "configuration": ABOUT["configuration"] | {"steps": 10**400, "global-batch-tokens": math.inf}}
    path = write_lines(tmp_path / "metrics.jsonl", lines, about)
    run = metrics.read_run(path)
    assert [str(value) for value in run[key]] == ["1.0", "inf", "-inf", "inf", "-inf", "inf", "inf", "nan", "1.5"]
    for panels in ("loss", "all"):
        plot.main([str(path), "--panels", panels])
    tensorboard.main([str(path)])
    assert "9 steps into" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        watch.main([str(path), "--once"])
    assert stop.value.code == 0
