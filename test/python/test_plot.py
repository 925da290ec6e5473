"""scripts/plot.py: what it reads and draws, and its one-line messages about unreadable input."""

import contextlib
import io
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.image import imread

import program
from made_runs import ABOUT, SCRIPTS, falling, full_line, full_lines, write_lines

import metrics
import plot as plot_module
import plot_common
import plot_loss
import plot_panels

SCRIPT = SCRIPTS / "plot.py"
RUN = {"run": ABOUT}


def plot(*arguments):
    """Runs scripts/plot.py in this process, which has already loaded matplotlib. Returns its CompletedProcess."""
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
    return write_lines(directory / "metrics.jsonl", lines[1:], first["run"])


def test_the_newest_run_is_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = plot()
    assert (refused.returncode, refused.stderr) == (1, "error: no run in runs/; give a run's directory or its metrics file\n")
    for age, name in ((5, "old"), (0, "new"), (9, "older")):
        path = write_run(tmp_path / "runs" / name, [3.0, 2.0, 1.0])
        os.utime(path, (1_000_000_000 - age,) * 2)
    assert plot().stdout == "wrote runs/new/loss.png\n"
    assert (tmp_path / "runs/new/loss.png").exists()
    write_run(tmp_path / "runs/planned", [])  # it has no step
    write_lines(tmp_path / "runs/evaluated/metrics.jsonl", [{"step": 0, "val_loss": 3.0}], RUN["run"])
    assert plot().stdout == "wrote runs/new/loss.png\n"


def having(picture, color):
    """A mask of the pixels, left of the labels, that have the color "#rrggbb"."""
    wanted = [int(color[i:i + 2], 16) / 255 for i in (1, 3, 5)]
    return np.abs(imread(picture)[:, :1300, :3] - wanted).max(axis=-1) < 0.02


def dashed_lines(picture):
    """The number of horizontal gray dashed lines in the picture: rows that are dark gray for 33 to 60% of their width. (The
    grid is lighter, the axis unbroken, text shorter.) Adjacent rows are one line."""
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
    # A line two pixels wide, over at least a tenth of the width.
    assert having(tmp_path / "run" / "loss.png", plot_loss.TRAINING_COLOR).sum() > 2 * 160
    assert having(tmp_path / "run" / "loss.png", plot_loss.VALIDATION_COLOR).sum() > 160


def python_without_modules(folder):
    """A folder in which python3 has only the standard library."""
    folder.mkdir()
    (folder / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -E -s -S "$@"\n')
    (folder / "python3").chmod(0o755)
    return folder


def run_itself(script, bin_folder, *arguments):
    return subprocess.run([script, *arguments], capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"})


def test_the_script_itself_finds_an_interpreter_with_matplotlib(tmp_path):
    """Called as typed, when the first python3 has no matplotlib."""
    if subprocess.run(["/usr/bin/python3", "-c", "import matplotlib"], capture_output=True).returncode != 0:
        pytest.skip("the system's python3 has no matplotlib")
    path = write_run(tmp_path / "run", falling(10))
    done = run_itself(SCRIPT, python_without_modules(tmp_path / "bin"), path, "-o", tmp_path / "a b.png")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {tmp_path}/a b.png\n", "")
    assert (tmp_path / "a b.png").stat().st_size > 0


@pytest.mark.parametrize("script", ["plot.py", "tensorboard.py"])
def test_names_need_not_be_utf8(script, tmp_path):
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    write_run(folder, [3.0, 2.0, 1.0])
    # As in most languages' locales.
    strict = {"env": os.environ | {"PYTHONIOENCODING": "utf-8:strict"}, "errors": "surrogateescape", "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, SCRIPTS / script, folder], **strict)
    assert done.returncode == 0 and str(folder) in done.stdout and done.stderr == "", done.stderr
    refused = subprocess.run([sys.executable, SCRIPTS / script, folder / "none"], **strict)
    assert refused.stderr.startswith(f"error: there is no {folder}/none; give ")


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
    """The good runs take up most of the height. A run that is only higher than the other is shown whole."""
    good = [write_run(tmp_path / "a", falling(60)), write_run(tmp_path / "b", [loss + 0.2 for loss in falling(60)])]
    diverged = write_run(tmp_path / "c", [*(loss + 0.5 for loss in falling(20)), *(1e9 for _ in range(40))])
    higher = write_run(tmp_path / "d", [loss + 3 for loss in falling(60)])
    for others in ([good[0], diverged], [diverged, *good], [good[0], higher]):
        assert plot(*others, "--panels=loss", "-o", tmp_path / "all.png").returncode == 0
        rows = np.flatnonzero(having(tmp_path / "all.png", plot_common.RUN_COLORS[others.index(good[0])]).any(axis=-1))
        if diverged in others:
            assert rows.max() - rows.min() > 450  # the axes have 790 rows
        else:
            assert np.flatnonzero(having(tmp_path / "all.png", plot_common.RUN_COLORS[1]).any(axis=-1)).min() > 130


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_of_few_steps_is_drawn(tmp_path, count):
    write_run(tmp_path, falling(count))
    done = plot(tmp_path)
    assert done.returncode == 0, done.stderr
    # At least a marker, 8 pixels high. The dotted line to its label is horizontal and thin.
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
    # The mean of n alternating 1 and 3 is 2, or 2 +- 1/n for an odd n. Here n is 11 in the middle and falls to 6 at the end, so
    # 7 is its smallest odd value there. The first values have narrower windows.
    assert np.abs(smooth(noise)[5:-5] - 2).max() <= 1 / 11 + 1e-9
    assert np.abs(smooth(noise)[-5:] - 2).max() <= 1 / 7 + 1e-9


def test_smoothing_goes_around_what_is_not_finite():
    values = np.full(500, 2.0)
    values[[0, 250, 251, 499]] = np.nan
    smoothed = plot_common.smooth(values)
    assert np.array_equal(np.isnan(smoothed), np.isnan(values))
    assert np.allclose(smoothed[np.isfinite(values)], 2.0)


def test_labels_keep_their_distance_and_their_order():
    heights = plot_loss.spread([1.0, 1.01, 1.02, 3.0], 0.2)
    assert np.all(np.diff(heights) >= 0.2 - 1e-9)
    assert heights[3] == 3.0
    assert np.mean(heights[:3]) == pytest.approx(1.01)


# ---- Comparisons -------------------------------------------------------------------------------------------

KINDS_OF_RUNS = {
    "plain": (full_lines(falling(60)), ABOUT),
    "a name of so many words that no table and no panel has room for all of it" * 3: (full_lines(falling(50)), ABOUT),
    "evaluated": (full_lines(falling(80), mfu=0.4, val_loss=2.0, hellaswag_acc_norm=0.3), ABOUT),
    "other batches": (full_lines(falling(70), tokens=9e9), ABOUT | {"memory": {"activations": 5 << 30, "novel": 1 << 30}}),
    "diverged": ([*full_lines(falling(30)), *full_lines([None] * 10, first=31)], ABOUT),
    "resumed elsewhere": (full_lines(falling(40), first=400), ABOUT),
    "all": (full_lines(falling(9), phase_ms=dict.fromkeys(plot_panels.PHASES, 10.0)),
            ABOUT | {"memory": dict.fromkeys(plot_panels.ARENAS, 1 << 30)}),
    "one step": (full_lines([5.0]), ABOUT),
    "nothing but losses": ([{"step": step, "loss": loss} for step, loss in enumerate(falling(40), 1)], {}),
    "never finite": (full_lines([None] * 20), {"configuration": {"steps": "many"}, "mesh": 3, "memory": 5}),
    "$x_1^2$ {odd} & 100%": (full_lines(falling(20), step_ms=3e6), ABOUT),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {name: metrics.read_run(write_lines(folder / str(i) / "metrics.jsonl", lines, about), name)
            for i, (name, (lines, about)) in enumerate(KINDS_OF_RUNS.items())}


@pytest.fixture
def figures(monkeypatch, tmp_path):
    """Draws a comparison; returns its figure after layout."""
    drawn = []
    monkeypatch.setattr(plot_module.plt, "close", drawn.append)

    def draw(runs, wanted=plot_module.PANELS, x=None):
        plot_module.draw(runs, list(wanted), x, tmp_path / "out.png")
        return drawn[-1]
    yield draw
    monkeypatch.undo()
    plot_module.plt.close("all")


def labels(figure):
    """The axes of the panels with lines, as (x, y)."""
    return [(axes.get_xlabel(), axes.get_ylabel().split(",")[0]) for axes in figure.axes if axes.get_ylabel()]


def texts(figure):
    """All texts in a figure, with their places."""
    written = list(figure.texts)
    for axes in figure.axes:
        written += axes.texts
        if axes.get_legend():
            written += axes.get_legend().get_texts()
        for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
            low, high = sorted(axis.get_view_interval())
            # Ticks beyond the ends of an axis are not drawn.
            written += [axis.label, *(tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high)]
    return [(text.get_text(), text.get_window_extent(figure.canvas.get_renderer())) for text in written if text.get_text()]


def overlapping(figure):
    places = texts(figure)
    return [(a, b) for i, (a, p) in enumerate(places) for b, q in places[:i]
            if min(p.x1, q.x1) - max(p.x0, q.x0) > 1 and min(p.y1, q.y1) - max(p.y0, q.y0) > 3]


@pytest.mark.parametrize("names", [["plain"], ["plain", "diverged"], list(KINDS_OF_RUNS)[:8], list(KINDS_OF_RUNS), ["one step"],
                                   ["nothing but losses"], ["never finite", "nothing but losses"], ["never finite"], ["all"]],
                         ids=lambda names: f"{len(names)} {names[0]}")
def test_all_that_is_written_is_seen(made, figures, names):
    """Nothing is beyond the picture's edge, and no text overlaps another."""
    figure = figures([made[name] for name in names])
    for text, place in texts(figure):
        assert place.x0 >= 0 and place.y0 >= 0 and place.x1 <= figure.bbox.x1 and place.y1 <= figure.bbox.y1, text
    assert not overlapping(figure)


def test_a_comparison_shows_what_runs_recorded(made, figures):
    plain, evaluated, other = made["plain"], made["evaluated"], made["other batches"]
    seconds = "seconds of training steps"
    assert labels(figures([plain, made["diverged"]])) == [("step", "loss"), ("tokens", "loss"), (seconds, "loss"), ("step", "tokens per second")]
    # A single run has the panel over tokens only if its steps have different numbers of tokens.
    assert labels(figures([plain], wanted=["loss", "throughput"])) == [("step", "loss"), (seconds, "loss"), ("step", "tokens per second")]
    assert labels(figures([evaluated, other])) == [
        ("step", "loss"), ("tokens", "loss"), (seconds, "loss"), ("step", "tokens per second"), ("step", "MFU"),
        ("step", "HellaSwag accuracy")]
    assert labels(figures([plain, evaluated], x="tokens", wanted=["loss", "throughput", "memory"])) == [
        ("tokens", "loss"), ("tokens", "tokens per second")]
    assert labels(figures([made["nothing but losses"]], ["loss", "memory", "time"])) == [("step", "loss")]


def test_lines_lie_where_the_numbers_are(made, figures):
    run = made["evaluated"]
    for kind, positions in (("steps", run.steps), ("tokens", run.tokens()), ("hours", run.hours())):
        axes = next(axes for axes in figures([run, made["plain"]], ["loss", "memory"], x=kind).axes if axes.get_ylabel().startswith("loss"))
        raw, validation = axes.lines[0], axes.lines[2]
        assert np.allclose(raw.get_xdata(), positions) and np.allclose(raw.get_ydata(), run["loss"])
        assert np.allclose(validation.get_xdata(), positions) and np.allclose(validation.get_ydata(), 2.0)


@pytest.mark.parametrize("panel, label, column", [("throughput", "tokens per second", "tokens_per_s"), ("mfu", "MFU", "mfu")])
def test_other_lines_lie_where_their_numbers_are(made, figures, panel, label, column):
    run = made["evaluated"]
    [axes] = (axes for axes in figures([run, made["other batches"]], [panel, "memory"]).axes if axes.get_ylabel().startswith(label))
    assert np.allclose(axes.lines[0].get_ydata(), plot_common.smooth(np.array(run[column])), equal_nan=True)


def bars(figure, title):
    """The widths of a panel's bars by row, as shares of the longest row."""
    axes = next(axes for axes in figure.axes if any(title in text.get_text() for text in axes.texts))
    rows = {}
    for patch in axes.patches:
        rows.setdefault(round(patch.get_y() + patch.get_height() / 2), []).append(patch.get_width())
    longest = max(map(sum, rows.values()))
    return {row: [width / longest for width in widths] for row, widths in rows.items()}


def test_bars_are_as_long_as_what_they_stand_for(made, figures):
    figure = figures([made["plain"], made["nothing but losses"], made["evaluated"]], ["memory", "time"])
    assert bars(figure, "Memory") == {row: pytest.approx([3 / 40, 3 / 40, 6 / 40, 28 / 40]) for row in (0, 2)}
    assert bars(figure, "Time of a step") == {row: pytest.approx([0.01, 0.3, 0.6, 0.05, 0.04]) for row in (0, 2)}
    # 40 MiB would not be visible next to 6 GiB, so shares are drawn.
    figure = figures([made["plain"], made["other batches"]], ["memory"])
    assert bars(figure, "Memory of a process, by arena: shares") == {
        0: pytest.approx([3 / 40, 3 / 40, 6 / 40, 28 / 40]), 1: pytest.approx([5 / 6, 1 / 6])}


def test_memory_of_a_pipeline_is_that_of_the_stage_that_needs_most(tmp_path):
    stages = [{"activations": 1 << 20}, {"activations": 3 << 20, "moments": 1 << 20}, {"activations": 3 << 20}]
    path = write_lines(tmp_path / "metrics.jsonl", full_lines([1.0]), ABOUT | {"pipeline": {"memory": stages}})
    assert metrics.read_run(path).memory() == stages[1]


@pytest.mark.parametrize("ratio, scale", [(10, "linear"), (30, "log")])
def test_throughputs_far_apart_are_seen_both(ratio, scale, made, figures, tmp_path):
    faster = write_lines(tmp_path / "metrics.jsonl", full_lines(falling(40), tokens_per_s=ratio * 15360.0))
    figure = figures([made["plain"], metrics.read_run(faster)], ["throughput", "memory"])
    [axes] = (axes for axes in figure.axes if axes.get_ylabel().startswith("tokens per second"))
    assert axes.get_yscale() == scale


def test_the_first_step_is_not_in_the_time_of_a_step(tmp_path):
    lines = [full_line(1, 1.0, step_ms=9000, phase_ms={"forward": 8000})]
    lines += [full_line(step, 1.0, step_ms=ms, phase_ms={"forward": ms / 2}) for step, ms in ((2, 100), (3, 300))]
    path = write_lines(tmp_path / "metrics.jsonl", lines)
    assert plot_panels.phase_times(metrics.read_run(path)) == pytest.approx({"forward": 100, "other": 100})
    assert plot_panels.phase_times(metrics.read_run(write_lines(path, lines[:1]))) == pytest.approx({"forward": 8000, "other": 1000})


def test_the_table_says_what_became_of_a_run(made, tmp_path):
    cells = {title: column for title, _, column in plot_module.table_of(list(made.values()))}
    assert [cells["validation loss"][list(made).index(name)] for name in ("plain", "evaluated", "diverged", "never finite")] == [
        "–", "2.000", "diverged after step 30", "diverged at step 1"]
    best = [full_line(1, 2.0, val_loss=1.5), full_line(2, 2.0, val_loss=1.75)]
    assert plot_module.loss_text(metrics.read_run(write_lines(tmp_path / "a.jsonl", best))) == "1.750 (best 1.500)"


def test_the_table_has_the_numbers_of_a_run(tmp_path):
    """3 steps of 10 minutes with 1,536 tokens each. Throughput and MFU are medians, memory is the sum of the arenas."""
    lines = [full_line(step, 2.0, val_loss=2.0, step_ms=600e3, tokens_per_s=speed, mfu=speed / 1e4, hellaswag_acc=0.25 + step / 100,
                       hellaswag_acc_norm=0.3 + step / 100) for step, speed in ((1, 1000.0), (2, 4000.0), (3, 5000.0))]
    table = plot_module.table_of([metrics.read_run(write_lines(tmp_path / "metrics.jsonl", lines))])
    assert {title: cells[0] for title, _, cells in table[2:]} == {
        "parameters": "835 k", "processes": "2", "dtype": "fp32", "steps": "3", "tokens": "4.61 k", "time": "30 min",
        "tokens/s": "4 k", "MFU": "40.0%", "HellaSwag": "33.0%", "memory": "40.0 MiB"}


@pytest.fixture(scope="module")
def looked_at(tmp_path_factory):
    """The metrics that the program writes for weights that it evaluates without training: a file's, and a checkpoint's."""
    folder = tmp_path_factory.mktemp("looked_at")
    *sizes, _ = program.SMALL
    program.train(folder / "run", *program.SMALL, "--steps=4", f"--export={folder}/weights.safetensors")
    look = [*sizes, "--global-batch-tokens=192", "--val-batches=1", "--sample-tokens=0", "--steps=0"]
    program.run(*look, f"--init={folder}/weights.safetensors", f"--out-dir={folder}/init")
    program.run(*look, f"--resume={folder}/run", f"--metrics={folder}/checkpoint.jsonl")
    return [metrics.read_run(folder / path) for path in ("init/metrics.jsonl", "checkpoint.jsonl")]


def test_weights_that_were_only_evaluated(made, looked_at, figures):
    """They have a validation loss but no loss of a step, and this is not divergence. They have the tokens of the steps that
    trained them."""
    losses = [plot_module.decimal(run["val_loss"][-1]) for run in looked_at]
    cells = {title: column for title, _, column in plot_module.table_of(looked_at)}
    assert cells["validation loss"] == losses and [list(run.steps) for run in looked_at] == [[0], [4]]
    assert [run.tokens() for run in looked_at] == [[0], [4 * 384]]
    for run, loss in zip(looked_at, losses):
        written = [text for text, _ in texts(figures([run], ["loss"]))]
        assert f"validation {loss}" in written and not any("no loss" in text or "finite" in text for text in written)
        assert not overlapping(figures([run, made["plain"]]))
    # Metrics of earlier versions do not have these tokens. The evaluation's own batches are not counted instead.
    old = metrics.Run("old")
    for line in ({"run": ABOUT}, {"step": 4, "hellaswag_acc_norm": 0.5}):
        old.take(line)
    assert np.isnan(old.tokens()).all() and plot_module.loss_text(old) == "–"
    assert "no loss was recorded" in [text for text, _ in texts(figures([old], ["loss"]))]


def test_the_late_part_of_a_comparison_is_seen(figures, tmp_path):
    """Losses that differ by 0.1 at the end, after a start 100 times as high."""
    runs = [metrics.read_run(write_lines(tmp_path / f"{end}.jsonl", full_lines([end + 10 * 0.9**step for step in range(400)])))
            for end in (3.0, 3.1)]
    low, high = figures(runs, ["loss", "time"]).axes[1].get_ylim()
    assert high - low < 2 and low < 3.0 and high > 3.1


@pytest.mark.parametrize("losses", [[2.6 + 2.9 * 0.9**step for step in range(60)], [2.85 + 0.3 * 0.95**step for step in range(60)],
                                    [3.0] * 30 + [1.0] * 30, [5.0] * 30 + [2.8 + 0.01 * step for step in range(30)]])
def test_no_curve_goes_through_the_label_of_a_reference(figures, tmp_path, losses):
    run = metrics.read_run(write_lines(tmp_path / "metrics.jsonl", full_lines(losses), ABOUT | {"source_entropy": 0.5}))
    figure = figures([run], ["loss", "time"])
    axes = next(axes for axes in figure.axes if axes.get_ylabel())
    [label] = [text for text in axes.texts if text.get_text().startswith("unigram")]
    box = label.get_window_extent(figure.canvas.get_renderer())
    x, y = axes.transData.transform(np.column_stack([run.steps, run["loss"]])).T
    columns = np.arange(box.x0, box.x1)
    rows = np.interp(columns, x, y, left=np.nan, right=np.nan)
    assert not ((rows > box.y0) & (rows < box.y1)).any() and not overlapping(figure)


def test_a_comparison_is_beside_the_first_run(tmp_path):
    paths = [write_run(tmp_path / name, falling(20)) for name in "ab"]
    assert plot(*paths).stdout == f"wrote {tmp_path}/a/comparison.png\n"
    assert plot(paths[0], "--panels", "all").stdout == f"wrote {tmp_path}/a/comparison.png\n"
    assert imread(tmp_path / "a" / "comparison.png").shape[1] == 1800


@pytest.mark.filterwarnings("error")
def test_names_that_the_font_lacks_are_drawn_as_boxes(figures, tmp_path):
    """There is no message about it. \U000f0000 is in no font."""
    names = ["\U000f0000\U000f0000", "a\nb", "a\udcff"]
    runs = [metrics.read_run(write_run(tmp_path / str(i), falling(20)), name) for i, name in enumerate(names)]
    for some in ([runs[0]], runs):
        for wanted in (["loss"], plot_module.PANELS):
            figure = figures(some, wanted)
    [boxes] = [place for text, place in texts(figure) if text == names[0] and place.y0 > figure.bbox.y1 - 150]
    pixels = imread(tmp_path / "out.png")[::-1, :, :3][int(boxes.y0):int(boxes.y1), int(boxes.x0):int(boxes.x1)]
    assert boxes.width > 10 and (pixels.min(axis=-1) < 0.5).sum() > 20


# ---- Bad input ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("words, complaint", [
    (["--x", "hours"], "no run has its hours"),
    (["--panels", "mfu,time"], "have no data for --panels mfu,time"),
])
def test_what_was_not_recorded_is_one_clear_line(tmp_path, words, complaint):
    done = plot(write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}]), *words)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and complaint in done.stderr


@pytest.mark.parametrize("text, complaint", [
    ("", "is empty"),
    ("not json\n", "line 1: not JSON"),
    ('{"step": 1, "loss": 2.0}\n', "line 1: no `run`"),
    ('[1]\n', "line 1: no `run`"),
    ('{"run": {}}\n', "has no step"),
    ('{"run": {}}\n{"step": 1, "loss": 2.0}\n{"step": 2}\n', "line 3: no numbers"),
    ('{"run": {}}\n{"step": 1, "loss": "low"}\n', "line 2: no numbers"),
    ('{"run": {}}\n{"step": null, "loss": 2}\n', "line 2: no numbers"),
    ('{"run": {}}\n{"step": 1, "loss": 2, "val_loss": "low"}\n', "line 2: `val_loss`"),
    *[('{"run": {}}\n{"step": %s, "loss": 2}\n' % step, "line 2: `step` is not a whole number from 0 to 2^53")
      for step in ("NaN", "1e999", "99999999999999999999", "9" * 400, "-1", "1.5")],
    pytest.param('{"run": {}}\n' + "[" * 200_000 + "\n", "line 2: not JSON", id="nested"),
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
    for arguments in ([tmp_path / "nothing"], [tmp_path], [damaged],
                      [good, "-o", tmp_path / "no" / "such.png"], [good, "-o", tmp_path / "a.unknown"]):
        done = plot(*arguments)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


def test_runs_that_cannot_be_read_do_not_keep_the_others_from_being_drawn(tmp_path):
    good = [write_run(tmp_path / name / "run", falling(20)) for name in "ab"]
    (tmp_path / "empty").mkdir()
    done = plot(good[0].parent, tmp_path / "empty", good[1].parent, tmp_path / "nothing")
    assert done.stdout == f"wrote {tmp_path}/a/run/comparison.png\n"
    faults = done.stderr.splitlines()
    assert done.returncode == 1 and len(faults) == 2 and all(fault.startswith("error: ") for fault in faults)
    assert f"{tmp_path}/empty has no metrics.jsonl" in faults[0] and f"there is no {tmp_path}/nothing" in faults[1]
    drawn = imread(tmp_path / "a/run/comparison.png")
    # The readable runs alone give the same picture. Runs are named by the folders in which they differ, a and b.
    plot(*good)
    assert np.array_equal(drawn, imread(tmp_path / "a/run/comparison.png"))
    # If no run can be read, nothing is drawn.
    done = plot(tmp_path / "empty", tmp_path / "nothing", "-o", tmp_path / "none.png")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 2) and not (tmp_path / "none.png").exists()
