"""The output for users: plain lines in a pipe, a status line and colours on a terminal (here a pseudo-terminal)."""

import os
import re
import subprocess

import program
import pseudo_terminal
import pytest

QUICK = [*program.SMALL, "--steps=12", "--sample-tokens=20", "--val-every=5", "--val-batches=1", "--log-every=1"]
ERASE = "\r\x1b[K"
COLOUR = re.compile(r"\x1b\[\d+m")
STEP = re.compile(r"^ *\d+ +\d+\.\d{5} +\d+\.\d{4} +\d\.\d{3}e[-+]\d\d +\d+\.\d +[\d,]+$")


def on_terminal(*options, ranks=1, columns=90, status=0, **environment):
    """Everything that the program writes to a terminal with this many columns."""
    command = [program.PROGRAM, *map(str, options)]
    if ranks > 1:
        command[1:1] = ["--processes", str(ranks)]
    returned, text = pseudo_terminal.run(command, columns, **environment)
    assert returned == status, text
    return text


def lines_above_status(text):
    """The lines that stay, and all status lines in between."""
    stay, status = "", []
    for piece in text.split(ERASE):
        head, _, last = piece.rpartition("\n")
        stay += head + "\n" if head else ""
        if last:
            status.append(last)
    return stay.splitlines(), status


def step_lines(lines):
    return [line for line in lines if STEP.match(line)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pipe_gets_plain_lines(tmp_path, ranks):
    text = program.run(*QUICK, f"--out-dir={tmp_path}/run", ranks=ranks, env={"TERM": "xterm"}).stdout
    assert "\x1b" not in text and "\r" not in text
    steps = step_lines(text.splitlines())
    assert [int(line.split()[0]) for line in steps] == list(range(1, 13))
    assert len(set(map(len, steps))) == 1, steps  # aligned
    heading = next(line for line in text.splitlines() if line.split()[:1] == ["step"])
    assert len(heading) == len(steps[0]) and heading.split() == ["step", "loss", "grad", "norm", "lr", "ms", "tokens/s"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_terminal_has_a_status_line(tmp_path, ranks):
    text = on_terminal(*QUICK, f"--out-dir={tmp_path}/run", ranks=ranks)
    lines, status = lines_above_status(text)
    assert len(step_lines(lines)) == 12
    # After the last step, no estimate of the time left is shown.
    end = next(i for i, line in enumerate(status) if "11/12" in line and "11/12" not in status[i + 1])
    progress = [re.search(r"(\d+)/12  \d+:\d\d passed, (\d+:\d\d|\?) left$", line) for line in status[:end + 1]]
    assert all(progress), status
    # Every step but the last is shown. Lines printed in between repeat it.
    assert sorted({int(match[1]) for match in progress}) == list(range(12))
    # Between steps, the status line names other work.
    assert re.match(r"validating 0%  .* 10/12 ", next(line for line in status if "validating" in line and "10/12" in line))
    assert all(re.match(r"(validating|saving|sampling) \d+%  $", line) for line in status[end + 1:])
    assert {line.split()[0] for line in status[end + 1:]} == {"validating", "saving", "sampling"}
    assert COLOUR.search(text)
    assert not text.endswith(status[-1])


def test_the_last_line_of_a_terminal_shows_each_step(tmp_path):
    """Though only every tenth has a line that stays."""
    lines, status = lines_above_status(on_terminal(*QUICK, "--log-every=10", f"--out-dir={tmp_path}/run"))
    assert [int(line.split()[0]) for line in step_lines(lines)] == [1, 10, 12]
    shown = {int(match[2]): float(match[1]) for line in status if (match := re.match(r"loss ([\d.]+)  .* (\d+)/12 ", line))}
    losses = program.Run(tmp_path / "run").losses
    assert shown == {step: pytest.approx(loss, abs=1e-5) for step, loss in enumerate(losses[:-1], 1)}


def test_quiet_has_no_status_line(tmp_path):
    lines, status = lines_above_status(on_terminal(*QUICK, "--quiet", f"--out-dir={tmp_path}/run"))
    assert not status and not step_lines(lines)


def test_the_status_line_never_wraps(tmp_path):
    for columns in (24, 60, 200):
        _, status = lines_above_status(on_terminal(*QUICK, f"--out-dir={tmp_path}/{columns}", columns=columns))
        assert status and max(map(len, status)) < columns


def test_a_narrow_status_line_keeps_what_matters_most(tmp_path):
    """Also during a validation. The bar goes first, then the time passed, the share, and the time left."""
    for columns, end in ((80, r"\[=+> +\]  83%  10/12  \d:\d\d passed, \d:\d\d left"), (54, r" 83%  10/12  \d:\d\d passed, \d:\d\d left"),
                         (40, r" 83%  10/12  \d:\d\d left"), (33, r"10/12  \d:\d\d left"), (24, r"10/12")):
        _, status = lines_above_status(on_terminal(*QUICK, f"--out-dir={tmp_path}/{columns}", columns=columns))
        assert re.fullmatch(r"validating 0%  " + end, next(line for line in status if "validating" in line and "10/12" in line))


def test_an_error_stands_on_a_line_of_its_own(tmp_path):
    text = on_terminal(*QUICK, "--lr=1e30", "--warmup-steps=0", f"--out-dir={tmp_path}/run", status=1)
    before, error, _ = text.rpartition("error: ")
    assert error and before.endswith((ERASE, "\n"))
    assert len(lines_above_status(before)[1]) > 0  # there was a status line


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_colours_where_none_are_wanted(tmp_path, environment):
    text = on_terminal(*QUICK, f"--out-dir={tmp_path}/run", **environment)
    assert not COLOUR.search(text)
    assert (ERASE in text) == ("NO_COLOR" in environment)
    assert len(step_lines(lines_above_status(text)[0])) == 12


def rows_of(text):
    """The rows of the header and of the summary: name and value, with continuation lines joined."""
    rows = {}
    for line in text.splitlines():
        match = re.match(r"  (\w+) +(\S.*)$", line)
        if line.startswith("     ") and rows:
            rows[list(rows)[-1]] += " " + line.strip()
        elif match:
            rows[match[1]] = match[2]
    return rows


def test_header_and_summary(tmp_path):
    text = program.run(*QUICK, f"--out-dir={tmp_path}/run", ranks=2, env={"OMP_NUM_THREADS": "1"}).stdout
    rows = rows_of(text)
    assert re.match(r"train_gpt \d+\.\d+\.\d+ \(commit \S+\)$", text.splitlines()[0])
    assert "1 thread, fp32" in rows["device"]
    assert rows["mesh"].startswith("2 processes")
    assert rows["model"] == "2 layers, 2 heads, 32 channels, context 16, vocabulary 256"
    # wte, wpe, two blocks of 12 C^2 + 13 C, ln_f
    assert rows["parameters"] == f"{256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32:,}"
    assert all(arena in rows["memory"] for arena in ("parameters", "gradients", "moments", "activations", "workspace"))
    assert "1,800,000 tokens" in rows["training"] and "200,000 tokens" in rows["validation"]
    assert rows["batch"] == "384 tokens = 2 processes x 1 micro-batch x 12 sequences x 16 tokens"
    assert "12 steps, 4,608 tokens" in rows["schedule"]
    run = program.Run(f"{tmp_path}/run")
    best = min((line["val_loss"], line["step"]) for line in run.lines if "val_loss" in line)
    assert rows["best"].startswith(f"validation loss {best[0]:.5f} after step {best[1]}")
    assert "12 steps" in rows["time"] and "tokens/s" in rows["time"]
    assert os.path.isdir(rows["checkpoint"]) and os.path.isfile(rows["metrics"])
    before, commands = text.split("\n\ngo on with\n")
    assert " --resume --steps 24 --lr-schedule constant --lr 0.000" in commands.splitlines()[0]
    # Except for the commands, which are copied as lines, and paths, whose length is given.
    assert max(map(len, before.replace(str(tmp_path), "").splitlines())) <= 100


@pytest.mark.parametrize("steps, schedule", [
    (12, "learning rate rises to 0.00048, because the run ends within its 100 steps of warmup"),
    (100, "learning rate rises to 0.004, because the run ends within its 100 steps of warmup"),
    (101, "learning rate cosine from 0.004 to 0.0004, 100 steps of warmup")])
def test_the_schedule_of_a_run_that_ends_within_warmup(steps, schedule, tmp_path):
    result = program.run(*program.SMALL, f"--steps={steps}", "--warmup-steps=100", "--sample-tokens=0", f"--out-dir={tmp_path}")
    assert rows_of(result.stdout)["schedule"].endswith(schedule)
    run = program.Run(tmp_path)
    assert max(run.column("lr")) == pytest.approx(0.004 * min(steps, 100) / 100)


def test_numbers_of_the_header_are_short(tmp_path):
    """A tenth of 6e-4 is 5.9999999999999995e-05. The record has it to the last bit."""
    result = program.run(*program.SMALL, "--steps=1", "--lr=6e-4", "--warmup-steps=0", "--min-lr-fraction=0.1000000000000001",
                         "--sample-tokens=0", f"--out-dir={tmp_path}")
    assert "cosine from 0.0006 to 6e-05," in rows_of(result.stdout)["schedule"]
    assert program.Run(tmp_path).record["configuration"]["min-lr-fraction"] == 0.1000000000000001
    assert "min-lr-fraction = 0.1000000000000001\n" in (tmp_path / "config.toml").read_text()


def test_lost_output_is_an_error_at_the_end(tmp_path):
    def run(*options):
        with open("/dev/full", "w") as full:
            return subprocess.run([program.PROGRAM, *options], cwd=program.ROOT, stdout=full, stderr=subprocess.PIPE, text=True)

    result = run(*QUICK, f"--out-dir={tmp_path}/run")
    assert result.returncode == 1
    assert re.fullmatch(r"error: cannot write to standard output: No space left on device; .*; go on with: .* --resume --steps 24 .*\n",
                        result.stderr), result.stderr
    # Everything else is normal.
    assert program.Run(tmp_path / "run").column("step") == list(range(1, 13))
    assert (tmp_path / "run/checkpoint-00000012").is_dir()
    assert run("--help").returncode == 1


@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_not_taken_for_files(tmp_path, closed, ranks):
    """Otherwise the first file that a program opens would become its standard output, and receive its messages."""
    command = " ".join([program.PROGRAM, "--processes", ranks, *QUICK, f"--out-dir={tmp_path}/run", closed])
    result = subprocess.run(command, shell=True, cwd=program.ROOT, capture_output=True, text=True, check=False)
    run = program.Run(tmp_path / "run")  # reads all lines as JSON
    assert run.column("step") == list(range(1, 13))
    if " >&-" in " " + closed:
        assert result.returncode == 1 and result.stdout == ""
        assert "2>&-" in closed or result.stderr.startswith("error: cannot write to standard output: Bad file descriptor; ")
    else:
        assert result.returncode == 0 and len(step_lines(result.stdout.splitlines())) == 12 and result.stderr == ""


def test_no_steps_print_the_header(tmp_path):
    with_steps = rows_of(program.run(*QUICK, f"--out-dir={tmp_path}/a").stdout)
    text = program.run(*QUICK, "--steps=0", f"--out-dir={tmp_path}/b").stdout
    assert "validation after" not in text and "sample after" not in text
    without = rows_of(text)
    assert {name: without[name] for name in ("device", "mesh", "model", "parameters", "memory", "batch")} == \
        {name: with_steps[name] for name in ("device", "mesh", "model", "parameters", "memory", "batch")}
    assert "time" not in without and "checkpoint" not in without


def test_help_fits_the_screen():
    text = program.run("--help").stdout
    groups = re.split(r"\n\n+", text.strip())
    assert len(groups) >= 7
    for group in groups:
        assert len(group.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 100
