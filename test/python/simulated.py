"""Runs the trainer for GPUs without a GPU. It is linked with the CUDA runtime, cuBLASLt and NCCL of test/simt/runtime/."""

import concurrent.futures
import os
import pathlib
import subprocess
import tempfile

import program
import pytest
import refused

PLAIN, ADDRESS = (str(pathlib.Path(program.ROOT, program.BUILD, "test", f"train_gpt-{kind}")) for kind in ("plain", "address"))
AT_ONCE = min(4, len(os.sched_getaffinity(0)))
SECONDS = 100 * program.PATIENCE
FIRST_SEED = int(os.environ.get("SIMULATED_FIRST_SEED", 0))  # added to every seed: 1 makes the even ones odd


# Tests of a file of which others need no simulated GPU.
NEEDED = pytest.mark.skipif(not os.path.exists(PLAIN), reason="cublasLt.h and nccl.h are not both here, or the build has sanitizers of its own")


def require(paths=(PLAIN,)):
    """Skips a file of tests if the programs are not built."""
    if not all(os.path.exists(path) for path in paths):
        pytest.skip("cublasLt.h and nccl.h are not both here, or the build has sanitizers of its own",
                    allow_module_level=True)


def at_once(*calls):
    """The functions' results; several functions run at a time."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        return [done.result() for done in [pool.submit(call) for call in calls]]


def command_of(executable, options, folder, ranks, seed=0, variables=None):
    """The command line and its environment. Each rank has a GPU."""
    command = [executable, *map(str, options)]
    environment = {**refused.ENVIRONMENT, "SIMT_SEED": str(FIRST_SEED + seed), "SIMT_GPUS": str(ranks),
                   # Freed memory changes, so that a copy which has yet to read it is seen.
                   "MALLOC_PERTURB_": "165",
                   # Open MPI itself leaks memory.
                   "ASAN_OPTIONS": "detect_leaks=0", **(variables or {})}
    if ranks == 1:
        return command, environment
    # Each has its own folder: mpiruns that share one may remove it while others use it.
    environment["OMPI_MCA_orte_tmpdir_base"] = tempfile.mkdtemp(dir=folder)
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command], environment


def run(options, folder, ranks=1, executable=PLAIN, seed=0, variables=None):
    """The CompletedProcess, with output as text."""
    folder.mkdir(parents=True, exist_ok=True)
    command, environment = command_of(executable, options, folder, ranks, seed, variables)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS,
                          stdin=subprocess.DEVNULL)


def train(folder, *options, **how):
    """Trains into folder/run, without samples unless requested. Returns the program.Run, with the printed text in `output`."""
    result = run(["--out-dir", folder / "run", "--sample-tokens=0", *options], folder, **how)
    assert result.returncode == 0, f"{options} {how}\n{result.stdout[-2000:]}\n{result.stderr}"
    trained = program.Run(folder / "run")
    trained.output = result.stdout
    return trained
