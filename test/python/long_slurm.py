"""scripts/slurm.sbatch under a Slurm of one node, from Debian's packages (slurmctld, slurmd, slurm-client), which is started
here for the test: a job trains, is stopped before its time, goes back into the queue and goes on to the end."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import time

import pytest

import program

ROOT = program.ROOT
NEEDED = ["slurmctld", "slurmd", "sbatch", "srun", "scontrol"]
MODEL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--device=cpu"]

# No authentication, accounting or control groups: what a user who is nobody's administrator can start.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
SlurmctldPort={controller}
SlurmdPort={node}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerParameters=requeue_delay=1
ReturnToService=2
MinJobAge=600
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=500 Gres=gpu:8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    lacking = [name for name in NEEDED if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")]
    if lacking:
        pytest.skip(f"no {', '.join(lacking)} here; Debian's slurmctld, slurmd and slurm-client have them")
    monkeypatch.setenv("PATH", os.environ["PATH"] + ":/usr/sbin")
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    configuration = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    configuration.write_text(CONFIGURATION.format(
        host=host, user=getpass.getuser(), controller=free_port(), node=free_port(), folder=folder, cores=os.cpu_count()))
    for gpu in range(8):  # what stands where their devices would: the script asks for 8
        (folder / f"gpu{gpu}").touch()
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={folder}/gpu[0-7]\n")
    monkeypatch.setenv("SLURM_CONF", str(configuration))
    daemons = []
    try:
        for command in (["slurmctld", "-D", "-c", "-f", configuration], ["slurmd", "-D", "-c", "-f", configuration]):
            with open(folder / f"{command[0]}.out", "w") as out:
                daemons.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL))
        wait_for(lambda: "idle" in call("sinfo", "--noheader", "--format=%t"), 60)
        yield folder
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait()


def call(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout


def wait_for(is_so, limit):
    end = time.monotonic() + limit
    while not is_so():
        assert time.monotonic() < end, call("scontrol", "show", "job")
        time.sleep(0.2)


def submit(place, *options, trains):
    """In a folder that has the program and the scripts, as a clone has; returns the job's number."""
    for name in ("scripts", "train_gpt"):
        if not (place / name).exists():
            (place / name).symlink_to(ROOT / name if name == "scripts" else os.environ["PROGRAM"])
    (place / "tiny.toml").write_text("steps = 1000\nlr = 1e-3\nwarmup-steps = 10\nsample-tokens = 0\n")
    done = subprocess.run(["sbatch", "--parsable", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", *options,
                           "scripts/slurm.sbatch", "tiny.toml", *MODEL, *trains], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state_of(job):
    return dict(part.split("=", 1) for part in call("scontrol", "show", "job", job).split() if "=" in part)


def test_a_job_that_is_stopped_goes_on_by_itself(slurm, tmp_path):
    place = tmp_path / "clone"
    place.mkdir()
    job = submit(place, trains=["--steps=3000"])
    metrics = place / f"runs/slurm-{job}/metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 20, 60)
    # What --signal=USR1@180 sends three minutes before the time is over: to the processes, not to the script.
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for(lambda: state_of(job)["Restarts"] == "1", 60)
    wait_for(lambda: state_of(job)["JobState"] == "COMPLETED", 300)
    log = (place / f"slurm-{job}.out").read_text()
    assert "2 processes" in log and "--resume" in log, log
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines[1:]] == list(range(1, 3001))

    # The same run, without Slurm and without a stop.
    whole = program.train(tmp_path / "whole", *MODEL, "--steps=3000", "--lr=1e-3", "--warmup-steps=10", ranks=2)
    assert [line["loss"] for line in lines[1:]] == whole.losses


def test_readmes_commands_run_in_a_script(slurm, tmp_path):
    place = tmp_path / "clone"
    place.mkdir()
    (place / "train_gpt").symlink_to(os.environ["PROGRAM"])
    block = re.search(r"<!-- run: slurm -->\n\n((?:    .*\n)+)", (ROOT / "README.md").read_text())[1]
    commands = block.replace("    ", "", 1).replace("\n    ", "\n").replace("./train_gpt'", f"./train_gpt {' '.join(MODEL)} --steps=3 --out-dir=run'")
    (place / "job").write_text("#!/usr/bin/env bash\nset -e\n" + commands)
    done = subprocess.run(["sbatch", "--parsable", "--wait", "--nodes=1", "--ntasks-per-node=2", "job"], cwd=place,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, "".join(path.read_text() for path in place.glob("slurm-*.out"))
    assert len((place / "run/metrics.jsonl").read_text().splitlines()) == 4


def test_a_job_that_fails_fails(slurm, tmp_path):
    place = tmp_path / "clone"
    place.mkdir()
    job = submit(place, trains=["--lr=nonsense"])
    wait_for(lambda: state_of(job)["JobState"] == "FAILED", 60)
    log = (place / f"slurm-{job}.out").read_text()
    assert log.count("error: ") >= 1 and "--lr" in log, log
    assert state_of(job)["Restarts"] == "0"
