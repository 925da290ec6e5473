"""scripts/plot.py: what it reads and draws, and the one line it says about what it cannot read."""

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
SCRIPT = SCRIPTS / "plot.py"
sys.path.append(str(SCRIPTS))
import metrics  # noqa: E402
import plot as plot_module  # noqa: E402
import plot_common  # noqa: E402
import plot_loss  # noqa: E402

RUN = {"run": {"configuration": {"model": "tiny", "layers": 4, "heads": 4, "channels": 128, "seq-len": 64,
                                 "global-batch-tokens": 1536, "dtype": "fp32"},
               "mesh": {"world": 2}, "parameters": 835072, "unigram_loss": 2.9, "source_entropy": 0.6}}


def plot(*arguments):
    """scripts/plot.py in this process, which has read matplotlib already; returns its CompletedProcess."""
    output, complaint, status = io.StringIO(), "", 0
    with contextlib.redirect_stdout(output):
        try:
            plot_module.main([str(argument) for argument in arguments])
        except SystemExit as stop:
            status, complaint = (1, f"{stop.code}\n") if isinstance(stop.code, str) else (stop.code or 0, "")
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), complaint)


def write_run(directory, losses, first=RUN, validate_every=4):
    directory.mkdir(parents=True, exist_ok=True)
    lines = [first]
    for step, loss in enumerate(losses, 1):
        lines.append({"step": step, "loss": loss})
        if step % validate_every == 0:
            lines[-1]["val_loss"] = loss + 0.05
    path = directory / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def falling(count):
    return [0.8 + 4.7 * 0.9**step for step in range(count)]


def having(picture, color):
    """Which pixels of the picture left of the labels have the color "#rrggbb"."""
    wanted = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    return np.abs(imread(picture)[:, :1300, :3] - wanted).max(axis=-1) < 0.02


def dashed_lines(picture):
    """How many horizontal gray dashed lines cross the picture: rows that are dark gray for 33 to 60% of their width.
    (The grid is lighter, the axis unbroken, text shorter.) Adjacent rows are one line."""
    pixels = imread(picture)[..., :3]
    gray = (pixels.max(axis=-1) - pixels.min(axis=-1) < 0.05) & (pixels.mean(axis=-1) < 0.7)
    share = gray.mean(axis=-1)
    rows = np.flatnonzero((share > 0.33) & (share < 0.6))
    return len(rows) and 1 + int((np.diff(rows) > 1).sum())


def test_a_run_directory_is_drawn_beside_its_metrics(tmp_path):
    write_run(tmp_path / "run", falling(40))
    done = plot(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {tmp_path}/run/loss.png\n"
    picture = imread(tmp_path / "run" / "loss.png")
    assert picture.shape[:2] == (1000, 1600)
    # A line two pixels wide over a tenth of the width at least.
    assert having(tmp_path / "run" / "loss.png", plot_loss.TRAINING_COLOR).sum() > 2 * 160
    assert having(tmp_path / "run" / "loss.png", plot_loss.VALIDATION_COLOR).sum() > 160


def python_without_modules(folder):
    """A folder in which python3 has the standard library alone."""
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -E -s -S "$@"\n')
    (folder / "python3").chmod(0o755)
    return folder


def run_itself(script, bin_folder, *arguments):
    return subprocess.run([script, *arguments], capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"})


def test_the_script_itself_finds_an_interpreter_with_matplotlib(tmp_path):
    """As typed, where the first python3 has none."""
    if subprocess.run(["/usr/bin/python3", "-c", "import matplotlib"], capture_output=True).returncode != 0:
        pytest.skip("the system's python3 has no matplotlib")
    path = write_run(tmp_path / "run", falling(10))
    done = run_itself(SCRIPT, python_without_modules(tmp_path / "bin"), path, "-o", tmp_path / "a b.png")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {tmp_path}/a b.png\n", "")
    assert (tmp_path / "a b.png").stat().st_size > 0


def test_no_matplotlib_at_all_is_one_clear_line(tmp_path):
    bare = python_without_modules(tmp_path / "bin")
    for name in ("plot.py", "interpreter.py"):
        shutil.copy(SCRIPTS / name, tmp_path)
    (tmp_path / "deps.sh").write_text(f"#!/bin/sh\necho {bare}/python3\n")
    (tmp_path / "deps.sh").chmod(0o755)
    done = run_itself(tmp_path / "plot.py", bare, write_run(tmp_path / "run", falling(10)))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "matplotlib" in done.stderr and "run `make deps`" in done.stderr


def test_references_are_drawn_only_where_known(tmp_path):
    for keys in ((), ("source_entropy",), ("unigram_loss", "source_entropy")):
        about = {key: value for key, value in RUN["run"].items()
                 if key not in ("unigram_loss", "source_entropy") or key in keys}
        path = write_run(tmp_path / str(len(keys)), falling(40), {"run": about})
        assert plot(path).returncode == 0
        assert dashed_lines(path.parent / "loss.png") == len(keys)


def test_several_runs_have_a_color_each(tmp_path):
    paths = [write_run(tmp_path / name, [loss + shift for loss in falling(count)])
             for name, count, shift in (("a", 40, 0), ("b", 25, 0.5), ("c", 60, 1))]
    done = plot(*paths, "--panels", "loss", "-o", tmp_path / "all.png")
    assert done.returncode == 0, done.stderr
    for color in plot_common.RUN_COLORS[:3]:
        assert having(tmp_path / "all.png", color).sum() > 160


def test_one_diverged_run_does_not_flatten_the_others(tmp_path):
    """The good ones take up most of the height; a run that merely is higher than the other is seen whole."""
    good = [write_run(tmp_path / "a", falling(60)), write_run(tmp_path / "b", [loss + 0.2 for loss in falling(60)])]
    diverged = write_run(tmp_path / "c", [*(loss + 0.5 for loss in falling(20)), *(1e9 for _ in range(40))])
    higher = write_run(tmp_path / "d", [loss + 3 for loss in falling(60)])
    for others in ([good[0], diverged], [diverged, *good], [good[0], higher]):
        assert plot(*others, "--panels=loss", "-o", tmp_path / "all.png").returncode == 0
        rows = np.flatnonzero(having(tmp_path / "all.png", plot_common.RUN_COLORS[others.index(good[0])]).any(axis=-1))
        if diverged in others:
            assert rows.max() - rows.min() > 450  # of the 790 that the axes have
        else:
            assert np.flatnonzero(having(tmp_path / "all.png", plot_common.RUN_COLORS[1]).any(axis=-1)).min() > 130


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_of_few_steps_is_drawn(tmp_path, count):
    write_run(tmp_path, falling(count))
    done = plot(tmp_path)
    assert done.returncode == 0, done.stderr
    # A marker at least, 8 pixels high; the dotted line to its label is level and thin.
    rows = having(tmp_path / "loss.png", plot_loss.TRAINING_COLOR).any(axis=-1)
    assert rows.sum() >= 6


def test_half_a_last_line_is_a_run_in_progress(tmp_path):
    path = write_run(tmp_path, falling(10))
    path.write_text(path.read_text() + '{"step": 11, "lo')
    assert len(metrics.read_run(path).steps) == 10


def test_smoothing_keeps_a_constant_and_averages_noise():
    smooth = plot_common.smooth
    assert np.allclose(smooth(np.full(500, 2.0)), 2.0)
    noise = np.tile([1.0, 3.0], 200)
    # The mean of n alternating 1 and 3 is 2, or 2 +- 1/n where n is odd. Here n is 11 in the middle and falls to 6 at
    # the end, so that 7 is its smallest odd value; the first values have narrower windows.
    assert np.abs(smooth(noise)[5:-5] - 2).max() <= 1 / 11 + 1e-9
    assert np.abs(smooth(noise)[-5:] - 2).max() <= 1 / 7 + 1e-9


def test_labels_keep_their_distance_and_their_order():
    heights = plot_loss.spread([1.0, 1.01, 1.02, 3.0], 0.2)
    assert np.all(np.diff(heights) >= 0.2 - 1e-9)
    assert heights[3] == 3.0
    assert np.mean(heights[:3]) == pytest.approx(1.01)


@pytest.mark.parametrize("text, complaint", [
    ("", "is empty"),
    ("not json\n", "line 1: not JSON"),
    ('{"step": 1, "loss": 2.0}\n', "line 1: no `run`"),
    ('[1]\n', "line 1: no `run`"),
    ('{"run": {}}\n', "holds no step"),
    ('{"run": {}}\n{"step": 1, "loss": 2.0}\n{"step": 2}\n', "line 3: no numbers"),
    ('{"run": {}}\n{"step": 1, "loss": "low"}\n', "line 2: no numbers"),
    ('{"run": {}}\n{"step": null, "loss": 2}\n', "line 2: no numbers"),
    ('{"run": {}}\n{"step": 1, "loss": 2, "val_loss": "low"}\n', "line 2: `val_loss`"),
    (b"\xff\xfe\x00\n", "not text"),
])
def test_a_damaged_file_is_one_clear_line(tmp_path, text, complaint):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(metrics.MetricsError) as stop:
        metrics.read_run(path)
    message = str(stop.value)
    assert "\n" not in message
    assert str(path) in message and complaint in message


def test_missing_files_are_one_clear_line(tmp_path):
    good = write_run(tmp_path / "good", falling(4))
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("{}\n")
    for arguments in ([tmp_path / "nothing"], [tmp_path], [good, damaged],
                      [good, "-o", tmp_path / "no" / "such.png"], [good, "-o", tmp_path / "a.unknown"]):
        done = plot(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
