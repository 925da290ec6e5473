"""Stopping on request: Ctrl-C, SIGHUP, SIGUSR1 and SIGTERM finish the step, save, and print the command that resumes. The tests run
this command as printed. A second signal ends the run at once. Tested alone, with --processes, and under mpirun."""

import os
import pathlib
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import time

import boxes
import program
import pytest

STOPPED = 75
SEED = int(os.environ.get("SEED") or random.randrange(10**6))
# Long enough to be interrupted on a busy machine: a minute on an idle one.
MANY_STEPS = 100_000
QUICK = ["--layers=1", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--sample-tokens=0",
         "--val-every=200", "--val-batches=1", "--log-every=1"]
# A step takes minutes.
ENDLESS = ["--layers=4", "--channels=256", "--seq-len=256", "--global-batch-tokens=1048576", "--micro-batch-size=2",
           "--sample-tokens=0", "--log-every=1"]
ENVIRONMENT = os.environ | {"TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
# The beginning of a command for each way to start a run.
STARTS = {"alone": [program.PROGRAM], "one": [program.PROGRAM, "--processes", "1"], "two": [program.PROGRAM, "--processes", "2"],
          "launch-2": ["scripts/launch.sh", "-np", "2", program.PROGRAM],
          "mpirun-2": ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "2", program.PROGRAM]}

NEEDS_MPI = pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")


def heed_signals():
    """In a new process: a signal that the tests' own process ignores, as under nohup, is not ignored."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


class Started:
    """A run in its own process group, with its standard output and error in one pipe or terminal."""

    def __init__(self, launcher, *options, terminal=False):
        command = [*STARTS[launcher], *map(str, options)]
        self.text = ""
        if terminal:
            pid, self.file = pty.fork()  # the terminal is its controlling terminal
            if pid == 0:
                os.chdir(program.ROOT)
                heed_signals()
                os.execvpe(command[0], command, ENVIRONMENT)
            self.pid, self.process = pid, None
        else:
            self.file, theirs = os.pipe()
            self.process = subprocess.Popen(command, cwd=program.ROOT, stdin=subprocess.DEVNULL, stdout=theirs,
                                            stderr=theirs, env=ENVIRONMENT, start_new_session=True, preexec_fn=heed_signals)
            self.pid = self.process.pid
            os.close(theirs)

    def read(self, seconds):
        """Reads the output that arrives within `seconds`; returns False at the end."""
        if not select.select([self.file], [], [], seconds)[0]:
            return True
        try:
            piece = os.read(self.file, 1 << 16)
        except OSError:  # this is how a terminal ends
            piece = b""
        self.text += piece.decode(errors="replace").replace("\r\n", "\n")
        return bool(piece)

    def read_until(self, pattern, seconds=30):
        end = time.monotonic() + seconds * program.PATIENCE
        while not re.search(pattern, self.text, re.MULTILINE):
            assert time.monotonic() < end, f"no '{pattern}' in {self.text}"
            assert self.read(0.1), f"ended without '{pattern}': {self.text}"

    def send(self, number):
        os.kill(self.pid, number)

    def wait(self, seconds=60):
        """Its exit status as in Python: negative for a signal. (If others spin on all cores, a process woken by a signal may
        wait seconds for its turn.)"""
        end = time.monotonic() + seconds * program.PATIENCE
        while self.read(0.1):
            assert time.monotonic() < end, f"still running: {self.text}"
        os.close(self.file)
        if self.process:
            return self.process.wait(10 * program.PATIENCE)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture(autouse=True)
def end_what_is_left(tmp_path):
    """A test that fails leaves its run behind, and the run's command line contains the test's own folder."""
    yield
    for process in processes_naming(str(tmp_path)):
        os.kill(process, signal.SIGKILL)


def processes_naming(text):
    """The ids of all processes whose command line contains a text."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def process_of_rank(rank, text):
    """The id of the process that is this rank of the job whose command line contains a text."""
    for process in processes_naming(text):
        if f"RANK={rank}".encode() in pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            return process
    raise AssertionError(f"no process of rank {rank}")


def expect_no_process(text):
    """No such process remains after at most five seconds."""
    end = time.monotonic() + 5 * program.PATIENCE
    while processes_naming(text):
        assert time.monotonic() < end, f"left running: {processes_naming(text)}"
        time.sleep(0.05)


def steps_of(text):
    return [int(step) for step in re.findall(r"^ *(\d+) +\d+\.\d{5} ", text, re.MULTILINE)]


def command_to_go_on(text):
    return re.search(r"^go on with\n  (.*)$", text, re.MULTILINE)[1]


def type_command(command):
    return subprocess.run(command, shell=True, cwd=program.ROOT, env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=120 * program.PATIENCE)


def stop(launcher, number, out_dir, *options):
    """The output of a run that a signal stops after some step."""
    steps = MANY_STEPS
    run = Started(launcher, *QUICK, f"--steps={steps}", f"--out-dir={out_dir}", *options)
    run.read_until("^ +20 ")
    run.send(number)
    assert run.wait() == STOPPED
    # mpirun prints this anywhere, even in the middle of a line.
    text = re.sub("mpirun[^ ]*: Forwarding signal 10 to job\n", "", run.text)
    if launcher != "mpirun-2":
        assert text == run.text
    step = steps_of(text)[-1]
    assert 20 <= step < steps and steps_of(text) == list(range(1, step + 1))
    assert text.count("Stopping (training finishes its step and saves first)") == 1
    assert f"stopped     after step {step:,} of {steps:,}" in text
    assert not re.search("mpirun (noticed|detected)|error", text)
    assert [path.name for path in out_dir.glob("checkpoint-*")] == [f"checkpoint-{step:08}"]
    return text


@pytest.mark.parametrize("launcher,number", [
    ("alone", signal.SIGUSR1), ("alone", signal.SIGTERM), ("two", signal.SIGUSR1), ("two", signal.SIGTERM), ("launch-2", signal.SIGTERM)])
def test_a_signal_stops_after_the_step(launcher, number, tmp_path):
    assert command_to_go_on(stop(launcher, number, tmp_path)).endswith(" --resume")


@pytest.mark.parametrize("launcher,number", [
    ("alone", signal.SIGINT), ("one", signal.SIGUSR1), ("two", signal.SIGINT),
    pytest.param("mpirun-2", signal.SIGUSR1, marks=NEEDS_MPI)])
def test_the_printed_command_goes_on_as_if_nothing_had_been(launcher, number, tmp_path):
    out_dir = tmp_path / "a run's"  # a shell needs quotes for it
    options = ["--val-every=15", "--lr-schedule=constant", "--warmup-steps=5"]  # independent of the number of steps
    command = command_to_go_on(stop(launcher, number, out_dir, *options))
    steps = program.Run(out_dir).column("step")[-1] + 100
    words = STARTS["alone" if launcher == "one" else launcher]
    assert command.startswith(" ".join(words)), command
    result = type_command(f"{command} --steps {steps}")
    assert result.returncode == 0, result.stdout + result.stderr
    resumed = program.Run(out_dir)
    whole = program.train(tmp_path / "whole", *QUICK, *options, f"--steps={steps}", ranks=2 if launcher in ("two", "mpirun-2") else 1,
                          env={"OMP_NUM_THREADS": "1"})
    assert resumed.column("step") == whole.column("step")
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert resumed.column(name) == whole.column(name), name
    assert [line.get("val_loss") for line in resumed.lines] == [line.get("val_loss") for line in whole.lines]
    last = f"checkpoint-{steps:08}"
    assert boxes.contents(resumed.out_dir / last) == boxes.contents(whole.out_dir / last)
    # The best of the whole run, from either part.
    best = min((line["val_loss"], line["step"]) for line in whole.lines if "val_loss" in line)
    assert f"validation loss {best[0]:.5f} after step {best[1]:,}" in result.stdout


def test_the_command_after_the_last_step_trains_on(tmp_path):
    result = program.run(*QUICK, "--steps=4", f"--out-dir={tmp_path}")
    result = type_command(command_to_go_on(result.stdout))
    assert result.returncode == 0, result.stdout + result.stderr
    assert program.Run(tmp_path).column("step") == list(range(1, 9))


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_a_closed_terminal_stops_after_the_step(launcher, tmp_path):
    """The run can print nothing any more, and saves all the same."""
    run = Started(launcher, *QUICK, f"--steps={MANY_STEPS}", f"--out-dir={tmp_path}", terminal=True)
    run.read_until(r" 20/100,000 ")  # the progress line
    os.close(run.file)
    assert os.waitstatus_to_exitcode(os.waitpid(run.pid, 0)[1]) == STOPPED
    saved, = tmp_path.glob("checkpoint-*")
    assert 20 <= int(saved.name.split("-")[1]) < MANY_STEPS
    expect_no_process(str(tmp_path))


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_ctrl_c_that_ends_the_reader_too(launcher, tmp_path):
    """`./train_gpt | tee log`: the trained steps are saved, and standard error has the command that resumes."""
    command = [*STARTS[launcher], *QUICK, f"--steps={MANY_STEPS}", f"--out-dir={tmp_path}"]
    process = subprocess.Popen(command, cwd=program.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True)
    for line in process.stdout:
        if re.match(" +20 ", line):
            break
    process.stdout.close()
    process.send_signal(signal.SIGINT)
    stderr = process.stderr.read()
    assert process.wait(10 * program.PATIENCE) == STOPPED
    match = re.fullmatch(r"(?:note: cannot write to standard output: Broken pipe; .*; go on with: |go on with\n  )(.* --resume)\n", stderr)
    assert match, stderr
    step = program.Run(tmp_path).column("step")[-1]
    result = type_command(f"{match[1]} --steps {step + 3}")
    assert result.returncode == 0, result.stderr
    assert program.Run(tmp_path).column("step") == list(range(1, step + 4))


@NEEDS_MPI
def test_ranks_agree_on_the_step_though_one_alone_was_asked(tmp_path):
    run = Started("mpirun-2", *QUICK, f"--steps={MANY_STEPS}", f"--out-dir={tmp_path}")
    run.read_until("^ +20 ")
    ranks = [pid for pid in processes_naming(str(tmp_path)) if pid != run.pid]
    assert len(ranks) == 2
    last = max(ranks, key=lambda pid: b"OMPI_COMM_WORLD_RANK=1\0" in pathlib.Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(last, signal.SIGUSR1)
    assert run.wait() == STOPPED
    assert f"stopped     after step {steps_of(run.text)[-1]:,} of" in run.text


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_ctrl_c_on_a_terminal(launcher, tmp_path):
    """The terminal sends it to all processes in the foreground, including those that must not see it."""
    run = Started(launcher, *QUICK, f"--steps={MANY_STEPS}", f"--out-dir={tmp_path}", terminal=True)
    run.read_until(r"20/100,000  \d")
    os.write(run.file, b"\x03")
    assert run.wait() == STOPPED
    assert "mpirun" not in run.text.replace("--", "")
    assert "\r\x1b[KStopping (training finishes its step and saves first)" in run.text
    # No progress line is left when the summary begins.
    assert "left" not in re.split("\x1b\\[K", run.text)[-1]
    assert command_to_go_on(run.text)
    expect_no_process(str(tmp_path))


@pytest.mark.parametrize("launcher,status", [("alone", -signal.SIGINT), ("two", 130)])
@pytest.mark.parametrize("terminal", [False, True])
def test_a_second_signal_ends_at_once(launcher, status, terminal, tmp_path):
    out_dir = tmp_path / "run"
    run = Started(launcher, *ENDLESS, f"--out-dir={out_dir}", terminal=terminal)
    while not (out_dir / "metrics.jsonl").exists():  # the first step begins
        assert run.read(0.05), run.text

    def signal_once():
        if terminal:
            os.write(run.file, b"\x03")
        else:
            run.send(signal.SIGINT)

    signal_once()
    run.read_until("press Ctrl-C again to stop now")
    time.sleep(0.3)  # signals within a moment count as one request
    signal_once()
    assert run.wait(3) == status
    assert run.text.count("Stopping (training finishes its step and saves first)") == 1
    assert not re.search("mpirun (noticed|detected)|go on with", run.text)
    assert not list(out_dir.glob("checkpoint-*"))
    expect_no_process(str(out_dir))


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_no_signal_is_lost(launcher, tmp_path):
    """At any moment after the start (long_signals.py tries more of them). The program's handlers exist within 0.3 s."""
    draw = random.Random(SEED)
    for attempt in range(6):
        signal_at_a_moment(launcher, signal.SIGINT, draw.uniform(0, 0.5), tmp_path / str(attempt))


def signal_at_a_moment(launcher, number, delay, out_dir):
    """The run stops in order, or the signal ends it before it could do anything. Returns its status."""
    run = Started(launcher, *QUICK, f"--steps={MANY_STEPS}", f"--out-dir={out_dir}")
    time.sleep(delay)
    run.send(number)
    status = run.wait()
    assert status in (STOPPED, -number), f"SEED={SEED}, after {delay:.3f} s: {status}\n{run.text}"
    if status == -number:
        assert run.text == "" and not out_dir.exists(), f"SEED={SEED}, after {delay:.3f} s: {run.text}"
    elif not run.text.endswith("note: stopped before the first step: nothing was written\n"):
        assert command_to_go_on(run.text).endswith(" --resume") and list(out_dir.glob("checkpoint-*"))
    expect_no_process(str(out_dir))
    return status


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_a_signal_ends_a_validation(launcher, tmp_path):
    """The interrupted validation runs when the run resumes, so that its metrics are complete."""
    text = tmp_path / "long.txt"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog.\n" * 600000)
    options = [*QUICK, "--steps=20", "--val-every=10", f"--val-data={text}"]
    whole = program.train(tmp_path / "whole", *options, "--val-batches=3", ranks=2 if launcher == "two" else 1,
                          env={"OMP_NUM_THREADS": "1"})
    run = Started(launcher, *options, f"--out-dir={tmp_path}/run", "--val-batches=0", terminal=True)
    run.read_until("10/20 .*validating [1-9]")  # one of 70,000 batches, which take minutes
    run.send(signal.SIGINT)
    assert run.wait(30) == STOPPED
    assert "stopped     after step 10 of 20" in run.text and "validation after" not in run.text, run.text
    stopped = program.Run(tmp_path / "run")
    assert stopped.column("step") == list(range(1, 11)) and "val_loss" not in stopped.lines[-1]
    result = type_command(command_to_go_on(run.text) + " --val-batches=3")
    assert result.returncode == 0, result.stdout + result.stderr
    resumed = program.Run(tmp_path / "run")
    for name in ("step", "loss"):
        assert resumed.column(name) == whole.column(name)
    assert [line.get("val_loss") for line in resumed.lines] == [line.get("val_loss") for line in whole.lines]


def test_a_signal_ends_a_sample(tmp_path):
    run = Started("two", *QUICK, "--steps=20", "--sample-every=10", "--sample-tokens=1000000",
                  f"--out-dir={tmp_path}", terminal=True)
    run.read_until("sampling")  # a million tokens
    run.send(signal.SIGINT)
    assert run.wait(30) == STOPPED
    assert "stopped     after step 10 of 20" in run.text and "sample after" not in run.text


def test_a_signal_while_given_weights_are_looked_at(tmp_path):
    """There was nothing to save, and nothing to resume."""
    program.run(*QUICK, "--steps=0", f"--export={tmp_path}/x.safetensors")
    text = tmp_path / "long.txt"
    text.write_bytes(b"The quick brown fox jumps over the lazy dog.\n" * 600000)
    run = Started("alone", *QUICK, "--steps=0", f"--init={tmp_path}/x.safetensors", "--val-batches=0", f"--val-data={text}",
                  f"--out-dir={tmp_path}/run", terminal=True)
    run.read_until("validating [1-9]")
    run.send(signal.SIGINT)
    assert run.wait() == STOPPED
    assert "stopped  as requested; there was nothing to save\n" in run.text
    assert "go on with" not in run.text and "after step" not in run.text and "this step" not in run.text


def state_of(process):
    """The state of a process: R, S, T (stopped) and so on."""
    return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_ctrl_z_pauses_the_processes(tmp_path):
    run = Started("two", *QUICK, f"--steps={MANY_STEPS}", f"--out-dir={tmp_path}", terminal=True)
    run.read_until(r"20/100,000  \d")
    ranks = [pid for pid in processes_naming(str(tmp_path)) if pid != run.pid]
    assert len(ranks) == 2
    os.write(run.file, b"\x1a")
    end = time.monotonic() + 10
    while {state_of(pid) for pid in [run.pid, *ranks]} != {"T"}:
        assert time.monotonic() < end, "not paused"
        assert run.read(0.01), run.text
    os.killpg(run.pid, signal.SIGCONT)  # as fg does
    last = steps_of(re.sub("\x1b\\[[0-9;]*[mK]|\r", "\n", run.text))[-1]
    run.read_until(rf"{last + 100:,}/100,000  \d")
    os.write(run.file, b"\x03")
    assert run.wait() == STOPPED
    expect_no_process(str(tmp_path))


def test_a_second_signal_while_it_saves_leaves_the_checkpoint_before(tmp_path):
    # Saving a checkpoint of 300 MB takes far longer than the required time between the two signals.
    run = Started("alone", "--layers=8", "--heads=8", "--channels=512", "--seq-len=16", "--global-batch-tokens=32",
                  "--sample-tokens=0", "--val-every=0", "--val-batches=1", "--checkpoint-every=1", f"--steps={MANY_STEPS}",
                  "--log-every=1", f"--out-dir={tmp_path}")
    try:
        run.read_until("^ +2 ")
        run.send(signal.SIGUSR1)
        time.sleep(0.15)
        while not (tmp_path / "checkpoint-00000002.partial").exists():
            assert run.read(0.01), run.text
        run.send(signal.SIGUSR1)
        assert run.wait(3) == -signal.SIGUSR1
        assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == [
            "checkpoint-00000001", "checkpoint-00000002.partial"]
        result = type_command(f"{program.PROGRAM} --config {tmp_path}/config.toml --out-dir {tmp_path} --steps 0 --resume")
        assert result.returncode == 0 and "after step 1\n" in result.stdout, result.stdout + result.stderr
    finally:
        for folder in tmp_path.glob("checkpoint-*"):
            shutil.rmtree(folder)


def test_what_other_ranks_say_is_not_appended_to_the_progress(tmp_path):
    run = Started("two", *QUICK, f"--steps={MANY_STEPS}", f"--out-dir={tmp_path}", terminal=True)
    run.read_until(r"20/100,000  \d")
    os.kill(process_of_rank(1, str(tmp_path)), signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    lines = re.split("\r\x1b\\[K|\n", run.text)
    assert any(line.startswith("error: rank 1 is gone: ") for line in lines), run.text
    assert "left" not in re.split("\x1b\\[K", run.text)[-1]


def test_a_rank_that_ends_is_named_if_no_other_rank_can_say_it(tmp_path):
    """The launcher waits ten seconds for the others, which are stopped here."""
    run = Started("two", *ENDLESS, f"--out-dir={tmp_path}")
    run.read_until("^ +results ")
    os.kill(process_of_rank(0, str(tmp_path)), signal.SIGSTOP)
    os.kill(process_of_rank(1, str(tmp_path)), signal.SIGKILL)
    assert run.wait() == 128 + signal.SIGKILL
    assert "error: rank 1 was ended by signal 9 (Killed); other ranks still ran 10 seconds later and are killed\n" in run.text


def test_ranks_that_are_all_killed_are_named(tmp_path):
    """As by a kernel without memory. Both are stopped before, so neither sees the other's end."""
    run = Started("two", *ENDLESS, f"--out-dir={tmp_path}")
    run.read_until("^ +results ")
    ranks = [process_of_rank(rank, str(tmp_path)) for rank in (0, 1)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for rank in ranks:
            os.kill(rank, number)
    assert run.wait() == 128 + signal.SIGKILL
    assert re.search(r"error: rank [01] was ended by signal 9 \(Killed\)\n", run.text), run.text


def test_nothing_outlives_the_launcher(tmp_path):
    run = Started("two", *ENDLESS, f"--out-dir={tmp_path}")
    run.read_until("^ +results ")
    run.send(signal.SIGKILL)
    expect_no_process(str(tmp_path))
    run.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_rank_that_has_just_started_keeps_the_signal(number, tmp_path):
    """It does not die of it before it can handle it."""
    run = Started("two", *ENDLESS, f"--out-dir={tmp_path}")
    children = pathlib.Path(f"/proc/{run.pid}/task/{run.pid}/children")
    while len(ranks := children.read_text().split()) < 2:
        assert run.process.poll() is None
    os.kill(int(ranks[1]), number)
    assert run.wait() == STOPPED, run.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_that_was_ignored_stays_ignored(ranks, tmp_path):
    """Like a run in the background of a script: Ctrl-C is not meant for it."""
    run = subprocess.Popen([program.PROGRAM, "--processes", str(ranks), *QUICK, "--steps=3000", f"--out-dir={tmp_path}"],
                           cwd=program.ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    while not (tmp_path / "metrics.jsonl").exists():
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    assert run.wait(60 * program.PATIENCE) == 0
    assert program.Run(tmp_path).column("step")[-1] == 3000
