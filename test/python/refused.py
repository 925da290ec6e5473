"""Runs of the program that must be refused: a case, how it runs, and the required one-line message."""

import dataclasses
import os
import pathlib
import subprocess
import tempfile
import time
import typing

import program

PROGRAM = str(pathlib.Path(program.ROOT, program.PROGRAM).resolve())
AT_ONCE = 4
SECONDS = 20 * program.PATIENCE  # an error takes well below one second on a machine that is busy with three other runs
SMALL = [*program.SMALL, "--steps=4", "--sample-tokens=0"]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
}


@dataclasses.dataclass
class Case:
    name: str
    arguments: list  # "{}" stands for the case's folder
    words: list  # that the line contains
    make: typing.Callable = lambda folder: None  # writes the input into the folder
    ranks: tuple = (1,)
    late: bool = False  # found when a model is read or a file written


def contents(folder):
    """Every path under a folder, with its contents."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(folder.rglob("*"))}


@dataclasses.dataclass
class Outcome:
    status: int
    stdout: str
    stderr: str
    seconds: float
    before: dict
    after: dict


def command_of(arguments, folder, ranks):
    """The command line and its environment."""
    # (Generation refuses options of a training.)
    defaults = [option for option in SMALL if not ("--generate" in arguments and option.startswith(("--steps", "--global-batch-tokens")))]
    command = [PROGRAM, *defaults, *(str(argument).replace("{}", str(folder)) for argument in arguments)]
    if ranks == 1:
        return command, ENVIRONMENT
    if not program.HAS_MPI:
        return [PROGRAM, "--processes", str(ranks), *command[1:]], ENVIRONMENT
    # Each has its own folder: mpiruns that share one may remove it while others use it.
    environment = {**ENVIRONMENT, "OMPI_MCA_orte_tmpdir_base": tempfile.mkdtemp(dir=folder.parent)}
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *command], environment


def run(arguments, folder, ranks, preexec=None):
    command, environment = command_of(arguments, folder, ranks)
    # Runs in the folder, so that files in the default places are noticed too.
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="surrogateescape", timeout=SECONDS * 3,
                          stdin=subprocess.DEVNULL, preexec_fn=preexec)


def outcome_of(case, folder, ranks):
    folder.mkdir()
    case.make(folder)
    before = contents(folder)
    start = time.monotonic()
    result = run(case.arguments, folder, ranks)
    return Outcome(result.returncode, result.stdout, result.stderr, time.monotonic() - start, before, contents(folder))


def one_error(stderr):
    """The only line of standard error, without its beginning."""
    assert stderr.startswith("error: ") and stderr.endswith("\n") and stderr.count("\n") == 1, stderr
    return stderr[len("error: "):-1]
