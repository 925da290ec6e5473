"""Two starts of the program do not write into the folder of one run, or into one file of metrics, at the same time."""

import os
import re
import shutil
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

import program
from refused import one_error
from test_signals import Started

TINY = ["--layers=1", "--heads=2", "--channels=16", "--seq-len=16", "--global-batch-tokens=64", "--sample-tokens=0", "--val-batches=1"]
ENDLESS = [*TINY, "--steps=1000000", "--log-every=1"]
STOPPED = 75
FIRST_STEP = r"^ +1 +\d"


@pytest.fixture
def started():
    """Starts runs, and ends those that a test leaves."""
    runs = []

    def start(*options, launcher="alone"):
        runs.append(Started(launcher, *options))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.process.wait()


def lock_of(folder):
    return (folder / "run.lock").read_text().strip()


def files(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_a_second_start_is_refused(launcher, started, tmp_path):
    first = started(*ENDLESS, f"--out-dir={tmp_path}/run", "--checkpoint-every=1", launcher=launcher)
    first.read_until(r"^ +2 +\d")
    holder = lock_of(tmp_path / "run")
    assert holder.endswith(f" on machine {socket.gethostname()}") and (launcher != "alone" or holder.startswith(f"process {first.pid} "))
    in_use = f"is in use by {holder}; wait until it ends"
    for options in ([], ["--overwrite"], ["--resume"]):
        refused = program.run(*ENDLESS, f"--out-dir={tmp_path}/run", *options, ranks=2, check=False)
        hint = ", as --resume-if-any does" if "--resume" in options else ""
        assert one_error(refused.stderr) == f"--out-dir: {tmp_path}/run {in_use}{hint}, or choose another --out-dir", options
    refused = program.run(*TINY, "--steps=3", f"--out-dir={tmp_path}/other", f"--metrics={tmp_path}/run/metrics.jsonl", check=False)
    assert one_error(refused.stderr) == f"--metrics: {tmp_path}/run/metrics.jsonl {in_use}, or choose another --metrics"
    assert files(tmp_path) == {"run"}
    # Who only reads is not refused, and writes nothing.
    run = f"{tmp_path}/run"
    for options in (["--steps=0", f"--resume={run}"], ["--steps=0", "--resume", f"--out-dir={run}"], ["--print-step", f"--out-dir={run}"],
                    ["--steps=0", f"--init={run}", f"--metrics={tmp_path}/look"], ["--steps=2", f"--init={run}", f"--out-dir={tmp_path}/new"]):
        program.run(*TINY, *options)
    program.run("--generate", "--sample-tokens=1", f"--resume={run}")
    os.kill(int(holder.split()[1]), signal.SIGTERM)
    assert first.wait() == STOPPED
    assert not [name for name in files(tmp_path / "run") if name.endswith(".lock")]
    steps = program.Run(tmp_path / "run").column("step")
    assert steps == list(range(1, len(steps) + 1))


def test_a_file_of_metrics_has_one_writer(started, tmp_path):
    """The folders are different, and the file has two names."""
    (tmp_path / "link").symlink_to("m.jsonl")
    first = started(*ENDLESS, f"--out-dir={tmp_path}/a", f"--metrics={tmp_path}/m.jsonl")
    first.read_until(FIRST_STEP)
    refused = program.run(*TINY, "--steps=1", f"--out-dir={tmp_path}/b", f"--metrics={tmp_path}/link", check=False)
    assert f"--metrics: {tmp_path}/link is in use by process {first.pid}" in one_error(refused.stderr)
    program.run(*TINY, "--steps=1", f"--out-dir={tmp_path}/b", "--metrics=/dev/null")
    first.send(signal.SIGTERM)
    assert first.wait() == STOPPED and files(tmp_path) == {"a", "b", "link", "m.jsonl"}


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_resume_if_any_waits_until_the_other_has_saved(launcher, started, tmp_path):
    first = started(*ENDLESS, f"--out-dir={tmp_path}/run")
    first.read_until(FIRST_STEP)
    # All settings are those of the run, which has saved none of them yet.
    second = started(f"--out-dir={tmp_path}/run", "--resume-if-any", launcher=launcher)
    second.read_until(f"^note: {tmp_path}/run is in use by process {first.pid} on machine .*: waiting until it ends, for 2 minutes at most$")
    first.send(signal.SIGTERM)
    assert first.wait() == STOPPED
    [checkpoint] = (tmp_path / "run").glob("checkpoint-*")
    last = int(checkpoint.name.removeprefix("checkpoint-"))
    second.read_until(f"resuming from {checkpoint} after step {last}$")
    second.read_until(rf"^ +{last + 1} +\d")
    second.read_until(rf"^ +{last + 2} +\d")  # --log-every=1 is the run's too
    second.send(signal.SIGTERM)
    assert second.wait() == STOPPED
    steps = program.Run(tmp_path / "run").column("step")
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > last


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_a_signal_ends_the_waiting(launcher, started, tmp_path):
    first = started(*ENDLESS, f"--out-dir={tmp_path}/run")
    first.read_until(FIRST_STEP)
    second = started(*ENDLESS, f"--out-dir={tmp_path}/run", "--resume-if-any", launcher=launcher)
    second.read_until("waiting until it ends")
    second.send(signal.SIGTERM)
    assert second.wait() == STOPPED and "stopped before the first step: nothing was written" in second.text
    assert first.process.poll() is None


def test_a_killed_run_locks_nothing(started, tmp_path):
    first = started(*ENDLESS, f"--out-dir={tmp_path}/run", "--checkpoint-every=1")
    first.read_until(r"^-- checkpoint of step 1")
    first.send(signal.SIGKILL)
    first.wait()
    assert (tmp_path / "run/run.lock").exists()
    last = max(int(path.name.split("-")[1]) for path in (tmp_path / "run").glob("checkpoint-????????"))
    resumed = program.train(tmp_path / "run", *TINY, f"--steps={last + 1}", "--resume")
    assert resumed.column("step") == list(range(1, last + 2)) and not (tmp_path / "run/run.lock").exists()


# Stands between the program and the system's locks.
SHIM = r"""
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <ctime>
#include <fcntl.h>
extern "C" int fcntl64(int file, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void* const argument = va_arg(rest, void*);
    va_end(rest);
    const char* const mode = getenv("LOCKS");
    const bool asks = command == F_OFD_GETLK, locks = command == F_OFD_SETLK;
    if ((asks || locks) && !strcmp(mode, "none")) {
        errno = ENOLCK;
        return -1;
    }
    if (locks && !strcmp(mode, "late") && system(getenv("BEFORE_LOCK")) != 0) abort();
    static const auto real = reinterpret_cast<int (*)(int, int, ...)>(dlsym(RTLD_NEXT, "fcntl64"));
    const int result = real(file, command, argument);
    if (asks && strcmp(mode, "shared") != 0) static_cast<struct flock*>(argument)->l_type = F_UNLCK;
    return result;
}
// In mode "apart", rank 1 comes late to its third look at run.json.
extern "C" int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const int rights = va_arg(rest, int);
    va_end(rest);
    static int looks = 0;
    const char* const rank = getenv("RANK");
    const char* const name = strrchr(path, '/');
    const bool is_apart = !strcmp(getenv("LOCKS"), "apart") && rank && !strcmp(rank, "1") && name && !strcmp(name, "/run.json");
    if (is_apart && ++looks == 3 && system(getenv("BEFORE_LOCK")) != 0) abort();
    static const auto real = reinterpret_cast<int (*)(const char*, int, ...)>(dlsym(RTLD_NEXT, "open"));
    return real(path, flags, rights);
}
// A clock that stands.
extern "C" time_t time(time_t*) { return 1000000000; }
extern "C" int fcntl(int file, int command, ...) {
    va_list rest;
    va_start(rest, command);
    void* const argument = va_arg(rest, void*);
    va_end(rest);
    return fcntl64(file, command, argument);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.cpp").write_text(SHIM)
    subprocess.run(["g++", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.cpp", "-ldl"], check=True)

    def environment(mode, command="true"):
        return {"LD_PRELOAD": str(folder / "shim.so"), "LOCKS": mode, "BEFORE_LOCK": f"env -u LD_PRELOAD sh -c '{command}'",
                "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}

    return environment


def test_a_file_system_without_locks_is_named(shim, tmp_path):
    said = program.run(*TINY, "--steps=2", f"--out-dir={tmp_path}/run", env=shim("none")).stdout
    assert f"note: {tmp_path}/run cannot be locked (No locks available): let no other start" in said
    assert program.Run(tmp_path / "run").column("step") == [1, 2]


def test_starts_of_the_same_moment(shim, started, tmp_path):
    """Another start locks the folder, or comes and goes, after this one looked whether it is locked."""
    folder = tmp_path / "run"
    first = started(*ENDLESS, f"--out-dir={folder}")
    first.read_until(FIRST_STEP)
    refused = program.run(*TINY, "--steps=3", f"--out-dir={folder}", "--overwrite", env=shim("blind"), check=False)
    assert f"--out-dir: {folder} is in use by process {first.pid} " in one_error(refused.stderr)
    first.send(signal.SIGTERM)
    assert first.wait() == STOPPED
    shutil.rmtree(folder)
    program.train(folder, *TINY, "--steps=2")
    other = f"sed -i s/began_from/began_From/ {folder}/run.json"
    refused = program.run(*TINY, "--steps=4", f"--out-dir={folder}", "--overwrite", env=shim("late", other), check=False)
    assert one_error(refused.stderr) == f"--out-dir: another start of the program has begun in {folder} meanwhile; start this one again"
    assert program.Run(folder).column("step") == [1, 2]


def test_a_run_of_the_same_moment_is_gone_on_with(shim, tmp_path):
    """Another start comes and goes after this one has read its options and before it has the lock."""
    folder = tmp_path / "run"
    other = f"mkdir {tmp_path}/once 2> /dev/null || exit 0; {program.ROOT / program.PROGRAM} {' '.join(TINY)} --steps=2 --out-dir={folder} > /dev/null"
    said = program.run(*TINY, "--steps=4", f"--out-dir={folder}", "--resume-if-any", env=shim("late", other)).stdout
    assert f"resuming from {folder}/checkpoint-00000002 after step 2" in said
    assert program.Run(folder).column("step") == [1, 2, 3, 4]


def test_ranks_that_see_different_checkpoints_begin_anew(shim, tmp_path):
    """Another start comes, saves and goes between the looks of rank 0 and of rank 1."""
    folder = tmp_path / "run"
    program.train(folder, *TINY, "--steps=2")
    other = (f"env -u RANK -u WORLD_SIZE -u LOCAL_RANK -u LOCAL_WORLD_SIZE {program.ROOT / program.PROGRAM} {' '.join(TINY)} --steps=4 "
             f"--out-dir={folder} --resume-if-any > /dev/null")
    said = program.run(*TINY, "--steps=6", f"--out-dir={folder}", "--resume-if-any", ranks=2, env=shim("apart", other)).stdout
    assert f"resuming from {folder}/checkpoint-00000004 after step 4" in said
    assert program.Run(folder).column("step") == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("launcher", ["alone", "two"])
def test_six_starts_at_once_run_one_after_the_other(launcher, started, tmp_path):
    runs = [started(*ENDLESS, f"--out-dir={tmp_path}/run", "--resume-if-any", launcher=launcher) for _ in range(6)]

    def end_after_a_step(run):
        run.read_until(r"^ +\d+ +\d", seconds=120)
        run.send(signal.SIGTERM)
        return run.wait()

    with ThreadPoolExecutor(len(runs)) as threads:
        assert list(threads.map(end_after_a_step, runs)) == [STOPPED] * len(runs)
    lines = [[int(step) for step in re.findall(r"^ +(\d+) +\d", run.text, re.MULTILINE)] for run in runs]
    steps = program.Run(tmp_path / "run").column("step")
    assert sum(sorted(lines), []) == steps == list(range(1, len(steps) + 1))


def test_new_runs_of_the_same_second_do_not_meet(shim, tmp_path):
    """Each gets a folder of its own, also if the first has begun to write when the second starts."""
    command = [program.ROOT / program.PROGRAM, *ENDLESS]
    how = {"cwd": tmp_path, "env": os.environ | shim("shared"), "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    first = subprocess.Popen(command, **how)
    try:
        while not re.match(FIRST_STEP, line := first.stdout.readline()):
            assert line, "it ended"
        second = subprocess.run([*command, "--steps=2"], **how)
        assert second.returncode == 0, second.stdout
        first.send_signal(signal.SIGTERM)
        first.communicate(timeout=60 * program.PATIENCE)
    finally:
        first.kill()
    assert len(files(tmp_path / "runs")) == 2 and first.returncode == STOPPED
    assert f"note: results go to runs/{max(files(tmp_path / 'runs'))}" in second.stdout
