"""scripts/slurm.sbatch under a Slurm of one node, from Debian's packages (slurmctld, slurmd, slurm-client), which the test
starts here. A job trains, is stopped before its time is over, is requeued, and goes on to the end. Each block of the pages for
Slurm runs, at a tiny size and on that node."""

import getpass
import json
import os
import re
import shutil
import socket
import subprocess
import time
import tomllib

import pytest

import program
import recipe_clone
import test_pages

ROOT = program.ROOT
NEEDED = ["slurmctld", "slurmd", "sbatch", "srun", "scontrol"]
MODEL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384", "--device=cpu"]

# No authentication, accounting or control groups: an ordinary user can start it. The configured number of processors does not
# depend on the machine, so that eight processes start on any machine. A job that requests it is requeued, and then appends to
# its log.
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
SlurmdParameters=config_overrides
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
JobRequeue=0
JobFileAppend=0
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
        host=host, user=getpass.getuser(), controller=free_port(), node=free_port(), folder=folder, cores=max(8, os.cpu_count())))
    for gpu in range(8):  # files in place of the devices of the 8 GPUs that the script requests
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
    """Submits a job in a folder that has the program and the scripts, like a clone. Returns the job's number."""
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
    # To the processes and not to the script, like the script's --signal.
    subprocess.run(["scancel", "--signal=USR1", job], check=True)
    wait_for(lambda: state_of(job)["Restarts"] == "1", 60)
    wait_for(lambda: state_of(job)["JobState"] == "COMPLETED", 300)
    log = (place / f"slurm-{job}.out").read_text()
    assert log.count("\n  mesh  ") == 2 and "--resume" in log, log  # once in each try
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(1, 3001))

    # The same run without Slurm and without a stop.
    whole = program.train(tmp_path / "whole", *MODEL, "--steps=3000", "--lr=1e-3", "--warmup-steps=10", ranks=2)
    assert [line["loss"] for line in lines if "step" in line] == whole.losses


def test_it_is_stopped_three_minutes_before_its_time_is_over(slurm, tmp_path):
    """By the script's own --signal. Slurm checks the time every half minute, so it may send the signal up to that much earlier."""
    place = tmp_path / "clone"
    place.mkdir()
    job = submit(place, "--time=4", trains=["--steps=10000000"])
    metrics = place / f"runs/slurm-{job}/metrics.jsonl"
    wait_for(metrics.exists, 60)
    begin = time.monotonic()
    wait_for(lambda: state_of(job)["Restarts"] == "1", 90)
    assert 15 < time.monotonic() - begin < 75
    subprocess.run(["scancel", job], check=True)
    assert list((place / f"runs/slurm-{job}").glob("checkpoint-*"))


BLOCKS = [commands for _, how, commands in test_pages.COMMANDS if how == "run: slurm"]


def test_the_pages_have_blocks_for_slurm():
    assert len(BLOCKS) >= 2 and any("sbatch" in command for commands in BLOCKS for command in commands)


@pytest.mark.parametrize("commands", [block for block in BLOCKS if "sbatch" not in block[0]], ids=lambda commands: commands[-1])
def test_the_pages_commands_run_in_a_script(slurm, tmp_path, commands):
    place = tmp_path / "clone"
    place.mkdir()
    (place / "train_gpt").symlink_to(os.environ["PROGRAM"])
    script = "\n".join(commands).replace("./train_gpt'", f"./train_gpt {' '.join(MODEL)} --steps=3 --out-dir=run'")
    (place / "job").write_text(f"#!/usr/bin/env bash\nset -e\n{script}\n")
    done = subprocess.run(["sbatch", "--parsable", "--wait", "--nodes=1", "--ntasks-per-node=2", "job"], cwd=place,
                          capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, "".join(path.read_text() for path in place.glob("slurm-*.out"))
    assert len((place / "run/metrics.jsonl").read_text().splitlines()) == 4


# Replaces sbatch: one node instead of the requested ones, a job that is waited for, and a tiny model.
SBATCH = """#!/usr/bin/env bash
exec {sbatch} --wait --parsable "${{@:1:$#-2}}" --nodes=1 --ntasks-per-node={tasks} --cpus-per-task=1 "${{@: -2}}" {options}
"""


@pytest.mark.parametrize("command", [command for block in BLOCKS for command in block if command.startswith("sbatch ")])
def test_the_pages_recipes_are_submitted(slurm, tmp_path, monkeypatch, command):
    """The recipes exactly as on the page, with their own configuration, as far as one node can run them."""
    place = tmp_path / "clone"
    recipe_clone.make(place)
    mesh = recipe_clone.SMALLER_MESH if "3d" in command else []
    tasks = 8 if mesh else 2
    (place / "bin").mkdir()
    test_pages.write_command(place / "bin/sbatch", SBATCH.format(
        sbatch=shutil.which("sbatch"), tasks=tasks, options=" ".join([*recipe_clone.options(), *mesh])))
    monkeypatch.setenv("PATH", f"{place}/bin:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-ec", command], cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr + "".join(path.read_text() for path in place.glob("slurm-*.out"))
    metrics = place / f"runs/slurm-{done.stdout.strip()}/metrics.jsonl"
    first, *steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3] and "hellaswag_acc_norm" in steps[-1]
    run = first["run"]
    [recipe] = re.findall(r"scripts/\S+\.toml", command)
    assert run["mesh"]["world"] == tasks
    assert run["configuration"]["model"] == tomllib.loads((ROOT / recipe).read_text())["model"]


def test_a_job_that_fails_fails(slurm, tmp_path):
    place = tmp_path / "clone"
    place.mkdir()
    job = submit(place, trains=["--lr=nonsense"])
    wait_for(lambda: state_of(job)["JobState"] == "FAILED", 60)
    log = (place / f"slurm-{job}.out").read_text()
    assert log.count("error: ") >= 1 and "--lr" in log, log
    assert state_of(job)["Restarts"] == "0"
