"""Runs the scripts of data/ as a person does, or within the tests' own process, and reads the shards that they leave."""

import contextlib
import json
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np

import program

DATA = program.ROOT / "data"
sys.path.insert(0, str(DATA))


def command(script, *options):
    return [sys.executable, str(DATA / script), *map(str, options)]


def start(script, *options, **arguments):
    """The script as a process that goes on."""
    return subprocess.Popen(command(script, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **arguments)


def run(script, *options, check=True, **arguments):
    """Runs a script to its end; its CompletedProcess."""
    result = subprocess.run(command(script, *options), capture_output=True, text=True, timeout=120 * program.PATIENCE, **arguments)
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def run_here(script, *options):
    """The same in this process, which takes a tenth of the time; with one tokenizing process."""
    before = sys.argv
    sys.argv = command(script, *options, "--processes", 1)[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before


def run_dying(die, script, *options):
    """Runs a script in a process of its own that may be ended at once by die(process of its own), which sets that up.
    Whether it reached its end."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            die()
            run_here(script, *options)
            os._exit(0)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 0


def read_shard(path):
    """The tokens of a shard, whose header is right."""
    data = pathlib.Path(path).read_bytes()
    header, tokens = np.frombuffer(data[:1024], "<i4"), np.frombuffer(data[1024:], "<u2")
    assert header.tolist() == [20240520, 1, len(tokens)] + [0] * 253
    return tokens


def tokens_of(folder, split):
    """All tokens of a split."""
    return np.concatenate([read_shard(path) for path in sorted(folder.glob(f"{split}_*.bin"))])


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def results_in(folder):
    """{name: bytes} of everything in the folder but the lock; what lies in its folders too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != ".lock"}
