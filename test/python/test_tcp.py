"""Jobs without MPI: the processes find one another by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. They train the same bits
as over MPI. A failure gives one line, whichever process finds it, and status 1 of all processes."""

import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time

import pytest

import program
from program import digest
from refused import one_error
from tcp_job import ESTABLISHED, LISTENS, Job, free_port, sockets_at

TOOLS = program.ROOT / program.BUILD / "test/tools"
PROBE = TOOLS / "communicator_probe"
MODEL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--sample-tokens=0"]
ENDLESS = ["--layers=4", "--channels=256", "--seq-len=256", "--global-batch-tokens=1048576", "--micro-batch-size=2",
           "--sample-tokens=0"]
WELCOME, ENDED = 0, 4  # answers of rank 0 (llmc/comm/hello_listener.h)


def refused(ended, *words, statuses=None):
    """One line for all processes, and status 1 of each."""
    assert ended.statuses == (statuses or [1] * len(ended.statuses)), ended.err
    line = one_error(ended.err)
    assert ended.out == ""
    for word in words:
        assert word in line, line
    return line


def world_of(size):
    return [f"{rank} of {size}: {rank} of {size} here" for rank in range(size)]


def places(ended):
    assert (set(ended.statuses), ended.err) == ({0}, "")
    return sorted(line.rsplit(",", 1)[0] for line in ended.out.splitlines())


# ---- the same bits


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_trains_the_same_bits_as_over_mpi(ranks, tmp_path):
    options = [*MODEL, "--steps=20", "--micro-batch-size=2", "--dtype=bf16"]
    mpi = program.train(tmp_path / "mpi", *options, f"--export={tmp_path}/mpi.safetensors", ranks=ranks)
    ended = Job(ranks).start_all(program.PROGRAM, *options, f"--out-dir={tmp_path}/tcp",
                                 f"--export={tmp_path}/tcp.safetensors").end()
    assert (ended.statuses, ended.err) == ([0] * ranks, "")
    tcp = program.Run(tmp_path / "tcp")
    for name in ("loss", "grad_norm"):
        assert tcp.column(name) == mpi.column(name)
    assert digest(tmp_path / "tcp.safetensors") == digest(tmp_path / "mpi.safetensors")


# ---- finding each other


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", socket.gethostname()])
def test_addresses(host):
    if host == "::1" and not pathlib.Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    assert places(Job(3, host=host).start_all(PROBE, "world").end()) == world_of(3)


def test_processes_may_come_in_any_order():
    job = Job(4)
    for rank in (3, 1, 0, 2):
        job.start(rank, PROBE, "world")
        time.sleep(0.2)
    assert places(job.end()) == world_of(4)


def test_one_process_needs_no_address():
    assert places(Job(1).start_all(PROBE, "world", MASTER_ADDR=None, MASTER_PORT=None).end()) == world_of(1)


def test_the_launcher_may_say_the_place_on_the_machine():
    job = Job(2)
    for rank in range(2):
        job.start(rank, PROBE, "world", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    assert places(job.end()) == ["0 of 2: 0 of 1 here", "1 of 2: 0 of 1 here"]


def test_under_torchrun_its_own_port_is_left_alone():
    """If torchrun says that it listens at MASTER_PORT itself, the job takes the next port."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        job = Job(2, port=port).start_all(PROBE, "world", TORCHELASTIC_USE_AGENT_STORE="True")
        assert places(job.end()) == world_of(2)


def test_two_jobs_one_after_the_other_at_one_port():
    port = free_port()
    for _ in range(3):
        assert places(Job(2, port=port).start_all(PROBE, "world").end()) == world_of(2)


def disturb(port, stop):
    """A port scanner: connections that send nothing, garbage, or the beginning of a process's message."""
    connections = []
    while not stop.is_set():
        for text in (b"", b"GET / HTTP/1.0\r\n\r\n", b"llmc-me?", b"llmc-me?" + b"x" * 100, bytes(300)):
            try:
                connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                connections.append(connection)
                connection.sendall(text)
            except OSError:
                pass
        connections[:-20] = []
        time.sleep(0.01)


def test_strangers_do_not_disturb():
    job = Job(3)
    stop = threading.Event()
    stranger = threading.Thread(target=disturb, args=(job.port, stop))
    stranger.start()
    try:
        for rank in range(3):
            job.start(rank, PROBE, "world")
            time.sleep(0.3)
        ended = job.end()
    finally:
        stop.set()
        stranger.join()
    assert places(ended) == world_of(3)


# ---- wrong from the beginning


@pytest.mark.parametrize("variables, words", [
    ({"MASTER_PORT": None}, "MASTER_PORT is not set; give each process"),
    ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a whole number from 1 to 65535"),
    ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not"),
    ({"MASTER_PORT": "http"}, "MASTER_PORT=http is not"),
    ({"MASTER_ADDR": None}, "MASTER_ADDR is not set"),
    ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ({"MASTER_ADDR": "no such machine", "TRAIN_GPT_CONNECT_SECONDS": "1"}, "cannot find the machine 'no such machine': "),
    ({"WORLD_SIZE": None}, "WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 is not"),
    ({"WORLD_SIZE": "2x"}, "WORLD_SIZE=2x is not"),
    ({"RANK": None}, "RANK is not set"),
    ({"RANK": "2"}, "RANK=2 is not a whole number from 0 to 1"),
    ({"RANK": "-1"}, "RANK=-1 is not"),
    ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 is not a whole number from 0 to 1"),
    ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 is not a whole number from 0 to 0"),
    ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3 is not a whole number from 1 to 2"),
    ({"TRAIN_GPT_CONNECT_SECONDS": "soon"}, "TRAIN_GPT_CONNECT_SECONDS=soon is not"),
], ids=lambda value: "-".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else "")
def test_wrong_variables(variables, words):
    refused(Job(2).start_all(PROBE, "world", **variables).end(), words)


def test_ranks_that_do_not_come_are_named():
    job = Job(4, seconds=1)
    for rank in (0, 2):
        job.start(rank, PROBE, "world")
    refused(job.end(), "ranks 1, 3 of 4 did not connect to ", f"(port {job.port})", "TRAIN_GPT_CONNECT_SECONDS")


def test_rank_0_that_does_not_come():
    job = Job(3, seconds=1)
    for rank in (1, 2):
        job.start(rank, PROBE, "world")
    refused(job.end(), f"no process with RANK=0 answered at 127.0.0.1:{job.port} within {job.seconds} s: Connection refused")


@pytest.mark.parametrize("twice", [0, 1])
def test_two_processes_with_one_rank(twice):
    job = Job(3)
    job.start(0, PROBE, "world")
    wait_for(lambda: sockets_at(job.port, LISTENS))
    job.start(1, PROBE, "world")
    wait_for(lambda: sockets_at(job.port, ESTABLISHED))
    job.start(twice, PROBE, "world")
    if twice == 1:
        refused(job.end(), "two processes have RANK=1; give each of the 3 processes its own, from 0 to 2")
    else:  # the job is not affected
        wait_for(lambda: job.processes[-1].poll() is not None)
        job.start(2, PROBE, "world")
        ended = job.end()
        assert ended.statuses == [0, 0, 1, 0]
        assert f"cannot listen on port {job.port}: Address already in use; another program or another job's RANK=0 uses it" in one_error(ended.err)


def test_a_process_that_comes_while_the_job_ends_says_nothing():
    """Rank 0, played here, reports an error between the two connections of rank 1. It takes no second one."""
    job = Job(2)
    with socket.create_server(("127.0.0.1", job.port)) as listener:
        job.start(1, PROBE, "world")
        first, _ = listener.accept()
    with first:
        assert len(first.recv(256, socket.MSG_WAITALL)) == 256
        for what in (WELCOME, ENDED):
            first.sendall(struct.pack("<8siiQ", b"llmc-yes", what, 0, 0))
        ended = job.end()
    assert ended.statuses == [1] and ended.err == ""


def test_a_plan_whose_data_are_on_one_machine_only(tmp_path):
    """Each process has a directory of its own, as on two machines."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "c.toml").write_text('train-data = "text"\nsteps = 0\n')
    (tmp_path / "0/text").write_text("A text for training. " * 1000)
    (tmp_path / "0/x").mkdir()
    (tmp_path / "0/x/run.json").touch()
    for more in (["--config=c.toml", "--metrics=m"], ["--steps=0", "--out-dir=x"]):
        job = Job(2)
        for rank in (0, 1):
            job.start(rank, "env", "-C", tmp_path / str(rank), program.ROOT / program.PROGRAM, *MODEL, *more)
        ended = job.end()
        assert (ended.statuses, ended.err) == ([0, 0], "") and ("note: this is only a plan: " in ended.out) == ("--metrics=m" in more)


@pytest.mark.parametrize("having", [0, 1])
def test_a_checkpoint_on_one_machine_only(having, tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    program.run(*MODEL, "--steps=1", f"--out-dir={tmp_path}/{having}/x")
    job = Job(2)
    for rank in (0, 1):
        job.start(rank, "env", "-C", tmp_path / str(rank), program.ROOT / program.PROGRAM, *MODEL, "--steps=2", "--resume-if-any", "--out-dir=x")
    refused(job.end(), f"rank 1 is at step {having} and rank 0 at step {1 - having}: the processes do not see the same checkpoint")


def test_processes_that_see_different_folders(tmp_path):
    """Each would save its part in a folder of its own. They learn it before the first step, and nothing is left behind."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0/x").mkdir()
    for where in ("x", "y/z", "."):
        job = Job(2)
        for rank in (0, 1):
            job.start(rank, "env", "-C", tmp_path / str(rank), program.ROOT / program.PROGRAM, *MODEL, "--steps=2", f"--out-dir={where}")
        refused(job.end(), f"--out-dir: rank 1 does not see the folder {where} of rank 0, where all processes save checkpoints; "
                           "give a folder that all machines share")
        assert sorted(path.name for path in tmp_path.rglob("*")) == ["0", "1", "x"]
    job = Job(2)  # one folder by two names, which links lead to
    for rank in (0, 1):
        (tmp_path / f"{rank}/link").symlink_to(tmp_path)
        job.start(rank, "env", "-C", tmp_path / str(rank), program.ROOT / program.PROGRAM, *MODEL, "--steps=2", "--out-dir=link/shared",
                  "--sample-tokens=0")
    assert job.end().statuses == [0, 0] and (tmp_path / "shared/checkpoint-00000002/checksums-00001.json").exists()


def test_another_world_size():
    job = Job(2)
    job.start(0, PROBE, "world")
    job.start(1, PROBE, "world", WORLD_SIZE="4")
    refused(job.end(), "RANK=1 and WORLD_SIZE=4, but the one with RANK=0 has WORLD_SIZE=2")


def test_another_version():
    job = Job(2)
    job.start(0, PROBE, "world")
    # As in llmc/comm/rendezvous.cpp: the mark, the version, and data with an unknown meaning in the other version.
    hello = b"llmc-me?" + b"9.9.9 (abcdef)".ljust(120, b"\0") + bytes(range(128))
    end = time.monotonic() + 20 * program.PATIENCE
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", job.port))
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
    connection.sendall(hello)
    refused(job.end(), "a process runs train_gpt 9.9.9 (abcdef), but the one with RANK=0 runs train_gpt ", "same build")
    connection.close()


@pytest.mark.parametrize("answer, words", [
    (b"SSH-2.0-OpenSSH_9.2p1\r\n", "another program uses "),
    (b"", "no process with RANK=0 answered at "),
    (None, "no process with RANK=0 answered at "),
], ids=["another protocol", "closes", "is silent"])
def test_another_program_at_the_port(answer, words):
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = Job(2, port=server.getsockname()[1], seconds=1)
        kept = []

        def serve():
            while True:
                try:
                    connection = server.accept()[0]
                except OSError:
                    return
                if answer is not None:
                    connection.sendall(answer)
                if answer == b"":
                    connection.close()
                kept.append(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        job.start(1, PROBE, "world")
        refused(job.end(), words)
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_port_that_another_program_has():
    with socket.create_server(("", 0)) as server:
        job = Job(2, port=server.getsockname()[1])
        job.start(0, PROBE, "world")
        refused(job.end(), "cannot listen on port", "Address already in use; another program or", "MASTER_PORT")


def test_a_process_that_ends_while_others_are_awaited():
    """Its hello comes through the test, which kills it then: rank 0 certainly hears of it first, and then of its end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = Job(3)
        job.start(0, PROBE, "world")
        victim = job.start(1, PROBE, "world", MASTER_PORT=str(server.getsockname()[1]))
        with server.accept()[0] as connection:
            hello = connection.recv(256, socket.MSG_WAITALL)  # as long in all versions (llmc/comm/rendezvous.cpp)
            wait_for(lambda: sockets_at(job.port, LISTENS))
            with socket.create_connection(("127.0.0.1", job.port)) as to_rank_0:
                to_rank_0.sendall(hello)
                victim.kill()
    refused(job.end(), "RANK=1 ended before all processes were connected", statuses=[1, -signal.SIGKILL])


# ---- later failures


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds * program.PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("ranks, killed", [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_a_killed_rank_is_named_once(ranks, killed, tmp_path):
    job = Job(ranks).start_all(program.PROGRAM, *MODEL, "--steps=1000000", f"--out-dir={tmp_path}")
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 20)
    job.processes[killed].kill()
    begin = time.monotonic()
    ended = job.end()
    assert time.monotonic() - begin < 5 * program.PATIENCE
    assert ended.statuses == [-signal.SIGKILL if rank == killed else 1 for rank in range(ranks)]
    assert re.fullmatch(rf"rank {killed} is gone: .*; the job ends", one_error(ended.err))


def test_a_killed_rank_is_named_once_though_rank_0_is_stopped(tmp_path):
    """Normally rank 0 lets one of the others report it."""
    job = Job(4).start_all(program.PROGRAM, *MODEL, "--steps=1000000", f"--out-dir={tmp_path}")
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 20)
    job.processes[0].send_signal(signal.SIGSTOP)
    job.processes[2].kill()
    wait_for(lambda: job.processes[1].poll() is not None and job.processes[3].poll() is not None)
    job.processes[0].send_signal(signal.SIGCONT)
    ended = job.end()
    assert ended.statuses == [1, 1, -signal.SIGKILL, 1]
    assert re.fullmatch("rank 2 is gone: .*; the job ends", one_error(ended.err))


def test_ranks_that_compute_for_minutes_end_too(tmp_path):
    job = Job(4).start_all(program.PROGRAM, *ENDLESS, f"--out-dir={tmp_path}")
    wait_for((tmp_path / "config.toml").exists)
    time.sleep(0.5)  # into the first step
    job.processes[1].kill()
    ended = job.end(6)
    assert ended.statuses == [1, -signal.SIGKILL, 1, 1]
    assert one_error(ended.err).startswith("rank 1 is gone: ")


@pytest.mark.parametrize("who", ["one", "all"])
def test_an_error_is_one_line_and_ends_all(who):
    refused(Job(4).start_all(PROBE, "fail", who).end(), "--heads 12 does not divide --channels 800")


def test_a_wrong_option_is_one_line(tmp_path):
    refused(Job(3).start_all(program.PROGRAM, "--heads=12", "--channels=800", f"--out-dir={tmp_path}").end(), "--heads")


def test_a_stuck_rank_is_named_and_left_alone():
    """The watchdogs of the other ranks end them. When the stuck rank goes on, it finds them gone."""
    job = Job(3).start_all(PROBE, "faults", "all_reduce", 1, "stop", 1.5)
    wait_for(lambda: job.processes[0].poll() is not None and job.processes[2].poll() is not None)
    assert job.processes[1].poll() is None
    job.processes[1].send_signal(signal.SIGCONT)
    refused(job.end(), "waited 1.5 s in all_reduce for rank 1, which does not answer; the job ends")


def test_a_stop_is_everyones(tmp_path):
    """SIGUSR1 to one process: all processes save and end with 75."""
    job = Job(2).start_all(program.PROGRAM, *MODEL, "--steps=1000000", f"--out-dir={tmp_path}")
    metrics = tmp_path / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 20)
    job.processes[1].send_signal(signal.SIGUSR1)
    ended = job.end()
    assert (ended.statuses, ended.err) == ([75, 75], "")
    assert "go on with" in ended.out


# ---- a build without MPI


@pytest.fixture(scope="module")
def without_mpi(tmp_path_factory):
    """The trainer of `make MPI=0 CUDA=0`. All objects but one are reused from the other build, whatever its flags."""
    build = tmp_path_factory.mktemp("no-mpi")
    for name in ("objects", "flags.txt", "version.txt"):
        source = program.ROOT / program.BUILD / name
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, build / name)
    (build / "objects/llmc/comm/transport_no_mpi.o").unlink(missing_ok=True)
    of_the_caller = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "BUILD", "MPI"}
    environment = {name: value for name, value in os.environ.items() if name not in of_the_caller}
    made = subprocess.run(["make", "MPI=0", "CUDA=0", "PRECOMPILES=", f"BUILD={build}", f"--assume-old={build}/flags.txt",
                           f"--assume-old={build}/version.txt"], cwd=program.ROOT, env=environment, capture_output=True,
                          text=True, timeout=300 * program.PATIENCE)
    assert made.returncode == 0, made.stdout + made.stderr
    assert re.findall("^compile (.*)", made.stdout, re.M) == ["llmc/comm/transport_no_mpi.cpp"]
    return str(build / "train_gpt")


def test_a_build_without_mpi(without_mpi, tmp_path):
    libraries = subprocess.run(["ldd", without_mpi], capture_output=True, text=True, check=True).stdout
    assert "libdnnl" in libraries and "mpi" not in libraries.replace(without_mpi, "")
    options = [*MODEL, "--steps=10"]
    mpi = program.train(tmp_path / "mpi", *options, ranks=2)
    ended = Job(2).start_all(without_mpi, *options, f"--out-dir={tmp_path}/tcp").end()
    assert (ended.statuses, ended.err) == ([0, 0], "")
    assert program.Run(tmp_path / "tcp").losses == mpi.losses


def test_mpirun_with_a_build_without_mpi(without_mpi):
    result = subprocess.run(program.over_mpi(2, without_mpi), cwd=program.ROOT, capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout == ""
    # (Lines that mpirun itself adds are not checked.)
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "built without MPI (make MPI=0); start it with --processes N" in lines[0]


def test_the_program_started_by_mpirun_takes_mpi_whatever_else_is_set(tmp_path):
    command = [*program.over_mpi(2), *MODEL, "--steps=2", f"--out-dir={tmp_path}"]
    subprocess.run(command, cwd=program.ROOT, check=True, env={**os.environ, "RANK": "7", "WORLD_SIZE": "2"})
    assert program.Run(tmp_path).record["mesh"]["data"] == 2


def test_srun_without_ranks_is_refused(tmp_path):
    """It must not become two runs of one process each, with MPI and without. It may if each process is declared a separate
    job."""
    of_srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    options = [*MODEL, "--steps=1", f"--out-dir={tmp_path}/run"]
    done = program.run(*options, env=of_srun, check=False)
    assert "srun started 2 processes (SLURM_STEP_NUM_TASKS)" in one_error(done.stderr) and not (tmp_path / "run").exists()
    program.run(*options, env={**of_srun, "RANK": "0", "WORLD_SIZE": "1"})
    program.run(*options, "--overwrite", env={"SLURM_STEP_NUM_TASKS": "1"})


@pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")
def test_a_launcher_that_mpi_does_not_understand():
    """It must not become two runs of one process each, which would write the same files."""
    job = Job(2)
    for rank in range(2):
        job.start(rank, PROBE, "world", PMI_RANK=str(rank), PMI_SIZE="2", RANK=None, WORLD_SIZE=None)
    refused(job.end(), "the launcher started 2 processes (PMI_SIZE), but MPI sees one", "--mpi=none")


# ---- --processes


def test_the_launcher_makes_a_job():
    result = subprocess.run([PROBE, "--processes", "3", "world"], cwd=program.ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(line.rsplit(",", 1)[0] for line in result.stdout.splitlines()) == world_of(3)


@pytest.mark.parametrize("given, problem", [
    (["--processes"], "--processes needs a number of processes, from 1 to 1024"),
    (["--processes", "two"], "--processes 'two' is not a number of processes from 1 to 1024"),
    (["--processes=0"], "--processes '0' is not a number of processes from 1 to 1024"),
    (["--processes=2", "--processes=4096"], "--processes '4096' is not a number of processes from 1 to 1024")])
def test_a_wrong_number_of_processes_is_refused(given, problem):
    result = subprocess.run([program.PROGRAM, *given], cwd=program.ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", f"error: {problem}\n")


@pytest.mark.parametrize("twice", [["--processes", "3"], ["--processes=3"]])
def test_the_script_takes_one_number_of_processes(twice):
    command = ["scripts/launch.sh", "-np", "2", program.PROGRAM, *twice]
    result = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: -np gives the number of processes; leave {twice[0]} out\n")


def with_open_files(soft, hard):
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_of_open_files_is_raised():
    """16 processes have 30 connections each."""
    command = [program.PROGRAM, "--processes", "16", "--steps=0", "--layers=1", "--heads=2", "--channels=16", "--seq-len=16",
               "--global-batch-tokens=256"]
    result = subprocess.run(command, cwd=program.ROOT, capture_output=True, text=True, timeout=60 * program.PATIENCE,
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, preexec_fn=with_open_files(20, 46))
    assert (result.returncode, result.stderr) == (0, "")


def test_a_hard_limit_of_open_files_that_is_too_low_is_named_at_once():
    started = time.monotonic()
    for hard, most in ((45, "15 processes"), (9, "1 process")):
        result = subprocess.run([program.PROGRAM, "--processes", "16"], cwd=program.ROOT, capture_output=True, text=True, timeout=60,
                                preexec_fn=with_open_files(hard, hard))
        assert (result.returncode, result.stdout) == (1, "")
        assert one_error(result.stderr) == (f"each of 16 processes needs 46 open files, but the hard limit is {hard} (ulimit -Hn); "
                                            f"raise it as root, or start at most {most}")
    # Processes of other launchers, too, and one line for all.
    ended = Job(4).start_all("sh", "-c", 'ulimit -n 21; exec "$0" "$@"', PROBE, "world").end()
    refused(ended, "each of 4 processes needs 22 open files, but the hard limit is 21")
    assert time.monotonic() - started < 10 * program.PATIENCE


def test_a_rank_starts_no_processes():
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    result = subprocess.run([program.PROGRAM, "--processes", "2"], cwd=program.ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == "error: --processes 2: this process is already one of a job (RANK and WORLD_SIZE are set); leave the option out\n"


def test_the_launcher_ends_what_is_stuck_when_one_fails(tmp_path):
    """A stopped process cannot notice that another one has failed."""
    command = [program.PROGRAM, "--processes", "2", *MODEL, "--steps=1000000", f"--out-dir={tmp_path}"]
    job = subprocess.Popen(command, cwd=program.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    ranks = []
    while len(ranks) < 2:
        assert job.poll() is None
        ranks = [int(word) for word in pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    os.kill(ranks[1], signal.SIGSTOP)
    os.kill(ranks[0], signal.SIGKILL)
    assert job.wait(60 * program.PATIENCE) == 128 + signal.SIGKILL
    assert not pathlib.Path(f"/proc/{ranks[1]}").exists()
