"""Runs the trainer for GPUs without one: linked with CUDA's runtime, cuBLASLt and NCCL as test/simt/runtime/ computes them."""

import concurrent.futures
import os
import pathlib
import subprocess
import tempfile

import program
import pytest
import refused

PLAIN, ADDRESS, PLANTED = (str(pathlib.Path(program.ROOT, program.BUILD, "test", f"train_gpt-{kind}"))
                           for kind in ("plain", "address", "planted"))
AT_ONCE = min(4, len(os.sched_getaffinity(0)))
SECONDS = 100 * program.PATIENCE


def require(paths=(PLAIN, PLANTED)):
    """Skips a file of tests where the programs are not built."""
    if not all(os.path.exists(path) for path in paths):
        pytest.skip("cublasLt.h and nccl.h are not both here, or the build has sanitizers of its own",
                    allow_module_level=True)


def at_once(*calls):
    """What the functions return, several of them at work at a time."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return [done.result() for done in [pool.submit(call) for call in calls]]


def command_of(executable, options, folder, ranks, seed=0, variables=None):
    """The command line and its environment; each rank has a GPU."""
    command = [executable, *map(str, options)]
    environment = {**refused.ENVIRONMENT, "SIMT_SEED": str(seed), "SIMT_GPUS": str(ranks),
                   # Open MPI has leaks of its own.
                   "ASAN_OPTIONS": "detect_leaks=0", **(variables or {})}
    if ranks == 1:
        return command, environment
    # Each a place of its own: mpiruns that share one may remove it from under one another.
    environment["OMPI_MCA_orte_tmpdir_base"] = tempfile.mkdtemp(dir=folder)
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command], environment


def run(options, folder, ranks=1, executable=PLAIN, seed=0, variables=None):
    """The CompletedProcess, output as text."""
    folder.mkdir(parents=True, exist_ok=True)
    command, environment = command_of(executable, options, folder, ranks, seed, variables)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
                          stdin=subprocess.DEVNULL)


def train(folder, *options, **how):
    """Trains into folder/run, without samples unless asked for; returns the program.Run, its output in `output`."""
    result = run(["--out-dir", folder / "run", "--sample-tokens=0", *options], folder, **how)
    assert result.returncode == 0, f"{options} {how}\n{result.stdout[-2000:]}\n{result.stderr}"
    trained = program.Run(folder / "run")
    trained.output = result.stdout
    return trained
