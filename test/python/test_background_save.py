"""--checkpoint-async: checkpoints that are written while training goes on have the same bits, delay no step, and lose nothing when a
file cannot be written or a process dies; --keep-last."""

import os
import pathlib
import random
import re
import signal
import subprocess
import time

import pytest

import boxes
import program
from refused import one_error

MODEL = ["--layers=3", "--heads=2", "--channels=64", "--seq-len=16", "--global-batch-tokens=384", "--device=cpu", "--sample-tokens=0",
         "--val-every=0", "--log-every=1"]
LEAN, EIGHT, MUON = ["--dtype=bf16", "--moments-dtype=bf16", "--master-dtype=none"], ["--dtype=bf16", "--moments-dtype=8bit"], ["--optimizer=muon"]
SHARDS, ALL = (3, ["--zero-stage=3"]), (4, ["--pipeline-parallel=2", "--tensor-parallel=2"])
MESHES = [(1, []), (3, []), (3, ["--zero-stage=2"]), SHARDS, (4, ["--zero-stage=3", "--zero-shard-size=2"]), (2, ["--tensor-parallel=2"]),
          (2, ["--pipeline-parallel=2"]), ALL]
WAITS = "--checkpoint-async=false"
SEED = int(os.environ.get("SEED") or random.randrange(10**6))

# Stands between the program and the system. Of the files of checkpoints that are not complete, fsync waits for those with HOLD_PART in
# their names while the file HOLD exists, and what FAULT names fails: a call, the number of the error, a part of the file's name. No
# thread of C++ starts while the file NO_THREAD exists.
SHIM = r"""
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <string>
#include <unistd.h>
template <class F>
static F* real(F*, const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}
static std::string name_of(int file) {
    char name[4096];
    const ssize_t size = readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), name, sizeof name);
    return {name, static_cast<std::size_t>(size < 0 ? 0 : size)};
}
static bool fails(const char* call, const std::string& name) {
    char which[8], part[4096];
    int number;
    const char* const fault = getenv("FAULT");
    if (!fault || sscanf(fault, "%7s %d %4095s", which, &number, part) != 3) return false;
    if (strcmp(which, call) != 0 || name.find(part) == std::string::npos) return false;
    errno = number;
    return true;
}
extern "C" int fsync(int file) {
    const std::string name = name_of(file);
    const char* const hold = getenv("HOLD");
    const char* const part = getenv("HOLD_PART");
    const bool is_held = hold && name.find(".partial/") != std::string::npos && name.find(part ? part : "") != std::string::npos;
    while (is_held && access(hold, F_OK) == 0) usleep(1000);
    return fails("fsync", name) ? -1 : real(fsync, "fsync")(file);
}
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*f)(void*), void* argument) {
    Dl_info of;
    const char* const file = getenv("NO_THREAD");
    const bool is_refused = file && access(file, F_OK) == 0 && dladdr(reinterpret_cast<void*>(f), &of) && strstr(of.dli_fname, "libstdc++");
    return is_refused ? EAGAIN : real(pthread_create, "pthread_create")(thread, how, f, argument);
}
extern "C" ssize_t write(int file, const void* bytes, size_t count) {
    return fails("write", name_of(file)) ? -1 : real(write, "write")(file, bytes, count);
}
extern "C" int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const int rights = va_arg(rest, int);
    va_end(rest);
    if ((flags & O_CREAT) && fails("open", path)) return -1;
    return reinterpret_cast<int (*)(const char*, int, ...)>(dlsym(RTLD_NEXT, "open"))(path, flags, rights);
}
extern "C" int open64(const char* path, int flags, ...) __attribute__((alias("open")));
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.cpp").write_text(SHIM)
    subprocess.run(["g++", "-std=c++20", "-shared", "-fPIC", "-o", folder / "shim.so", folder / "shim.cpp", "-ldl"], check=True)
    return {"LD_PRELOAD": str(folder / "shim.so"), "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":verify_asan_link_order=0"}


@pytest.fixture
def start(tmp_path):
    """Starts runs in process groups of their own, with their output in one pipe; ends those that a test leaves."""
    started = []

    def start(*options, mesh=(1, []), env={}):
        ranks, how = mesh
        command = [program.ROOT / program.PROGRAM, *(["--processes", str(ranks)] if ranks > 1 else []), *MODEL, *how, *options]
        started.append(subprocess.Popen(list(map(str, command)), env={**os.environ, **env}, text=True, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def train(folder, *options, mesh=(1, []), **more):
    ranks, how = mesh
    return program.run(*MODEL, *how, *options, f"--out-dir={folder}", ranks=ranks, **more)


def saved(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-????????"))


def checkpoint(folder, step):
    return folder / f"checkpoint-{step:08}"


def read_until(process, pattern):
    """The lines up to one with this pattern."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError("".join(lines))


def same(folder, other, steps):
    assert program.Run(folder).losses == program.Run(other).losses
    for step in steps:
        assert boxes.contents(checkpoint(folder, step)) == boxes.contents(checkpoint(other, step)), step


@pytest.mark.parametrize("options, mesh", [([], (1, [])), (LEAN, SHARDS), (MUON, ALL), (EIGHT, (3, ["--zero-stage=2"])),
                                           ([*MUON, "--dtype=bf16"], (4, ["--zero-stage=1", "--zero-shard-size=2"]))])
def test_the_bits_are_those_between_steps(options, mesh, tmp_path):
    options = [*options, "--steps=7", "--checkpoint-every=2", "--val-every=3", "--val-batches=1", "--keep-best"]
    beside = train(tmp_path / "beside", *options, mesh=mesh).stdout
    train(tmp_path / "between", *options, WAITS, mesh=mesh)
    same(tmp_path / "beside", tmp_path / "between", [2, 4, 6, 7])
    [best], [other] = ((tmp_path / name / "best").iterdir() for name in ("beside", "between"))
    assert best.name == other.name and boxes.contents(best) == boxes.contents(other)
    for step in (2, 4, 6):
        assert f"-- checkpoint of step {step}: {checkpoint(tmp_path / 'beside', step)}\n" in beside
    assert not list(tmp_path.rglob("*.partial"))


@pytest.mark.parametrize("mesh", [(1, []), SHARDS])
def test_steps_go_on_while_a_disk_writes(mesh, shim, start, tmp_path):
    train(tmp_path / "between", "--steps=25", "--checkpoint-every=10", WAITS, mesh=mesh)
    (tmp_path / "hold").touch()
    run = start("--steps=25", "--checkpoint-every=10", "--keep-last=1", f"--out-dir={tmp_path}/run", mesh=mesh,
                env={**shim, "HOLD": str(tmp_path / "hold")})
    lines = read_until(run, r"^ *20 +\d")
    assert "checkpoint of step" not in "".join(lines) and saved(tmp_path / "run") == []
    (tmp_path / "hold").unlink()
    rest = run.communicate(timeout=60 * program.PATIENCE)[0]
    assert run.returncode == 0 and rest.index("checkpoint of step 10") < rest.index("checkpoint of step 20"), rest
    same(tmp_path / "run", tmp_path / "between", [25])
    assert saved(tmp_path / "run") == [25]


FAULTS = [("write", "ENOSPC", "No space left on device"), ("fsync", "EIO", "Input/output error"), ("open", "EROFS", "Read-only file system")]
FILES = ["weights-00000-1", "state-00001-1", "checksums-00002", "manifest"]


@pytest.mark.parametrize("call, error, words", FAULTS)
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_cannot_be_written(file, call, error, words, shim, tmp_path):
    """On any rank: one line, the earlier checkpoint is whole, nothing is left of the other, and the run goes on from there."""
    number = getattr(__import__("errno"), error)
    result = train(tmp_path / "run", "--steps=12", "--checkpoint-every=4", mesh=SHARDS, check=False,
                   env={**shim, "FAULT": f"{call} {number} checkpoint-00000008.partial/{file}"})
    line = one_error(result.stderr)
    assert result.returncode == 1 and saved(tmp_path / "run") == [4]
    assert f"checkpoint-00000008.partial/{file}" in line and words in line and not list(tmp_path.rglob("*.partial"))
    assert line.endswith(f"; {'make room, and ' * (error == 'ENOSPC')}continue with --resume: the earlier checkpoints are whole")
    assert "is whole" in program.run(f"--verify-checkpoint={tmp_path}/run").stdout
    train(tmp_path / "run", "--steps=12", "--resume", mesh=SHARDS)
    if file == FILES[0]:
        train(tmp_path / "whole", "--steps=12", mesh=SHARDS)
        same(tmp_path / "run", tmp_path / "whole", [12])


def test_the_last_checkpoints_are_kept(tmp_path):
    """Those of this run alone, and never the best."""
    other = train(tmp_path / "other", "--steps=3", "--seed=9")
    assert other.returncode == 0
    options = ["--checkpoint-every=2", "--keep-last=2", "--val-every=2", "--val-batches=1", "--keep-best"]
    train(tmp_path / "run", *options, "--steps=8")
    assert saved(tmp_path / "run") == [6, 8]
    checkpoint(tmp_path / "other", 3).rename(checkpoint(tmp_path / "run", 3))
    [best] = (tmp_path / "run/best").iterdir()
    train(tmp_path / "run", *options, "--steps=11", "--resume", "--keep-best=false")
    assert saved(tmp_path / "run") == [3, 10, 11] and list((tmp_path / "run/best").iterdir()) == [best]
    train(tmp_path / "run", *options, "--steps=14", "--resume", "--keep-last=0", "--keep-best=false")
    assert saved(tmp_path / "run") == [3, 10, 11, 12, 14]


def test_checkpoints_of_an_abandoned_branch_stay(tmp_path):
    """They count for nothing."""
    train(tmp_path / "run", "--steps=8", "--checkpoint-every=2")
    train(tmp_path / "run", f"--resume={tmp_path}/run/checkpoint-00000002", "--steps=9", "--checkpoint-every=3", "--keep-last=2", "--lr=1e-3")
    assert saved(tmp_path / "run") == [4, 6, 8, 9]  # 6 is the new one
    train(tmp_path / "run", "--steps=10", "--resume")
    assert saved(tmp_path / "run") == [4, 8, 9, 10]


def test_a_save_without_a_thread(shim, tmp_path):
    said = train(tmp_path / "run", "--steps=4", "--checkpoint-every=2", mesh=(2, []),
                 env={**shim, "NO_THREAD": f"{checkpoint(tmp_path / 'run', 2)}.partial"}).stdout
    assert "-- checkpoint of step 2" in said and saved(tmp_path / "run") == [2, 4]


def test_a_disk_slower_than_the_limit_of_an_answer(shim, start, tmp_path):
    """Two saves, the second of which waits for the first."""
    (tmp_path / "hold").touch()
    run = start("--steps=5", "--checkpoint-every=2", "--comm-timeout=3", f"--out-dir={tmp_path}/run", mesh=(2, []),
                env={**shim, "HOLD": str(tmp_path / "hold"), "HOLD_PART": "-00001-"})
    read_until(run, r"^ *4 +\d")
    time.sleep(6)  # twice the limit, which is a time and no event
    (tmp_path / "hold").unlink()
    rest = run.communicate(timeout=60 * program.PATIENCE)[0]
    assert run.returncode == 0 and saved(tmp_path / "run") == [2, 4, 5], rest


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1)), lambda path: path.unlink()],
                         ids=["a header of another dtype", "a file that is gone"])
def test_damage_that_looks_like_something_else_is_passed_over(damage, tmp_path):
    train(tmp_path / "run", "--steps=4", "--checkpoint-every=2")
    damage(checkpoint(tmp_path / "run", 4) / "state-00000-1.safetensors")
    said = " ".join(train(tmp_path / "run", "--steps=5", "--resume").stdout.split())
    assert "note: the checkpoint is damaged: " in said and f"resuming from {checkpoint(tmp_path / 'run', 2)} after step 2" in said


def test_a_run_whose_start_is_damaged_does_not_begin_anew(tmp_path):
    """It was killed before its first save."""
    train(tmp_path / "first", "--steps=4", "--checkpoint-every=2")
    start = checkpoint(tmp_path / "first", 4)
    train(tmp_path / "run", f"--resume={start}", "--steps=6")
    checkpoint(tmp_path / "run", 6).rename(tmp_path / "kept")
    weights = start / "weights-00000-1.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for how in ("--resume", "--resume-if-any"):
        refused = train(tmp_path / "run", how, "--steps=8", check=False)
        assert "the checkpoint is damaged: " in one_error(refused.stderr) and str(weights) in refused.stderr
    # Its own checkpoint is damaged, but not the start.
    weights.write_bytes(content)
    (tmp_path / "kept").rename(checkpoint(tmp_path / "run", 6))
    (checkpoint(tmp_path / "run", 6) / "state-00000-1.safetensors").unlink()
    said = " ".join(train(tmp_path / "run", "--resume", "--steps=8").stdout.split())
    assert "checkpoint-00000006" in said and f"resuming from {start} after step 4" in said


@pytest.mark.parametrize("how", ["--resume", "--verify-checkpoint"])
def test_a_damaged_checkpoint_that_was_being_replaced(how, tmp_path):
    train(tmp_path / "run", "--steps=2")
    left = checkpoint(tmp_path / "run", 2).rename(f"{checkpoint(tmp_path / 'run', 2)}.replaced")
    (left / "manifest.json").write_text("{")
    options = [f"--verify-checkpoint={tmp_path}/run"] if how != "--resume" else [*MODEL, how, f"--out-dir={tmp_path}/run"]
    assert "manifest.json" in one_error(program.run(*options, check=False, timeout=30).stderr)


def test_a_start_removes_what_a_save_left(tmp_path):
    train(tmp_path / "run", "--steps=2")
    left = [tmp_path / "run/checkpoint-00000009.partial", tmp_path / "run/best/checkpoint-00000001.partial"]
    for folder in left:
        folder.mkdir(parents=True)
        (folder / "weights-00000-1.safetensors").write_text("")
    train(tmp_path / "run", "--steps=4", "--resume")
    assert saved(tmp_path / "run") == [2, 4] and not any(folder.exists() for folder in left)


def test_state_on_a_disk_is_saved_between_steps(tmp_path):
    said = train(tmp_path / "run", "--steps=3", "--checkpoint-every=1", "--offload-optimizer=nvme", f"--nvme-dir={tmp_path}/disk").stdout
    assert "note: checkpoints are saved between steps: the optimizer's state is on a disk" in said
    assert saved(tmp_path / "run") == [1, 2, 3]


# ---- processes that die or stand at any moment


def ranks_of(process):
    """The processes of a job's ranks."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, session = int(path.parent.name), int(path.read_text().rsplit(")", 1)[1].split()[3])
            if session == process.pid and b"\0RANK=" in b"\0" + (path.parent / "environ").read_bytes():
                found.append(pid)
        except (OSError, IndexError):
            pass
    return found or [process.pid]


def interrupt(process, folder, draw):
    """While it starts, or after some saves have begun: a step and a save take milliseconds."""
    begun = before = {path.name[:19] for path in folder.glob("checkpoint-*")}
    number = draw.randint(0, 8)
    while process.poll() is None and len(begun - before) < number:
        begun = begun | {path.name[:19] for path in folder.glob("checkpoint-*")}
    time.sleep(draw.uniform(0, 0.02 if number else 0.5))
    how = draw.choice(["kill one", "kill all", "stop one", "stop one and kill all"])
    one = draw.choice(ranks_of(process))
    try:
        if how == "kill one":
            os.kill(one, signal.SIGKILL)
        if how.startswith("stop one"):
            os.kill(one, signal.SIGSTOP)
            time.sleep(draw.uniform(0, 0.3))
        if how == "stop one":
            os.kill(one, signal.SIGCONT)
        if how.endswith("kill all"):
            os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it has ended
    process.communicate(timeout=60 * program.PATIENCE)
    return how


def check_interrupted_runs(number, start, folder):
    """Interrupts a run until it ends. It has the losses and the last bits of one that is not interrupted."""
    draw = random.Random(f"{SEED} {number}")
    print(f"SEED={SEED}")
    mesh = MESHES[(SEED + number) % len(MESHES)]
    options = ["--steps=60", "--checkpoint-every=2", "--log-every=20", "--keep-last=3"]
    train(folder / "whole", *options, WAITS, mesh=mesh)
    for attempt in range(4):
        run = start(*options, "--resume-if-any", f"--out-dir={folder}/run", mesh=mesh)
        how = interrupt(run, folder / "run", draw)
        print(f"{mesh}: {how}, then {saved(folder / 'run') if run.returncode else 'it ended'}")
        if saved(folder / "run") and run.returncode:
            assert "is whole" in program.run(f"--verify-checkpoint={folder}/run").stdout
    train(folder / "run", *options, "--resume-if-any", mesh=mesh)
    same(folder / "run", folder / "whole", [60])


@pytest.mark.parametrize("number", range(6))
def test_interrupted_runs_lose_nothing(number, start, tmp_path):
    check_interrupted_runs(number, start, tmp_path)
