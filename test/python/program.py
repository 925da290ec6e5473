"""Runs ./train_gpt as a user does, and reads its outputs."""

import array
import hashlib
import json
import os
import pathlib
import subprocess

BUILD = os.environ.get("BUILD_DIR", "build")
ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = os.environ.get("PROGRAM", "./train_gpt")
# All time limits of the tests are multiplied by this. The Makefile sets it for builds with sanitizers.
PATIENCE = float(os.environ.get("PATIENCE", 1))

# Whether jobs run over MPI; `make MPI=0 test` does not.
HAS_MPI = os.environ.get("MPI") != "0"

# A model that trains in a moment.
SMALL = ["--layers=2", "--heads=2", "--channels=32", "--seq-len=16", "--global-batch-tokens=384"]


def over_mpi(ranks, program=PROGRAM):
    """The beginning of a command that runs a program under mpirun."""
    return [str(ROOT / "scripts/launch.sh"), "-np", str(ranks), "--bind-to", "none", program]


def run(*options, ranks=1, env=None, timeout=300, check=True, program=PROGRAM, mpi=False, input=None):
    """Runs the program on `ranks` processes, with `mpi` under mpirun; returns its CompletedProcess with its output as text."""
    started = over_mpi(ranks, program) if mpi else [program, *(["--processes", str(ranks)] if ranks > 1 else [])]
    command = [*started, *map(str, options)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout * PATIENCE, input=input,
                            env={**os.environ, **(env or {})})
    if check:
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-2000:]}\n{result.stderr}"
    return result


class Run:
    """The records of a run in `out_dir`."""

    def __init__(self, out_dir):
        self.out_dir = pathlib.Path(out_dir)
        lines = [json.loads(line) for line in (self.out_dir / "metrics.jsonl").read_text().splitlines()]
        # If a resumed run differs from the one before it, it has a separate line.
        self.record = [line["run"] for line in lines if "run" in line][-1]
        self.lines = [line for line in lines if "run" not in line]

    def column(self, name):
        return [line[name] for line in self.lines]

    @property
    def losses(self):
        return self.column("loss")


def train(out_dir, *options, ranks=1, **arguments):
    """Trains quietly (no samples, no validation unless asked for) and returns the Run."""
    run(f"--out-dir={out_dir}", "--sample-tokens=0", *options, ranks=ranks, **arguments)
    return Run(out_dir)


def digest(path):
    """The SHA-256 of a file's bytes."""
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def write_token_file(path, tokens, wide=False):
    """A .bin file in the common format: uint16 tokens, or uint32 tokens if `wide`."""
    header = array.array("i", (20240801, 7, len(tokens)) if wide else (20240520, 1, len(tokens)))
    header.extend([0] * (256 - len(header)))
    with open(path, "wb") as file:
        file.write(header.tobytes())
        file.write(array.array("I" if wide else "H", map(int, tokens)).tobytes())


def write_rows(path, rows, tokenizer=0):
    """A .bin file of conversations: each row is (tokens, whether the loss counts each). `tokenizer` is a checksum."""
    header = array.array("I", (20240801, 8, sum(len(tokens) for tokens, _ in rows), tokenizer & 0xFFFFFFFF, tokenizer >> 32, len(rows)))
    header.extend([0] * (256 - len(header)))
    words = (int(token) | (place == 0) << 30 | bool(counts) << 31
             for tokens, counted in rows for place, (token, counts) in enumerate(zip(tokens, counted)))
    with open(path, "wb") as file:
        file.write(header.tobytes() + array.array("I", words).tobytes())
