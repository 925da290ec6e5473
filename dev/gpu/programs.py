"""Runs the programs of the bundle, with the libraries that the launcher found, and without MPI."""

import math
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

from results import CheckFailed, Late

BUNDLE = pathlib.Path(os.environ.get("BUNDLE", pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(BUNDLE / "test/python"))
import program  # noqa: E402  (of the tests, in the bundle)

TRAIN_GPT, PROBE, OP_CHECK, KERNELS = (BUNDLE / "bin" / name for name in ("train_gpt", "model_probe", "op_check", "kernels"))
OPERATIONS = BUNDLE / "ops"  # case files
PROFILER = BUNDLE / "lib/libkernel_times.so"


class Clock:
    """The time limit of a part: no program runs after `end` (time.monotonic())."""

    end = math.inf

    @classmethod
    def at_most(cls, seconds):
        return max(0.1, min(seconds, cls.end - time.monotonic()))


def environment(**more):
    """The environment of a program: the path of CUDA's libraries, and variables that tell a single process that it is alone."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    libraries = os.environ.get("BUNDLE_LIBRARY_PATH")
    return os.environ | alone | ({"LD_LIBRARY_PATH": libraries} if libraries else {}) | more


def own_library_path():
    """The original LD_LIBRARY_PATH, for Python's modules, which have their own libraries."""
    return os.environ.get("LD_LIBRARY_PATH", "")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def tail(text, lines=6):
    return " / ".join(text.strip().splitlines()[-lines:])


def run(command, timeout, **more):
    """Runs a command; returns the finished process with its output as text. Raises Late if it takes too long."""
    timeout = Clock.at_most(timeout)
    try:
        return subprocess.run([str(word) for word in command], env=environment(**more), capture_output=True, text=True,
                              timeout=timeout)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode(errors="replace")
        raise Late(f"{pathlib.Path(command[0]).name} was ended after {timeout:.0f} s", said) from late


# Statuses of coreutils' timeout. The second one means that the first signal did not end the program.
ENDED_BY_TIMEOUT = (124, 137)


def train(out_dir, *options, device="cuda", ranks=1, timeout=200, share=True, **more):
    """Trains on `ranks` processes, which may share a GPU if `share`; `more` are environment variables. Returns the program.Run,
    with what rank 0 printed in `said`.

    Each process runs under `timeout`, so that one that hangs ends.
    """
    timeout = Clock.at_most(timeout)
    command = ["timeout", "-k", "5", str(timeout), str(TRAIN_GPT), f"--out-dir={out_dir}", "--sample-tokens=0",
               f"--device={device}", *map(str, options)]
    if ranks > 1:
        command += ["--share-gpu"] * share + [f"--comm-timeout={max(1, min(60, timeout)):.0f}"]
    port = free_port()
    processes = []
    for rank in range(ranks):
        of_rank = environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
                              MASTER_PORT=str(port), **more)
        processes.append(subprocess.Popen(command, env=of_rank, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    readers = [threading.Thread(target=lambda p=p: setattr(p, "said", p.stdout.read())) for p in processes]
    for thread in readers:
        thread.start()
    for process, thread in zip(processes, readers):
        thread.join()
        process.wait()
    said = "".join(process.said for process in processes)
    if any(process.returncode in ENDED_BY_TIMEOUT for process in processes):
        raise Late(f"the training was ended after {timeout:.0f} s", said)
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        # The others end silently.
        first = next((rank for rank in failed if "error: " in processes[rank].said), failed[0])
        raise CheckFailed(f"rank {first} of {ranks} ended with status {processes[first].returncode}: {tail(processes[first].said)}", said)
    trained = program.Run(out_dir)
    trained.said = processes[0].said
    return trained


class TimedSteps:
    """A program that writes a line per step, to a file or to standard output, and the times of these lines."""

    POLL_SECONDS = 0.0005  # for a file: how late a line may be seen, about 0.1% of the time of ten steps

    def __init__(self, command, timeout, file=None, **more):
        self.process = subprocess.Popen([str(word) for word in command], env=environment(**more), text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
        self.file, self.lines = file, None
        self.said = {"stdout": "", "stderr": ""}
        self.readers = [threading.Thread(target=self.keep, args=[name], daemon=True)
                        for name in (["stdout", "stderr"] if file else ["stderr"])]
        for thread in self.readers:
            thread.start()
        self.late = False
        self.timer = threading.Timer(Clock.at_most(timeout), self.be_late)
        self.timer.start()

    def keep(self, name):
        for line in getattr(self.process, name):
            self.said[name] += line

    def kill(self):
        """Kills the program and its child processes, such as PyTorch's compilers."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def be_late(self):
        self.late = True
        self.kill()

    def next_line(self):
        """The next line; empty if the program ended, even after an incomplete line."""
        if not self.file:
            return self.process.stdout.readline()
        line = ""
        while not line.endswith("\n"):
            ended = self.process.poll() is not None
            if self.lines is None and self.file.exists():
                self.lines = open(self.file)
            if self.lines is not None:
                line += self.lines.readline()
            if ended:
                return line if line.endswith("\n") else ""
            time.sleep(self.POLL_SECONDS)
        return line

    def take(self, count):
        """[(time, line)] of the next lines; raises CheckFailed if the program ends before."""
        taken = []
        while len(taken) < count:
            line = self.next_line()
            if not line:
                self.end()
                raise (Late if self.late else CheckFailed)(
                    f"ended after {len(taken)} of {count} steps: {tail(self.said['stderr'])}")
            taken.append((time.monotonic(), line))
        return taken

    def ask(self, question):
        """Writes a line to the program's standard input; returns the answer: the first line that is not a step's."""
        print(question, file=self.process.stdin, flush=True)
        while "loss" in (answer := self.take(1)[0][1]):
            pass
        return answer

    def end(self):
        """Kills the program: a trainer that ended in order would save its checkpoint, of many gigabytes."""
        self.kill()
        self.process.wait()
        self.timer.cancel()
        for thread in self.readers:
            thread.join(5)


def emptied(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
