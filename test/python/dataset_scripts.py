"""Runs the scripts of data/, as a user does or within the tests' own process, and reads the shards that they leave."""

import contextlib
import hashlib
import json
import os
import pathlib
import random
import runpy
import subprocess
import sys

import numpy as np
import pytest
from file_server import File

import program

DATA = program.ROOT / "data"
sys.path.insert(0, str(DATA))
BYTES = ["--tokenizer", "bytes"]


def command(script, *options):
    return [sys.executable, str(DATA / script), *map(str, options)]


def start(script, *options, **arguments):
    """Starts the script as a process that keeps running."""
    return subprocess.Popen(command(script, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **arguments)


def run(script, *options, check=True, **arguments):
    """Runs a script to its end; returns its CompletedProcess."""
    result = subprocess.run(command(script, *options), capture_output=True, text=True, timeout=120 * program.PATIENCE, **arguments)
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def run_here(script, *options, processes=1):
    """The same in this process, which takes a tenth of the time. It tokenizes itself, or in `processes` processes."""
    before = sys.argv
    sys.argv = command(script, *options, "--processes", processes)[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before


def run_dying(die, script, *options):
    """Runs a script in a child process, in which die() first arranges an abrupt end. Returns whether the script reached its
    end."""
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


def refused_here(script, *options):
    with pytest.raises(SystemExit) as ending:
        run_here(script, *options)
    text = str(ending.value)
    assert text.startswith("error: ") and "\n" not in text
    return text


def read_shard(path):
    """The tokens of a shard. Its header must be right."""
    data = pathlib.Path(path).read_bytes()
    header = np.frombuffer(data[:1024], "<u4")
    tokens = np.frombuffer(data[1024:], {20240520: "<u2", 20240801: "<u4"}[header[0]])
    assert header[1:3].tolist() == [7 if header[0] == 20240801 else 1, len(tokens)] and not header[5:].any()
    return tokens


def tokens_of(folder, split):
    """All tokens of a split."""
    return np.concatenate([read_shard(path) for path in sorted(folder.glob(f"{split}_*.bin"))])


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def results_in(folder):
    """{name: bytes} of everything in the folder and its subfolders, except the lock."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != ".lock"}


def random_text(seed, size):
    words = random.Random(seed)
    pieces = ["Hello", " world", ",", " the", " of", "\n", "\n\n", "  ", " naïve", "東京", " it's", " 1234", "\t", "\r\n", " e", "é"]
    return "".join(words.choice(pieces) for _ in range(size // 4)).encode()


def hub_of(repository, files, folder=""):
    """The files that huggingface.co serves for a dataset, as {path: File}; `files` are {name: bytes}."""
    tree = [{"type": "file", "path": f"{folder}{name}", "size": len(body), "oid": "0" * 40,
             "lfs": {"oid": hashlib.sha256(body).hexdigest()}} for name, body in files.items()]
    served = {f"/api/datasets/{repository}": File(b'{"sha": "c0ffee"}'),
              f"/api/datasets/{repository}/tree/c0ffee/{folder}".rstrip("/"): File(json.dumps(tree).encode())}
    for name, body in files.items():
        headers = {"X-Linked-Etag": f'"{hashlib.sha256(body).hexdigest()}"'}
        served[f"/datasets/{repository}/resolve/c0ffee/{folder}{name}"] = File(b"", location=f"/store/{name}", headers=headers)
        served[f"/store/{name}"] = File(body)
    return served


def read_rows(path):
    """The rows of a shard of conversations, as (ids, whether the loss counts each). Its header must be right."""
    data = pathlib.Path(path).read_bytes()
    header, words = np.frombuffer(data[:1024], "<u4"), np.frombuffer(data[1024:], "<u4")
    begins = np.flatnonzero(words >> 30 & 1)
    assert header[:3].tolist() == [20240801, 8, len(words)] and header[5] == len(begins) and not header[6:].any()
    assert begins[0] == 0 and not (words[begins] >> 31).any()  # a first token is no target
    return [(row & 0x3FFFFFFF, row >> 31 == 1) for row in np.split(words, begins[1:])]


def rows_of(folder, split):
    return [row for path in sorted(folder.glob(f"{split}_*.bin")) for row in read_rows(path)]
