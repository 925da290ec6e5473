"""scripts/watch.py: its display of runs, on a terminal (here a pseudo-terminal) that it leaves unchanged, and in a pipe."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import program
import pytest
from made_runs import ABOUT, SCRIPTS, append, falling, full_line, full_lines, write_lines
from rich.cells import cell_len
from rich.console import Console

import watch
from metrics import Follower

SCRIPT = SCRIPTS / "watch.py"
ESCAPE = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


def state_of(path, now=None, trouble=""):
    follower = Follower(path)
    follower.poll()
    return watch.State(follower, trouble, time.time() if now is None else now)


def shown(states, width=80, tall=1000, encoding="utf-8"):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, height=50, highlight=False)
    console.print(watch.view(states, console, tall))
    file.flush()
    return file.buffer.getvalue().decode(encoding)


def once(*words, **environment):
    return subprocess.run([sys.executable, SCRIPT, *map(str, words)], capture_output=True, text=True,
                          env=os.environ | environment, timeout=60 * program.PATIENCE)


class Terminal:
    """A terminal with this many columns, on which the script runs."""

    def __init__(self, *words, columns=90, rows=30):
        self.ours, self.theirs = pty.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS", "LINES")}
        # Its own session with this controlling terminal, so that Ctrl-C acts as if a user had typed it.
        self.process = subprocess.Popen([sys.executable, SCRIPT, *map(str, words), "--interval", "0.02"], stdin=self.theirs,
                                        stdout=self.theirs, stderr=self.theirs, start_new_session=True,
                                        env=environment | {"TERM": "xterm"},
                                        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        self.text = ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)

    def read(self):
        if select.select([self.ours], [], [], 0.05)[0]:
            self.text += os.read(self.ours, 1 << 16).decode(errors="replace")

    def wait_for(self, *wanted):
        """Waits until all these texts have been written again."""
        self.text = ""
        deadline = time.monotonic() + 60 * program.PATIENCE
        while not all(text in ESCAPE.sub("", self.text) for text in wanted):
            assert time.monotonic() < deadline and self.process.poll() is None, self.text
            self.read()

    def end(self):
        """Its exit status, after reading everything that it has written."""
        deadline = time.monotonic() + 60 * program.PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline
            self.read()
        self.read()
        return self.process.returncode


def test_a_run_is_watched_until_ctrl_c(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with Terminal(tmp_path / "run") as terminal:
        terminal.wait_for("waiting for its first step")
        write_lines(path, full_lines(falling(10)))
        terminal.wait_for("step 10 of 40", "running")
        append(path, [full_line(11, 1.25, val_loss=1.75)])
        terminal.wait_for("step 11 of 40", "validation 1.7500")
        write_lines(path, full_lines(falling(5)))  # resumed
        terminal.wait_for("step 5 of 40")
        append(path, full_lines(falling(40)[5:], first=6))
        terminal.wait_for("100% step 40 of 40", "done")
        os.write(terminal.ours, b"\x03")
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text and "^C" not in terminal.text
        assert terminal.text.rindex("\x1b[?25h") > terminal.text.find("\x1b[?25l")  # the cursor is visible again
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_it_ends_when_it_is_told_to(tmp_path):
    write_lines(tmp_path / "run" / "metrics.jsonl", full_lines(falling(3)))
    with Terminal(tmp_path / "run") as terminal:
        terminal.wait_for("step 3 of 40")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 0
        assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_pipe_gets_how_it_stands(tmp_path):
    write_lines(tmp_path / "run" / "metrics.jsonl", full_lines(falling(20)))
    done = once(tmp_path / "run", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and done.stdout.count("run ─") == 1
    for text in ("step 20 of 40", "50%", "tokens/s 15.4 k", "ms/step 100", "grad norm 1.5", "lr 0.001", "memory 40.0 MiB a process"):
        assert text in done.stdout, done.stdout
    damaged = write_lines(tmp_path / "damaged.jsonl", [{"step": 1}])
    done = once(tmp_path / "run", damaged, "--once")
    words = " ".join(done.stdout.replace("│", "").split())
    assert done.returncode == 1 and "no numbers `step` and `loss`" in words and "step 20 of 40" in words


def test_means_are_of_the_last_steps_and_rates_over_their_time(tmp_path):
    """Ten steps of one second, then fifty steps, alternately of 100 ms and 300 ms."""
    lines = [full_line(step, 1.0, step_ms=ms, tokens_per_s=1536e3 / ms, mfu=30 / ms)
             for step, ms in enumerate([1000.0] * 10 + [100.0, 300.0] * 25, 1)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    out = " ".join(once(tmp_path, COLUMNS="100").stdout.split())
    for text in ("tokens/s 7.68 k", "ms/step 200", "MFU 15.0%"):
        assert text in out, out


def test_the_newest_run_is_the_default(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        watch.main([])
    assert stop.value.code.startswith("error: no run in runs/")
    for name, changed in (("old", 1e9), ("new", 2e9), ("older", 5e8)):
        os.utime(write_lines(tmp_path / "runs" / name / "metrics.jsonl", full_lines(falling(3))), (changed, changed))
    with pytest.raises(SystemExit) as stop:
        watch.main([])
    assert stop.value.code == 0 and "new" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("words, complaint", [
    (["nothing"], "there is no nothing; give a run's directory"),
    ([".", "--interval", "-1"], "--interval -1 is not a number of seconds"),
])
def test_bad_input_is_one_clear_line(tmp_path, monkeypatch, words, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        watch.main(words)
    assert stop.value.code.startswith(f"error: {complaint}") and "\n" not in stop.value.code


@pytest.mark.parametrize("lines, age, status", [
    (full_lines(falling(20)), 1, "running"),
    (full_lines(falling(40)), 1e6, "done"),
    (full_lines(falling(20)), 3723, "no step for 1:02:03"),
    (full_lines(falling(20), time=None, step_ms=300e3), 600, "running"),  # its steps take 5 minutes
    ([*full_lines(falling(20)), full_line(21, None)], 1, "the loss is not finite"),
    ([{"step": 40, "tokens": 61440, "val_loss": 2.0}], 1e6, "evaluated"),  # a checkpoint without a step after it
    ([], 1, "waiting for its first step"),
])
def test_the_state_of_a_run(tmp_path, lines, age, status):
    path = write_lines(tmp_path / "metrics.jsonl", lines)
    os.utime(path, (1.8e9, 1.8e9))
    state = state_of(path, now=1.8e9 + age)
    assert state.status()[0] == status
    assert status in shown([state]) and status in shown([state, state], tall=5, width=140)


def test_the_time_that_is_left_is_by_the_clock(tmp_path):
    """A step takes one second with its validation. The step itself takes 0.1 s of it. A stop in between does not count."""
    path = write_lines(tmp_path / "metrics.jsonl", full_lines(falling(20)))
    assert state_of(path).left == pytest.approx(20)
    stopped = [line | ({"time": line["time"] + 86400} if line["step"] > 10 else {}) for line in full_lines(falling(20))]
    assert state_of(write_lines(path, stopped)).left == pytest.approx(20)
    assert state_of(write_lines(path, full_lines(falling(20), time=None))).left == pytest.approx(2)
    assert "0:02 left" in shown([state_of(path)])
    # Resumed with more steps than its first line says.
    longer = state_of(write_lines(path, full_lines(falling(41))))
    assert longer.left is None and longer.status()[0] == "running" and "step 41" in shown([longer])
    # A resumed run adds a line about itself. After this line, the end of the first part is not the end of the run.
    write_lines(path, full_lines(falling(40)))
    assert state_of(path).done
    append(path, [{"run": ABOUT | {"configuration": ABOUT["configuration"] | {"steps": 80}}}])
    resumed = state_of(path)
    assert not resumed.done and resumed.total == 80 and resumed.left == pytest.approx(40)


@pytest.mark.parametrize("width", [20, 33, 40, 60, 80, 120, 200])
@pytest.mark.parametrize("tall", [5, 1000])  # a table, panels
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_every_width_is_kept(tmp_path, width, tall, encoding):
    runs = [full_lines(falling(40)), full_lines(falling(1)), full_lines([None] * 5), [{"step": 3, "loss": 2.0}],
            [*full_lines(falling(30), val_loss=1.5, mfu=0.4, hellaswag_acc_norm=0.3)], []]
    states = [state_of(write_lines(tmp_path / f"a_run_of_many_words_number_{index}" / "metrics.jsonl", lines, about))
              for index, lines in enumerate(runs) for about in (ABOUT, {})]
    lines = shown(states, width, tall, encoding).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert sum("a_run_of" in line for line in lines) == len(states)


def test_the_course_of_a_loss():
    rows, low, high = watch.area(range(8, 0, -1), 20, 1, False)
    assert rows == ["█▇▆▅▄▃▂▁"] and (low, high) == (1, 8)
    rows, low, high = watch.area([4.0] * 10 + [2.0] * 10, 20, 3, False)
    assert (low, high) == (2, 4) and rows == ["█" * 10 + " " * 10] * 2 + ["█" * 10 + "▁" * 10]
    rows, low, high = watch.area([1.0, float("nan"), 1.0], 20, 2, True)
    assert rows == ["   ", ".x."] and low == high == 1
    rows, _, _ = watch.area([100.0] + [2.0, 1.0] * 100, 201, 1, False)  # the first value does not flatten the others
    assert rows[0][1:4] == "█▁█"
