"""The communicator as a whole job, over MPI and over TCP: what Open MPI itself counted, and what happens if a rank stops
answering.

The program is test/mpi/tools/communicator_probe.cpp.
"""

import os
import pathlib
import re
import signal
import subprocess
import time

import program
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def on_mpi(*values):
    """Values of a test's parameters; the first one is the transport."""
    return pytest.param("mpi", *values, marks=pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0"))


OVER_MPI = on_mpi()
TIMEOUT = 1.5  # seconds; the ranks' time limit in these tests
# Time for mpirun to start and end a job, and for a rank to wait until its turn to report, on a busy machine.
SLACK = 20 * program.PATIENCE


@pytest.fixture(scope="module")
def probe():
    build = REPOSITORY / os.environ.get("BUILD_DIR", "build")
    path = pathlib.Path(os.environ.get("TEST_PROGRAMS", build / "test")) / "tools" / "communicator_probe"
    assert path.exists(), f"no {path}: `make test-programs` builds it"
    return path


def start(transport, probe, ranks, *arguments, **options):
    environment = os.environ | {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    } | options
    started = {"mpi": ["mpirun", "--bind-to", "none", "-np", str(ranks), str(probe)], "tcp": [str(probe), "--processes", str(ranks)]}
    job = subprocess.Popen([*started[transport], *map(str, arguments)], env=environment,
                           stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    job.ranks, job.program = ranks, probe.name
    return job


def finish(job, seconds=SLACK + TIMEOUT):
    """Exit status, standard output and standard error of a job, which must have left no process behind."""
    ranks = processes_of(job)
    try:
        out, err = job.communicate(timeout=seconds)
    finally:
        job.terminate()  # the launcher ends its ranks; nothing happens if it has ended
    deadline = time.monotonic() + 5 * program.PATIENCE  # a killed process may outlive the launcher for a moment
    while not all(has_ended(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(has_ended(rank) for rank in ranks)
    return job.returncode, out, err


def run(*arguments, **options):
    return finish(start(*arguments, **options))


def state_and_parent(process):
    """The state of a process that has ended is "Z" until its parent reaps it, then ""."""
    try:
        state, parent = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return "", 0
    return state, int(parent)


def processes_of(job):
    """The job's ranks, as soon as all of them exist. If ranks end at once, those that were seen."""
    seen = set()
    deadline = time.monotonic() + SLACK
    while len(seen) < job.ranks and job.poll() is None and time.monotonic() < deadline:
        processes = [int(path.name) for path in pathlib.Path("/proc").glob("[0-9]*")]
        seen |= {process for process in processes if state_and_parent(process)[1] == job.pid and runs(process, job.program)}
        time.sleep(0.02)
    return sorted(seen)


def runs(process, program):
    """Whether the process runs the program: false for a launcher's other children, and before a process becomes a rank."""
    try:
        return program.startswith(pathlib.Path(f"/proc/{process}/comm").read_text().strip())
    except OSError:
        return False


def has_ended(process):
    return state_and_parent(process)[0] in ("", "Z")


@pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_counted_bytes_are_what_open_mpi_sent(probe, tmp_path, ranks):
    status, _, err = run("mpi", probe, ranks, "traffic", tmp_path, OMPI_MCA_pml_monitoring_enable="2",
                         OMPI_MCA_pml_monitoring_enable_output="3",
                         OMPI_MCA_pml_monitoring_filename=str(tmp_path / "monitoring"))
    assert status == 0, err
    for rank in range(ranks):
        report = (tmp_path / f"monitoring.{rank}.prof").read_text()
        # E: from, to, bytes, for point-to-point messages. The other lines are for MPI's own collectives.
        sent = {int(to): int(count) for to, count in re.findall(rf"^E\t{rank}\t(\d+)\t(\d+) bytes", report, re.M)}
        assert sorted(sent) == [peer for peer in range(ranks) if peer != rank]
        assert not re.search(r"^(O2A|A2O|A2A)\t\d+\t[1-9]", report, re.M), "MPI's own collectives are not used"
        assert sum(sent.values()) == int((tmp_path / f"counted.{rank}").read_text())
        assert (sum(sent.values()) > 0) == (ranks > 1)


TRANSPORTS = [OVER_MPI, "tcp"]
CALLS = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "barrier": "barrier",
    "ring": "a group of send and recv",
}


# In a ring each rank waits for its neighbour, but only the stuck rank may be named.
# Rank 0 decides over TCP who reports, unless it is the stuck one.
@pytest.mark.parametrize("transport, ranks, call, fault, stuck", [
    on_mpi(2, "all_reduce", "stop", 1),
    on_mpi(3, "reduce_scatter", "sleep", 1),
    on_mpi(4, "all_gather", "stop", 1),
    on_mpi(4, "barrier", "sleep", 1),
    on_mpi(8, "ring", "stop", 1),
    on_mpi(8, "reduce_scatter", "stop", 1),
    ("tcp", 3, "all_gather", "sleep", 1),
    ("tcp", 8, "ring", "stop", 1),
    ("tcp", 4, "barrier", "stop", 0),
])
def test_a_stuck_rank_ends_the_job_with_one_line(transport, probe, ranks, call, fault, stuck):
    begin = time.monotonic()
    status, out, err = run(transport, probe, ranks, "faults", call, stuck, fault, TIMEOUT)
    assert time.monotonic() - begin >= TIMEOUT
    assert status == 1
    assert out == ""
    assert re.fullmatch(rf"error: rank (?!{stuck} )\d waited {TIMEOUT:g} s in {CALLS[call]} for rank {stuck}, "
                        r"which does not answer; the job ends\n", err), err


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("call", ["all_gather", "barrier"])
def test_who_waited_long_before_is_named_all_the_same(transport, probe, call):
    """All ranks waited for rank 0 for three quarters of the limit. Rank 3 waited too, and then stops."""
    status, _, err = run(transport, probe, 4, "faults", call, 3, "relapse", TIMEOUT)
    assert status == 1
    assert re.fullmatch(rf"error: rank [0-2] waited {TIMEOUT:g} s in {CALLS[call]} for rank 3, which does not answer; the job ends\n",
                        err), err


def test_one_rank_of_many_reports(probe):
    """With more than 32 ranks, several share a turn. The stuck rank is not one that others query."""
    status, _, err = run("tcp", probe, 36, "faults", "all_gather", 35, "sleep", TIMEOUT)
    assert status == 1
    assert re.fullmatch(rf"error: rank \d+ waited {TIMEOUT:g} s in all_gather for rank 35, which does not answer; the job ends\n",
                        err), err


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_that_wait_for_each_other_end_the_job_with_one_line(transport, probe):
    status, _, err = run(transport, probe, 2, "faults", "all_reduce", 1, "differ", TIMEOUT)
    assert status == 1
    assert err in (
        f"error: rank 0 waited {TIMEOUT:g} s in all_reduce for rank 1, which waits too; the job ends\n",
        f"error: rank 1 waited {TIMEOUT:g} s in barrier for rank 0, which waits too; the job ends\n")


@pytest.mark.parametrize("call", ["all_reduce", "ring"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_rank_ends_the_job(transport, probe, call):
    begin = time.monotonic()
    status, _, err = run(transport, probe, 3, "faults", call, 1, "kill", 1000)
    assert status == 128 + signal.SIGKILL
    assert time.monotonic() - begin < SLACK
    if transport == "mpi":
        assert "error:" not in err, "mpirun has said it already"
    else:
        assert re.fullmatch("error: rank 1 is gone: .*; the job ends\n", err), err


@pytest.mark.parametrize("call", ["all_reduce", "ring"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_rank_is_waited_for(transport, probe, call):
    # It takes three quarters of the time limit: 2.25 s.
    assert run(transport, probe, 3, "faults", call, 1, "pause", 3) == (0, "", "")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_time_of_a_stopped_job_does_not_count(transport, probe):
    limit = 4
    job = start(transport, probe, 2, "faults", "all_reduce", 1, "sleep", limit)
    begin = time.monotonic()
    ranks = processes_of(job)
    time.sleep(0.5)  # by then one waits for the other, or it was stopped before that
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    waited_before = time.monotonic() - begin  # at most
    time.sleep(limit)
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    continued = time.monotonic()
    status, _, err = finish(job, SLACK + limit)
    assert len(ranks) == 2
    assert status == 1
    assert "for rank 1" in err
    # The pause counts as one second.
    assert time.monotonic() - continued >= limit - waited_before - 1


@pytest.mark.parametrize("who", ["one", "all"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_is_printed_once_and_ends_the_job(transport, probe, who):
    assert run(transport, probe, 4, "fail", who) == (1, "", "error: --heads 12 does not divide --channels 800\n")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_share_the_machine(transport, probe):
    cores = len(os.sched_getaffinity(0))
    for ranks in (1, 2, 3):
        status, out, err = run(transport, probe, ranks, "world")
        assert status == 0, err
        share = max(1, cores // ranks)
        assert sorted(out.splitlines()) == [f"{rank} of {ranks}: {rank} of {ranks} here, {share} cores"
                                            for rank in range(ranks)]
