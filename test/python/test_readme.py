"""Every command in README.md runs as it stands there, in a folder like a clone after the commands before it.

A comment before each block of commands says how; a block without one fails the test:
    <!-- run -->            as it is
    <!-- run: tiny -->      train_gpt with the sizes of a tiny model and few steps in place of what is given
    <!-- run: make -n -->   make says what it would do; what it would train or draw is done, as tiny as that
    <!-- run: slurm -->, <!-- run: gpu -->, <!-- run: net -->   where there is one: skipped here
    <!-- prints -->         no commands, but what some print, or a picture of the folders
"""

import json
import os
import pathlib
import re
import shlex
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest

import program

ROOT = program.ROOT
README = (ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n\n?)?((?:^    .*\n|^\n(?=    ))+)", re.MULTILINE)
HOWS = {"run", "run: tiny", "run: make -n", "run: slurm", "run: gpu", "run: net", "prints"}
SKIPPED = {"run: slurm": "no Slurm is set up; test/python/long_slurm.py starts one",
           "run: gpu": "it takes a GPU, and CUDA's libraries",
           "run: net": "it installs from the net"}
# What replaces an option of this name, and is added where it is not given.
TINY = {"layers": "4", "heads": "4", "channels": "32", "seq-len": "16", "global-batch-tokens": "1024", "steps": "2",
        "sample-tokens": "5", "device": "cpu"}
KEEPS_STEPS = {"--resume"}  # of a run that went as far as it should

# Stands where ./train_gpt does. Options that a configuration gives stay as they are there.
WRAPPER = """#!{python}
import os, sys
tiny, given, out = {tiny!r}, sys.argv[1:], []
if {is_tiny} and not any(word in ("--help", "--version", "--config") for word in given):
    while given:
        word = given.pop(0)
        name = word[2:].split("=")[0]
        if not word.startswith("--") or name not in tiny:
            out.append(word)
            continue
        value = word.split("=", 1)[1] if "=" in word else given.pop(0)
        if name == "steps" and value == "0":
            tiny = {{key: kept for key, kept in tiny.items() if key != "steps"}}
            out.append("--steps=0")
    given = out + [f"--{{key}}={{value}}" for key, value in tiny.items()]
os.execv({program!r}, ["./train_gpt", *given])
"""


def blocks():
    """(line, how, commands) of each indented block."""
    found = []
    for match in BLOCK.finditer(README):
        how, text = match.groups()
        found.append((README[:match.start(2)].count("\n") + 1, how, [line[4:] for line in text.splitlines() if line.strip()]))
    return found


COMMANDS = [(line, how, commands) for line, how, commands in blocks() if how != "prints"]


def test_every_block_says_how_it_is_run():
    untold = [f"README.md:{line}: {commands[0]}" for line, how, commands in blocks() if how not in HOWS]
    assert not untold, "\n".join(untold)
    assert len(COMMANDS) > 20


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with what README.md speaks of: scripts and sources by link, small data, runs x, a and b."""
    place = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("runs", "train_gpt", "data", "scripts") and not path.name.startswith(".pytest"):
            (place / path.name).symlink_to(path)
    for name in ("scripts", "data"):  # which say where they are, or are written to
        (place / name).mkdir()
        for path in (ROOT / name).iterdir():
            if path.suffix in (".py", ".sh", ".txt", ".toml", ".sbatch"):
                shutil.copy(path, place / name)
    tokens = np.random.default_rng(1).integers(0, 256, 20000)
    for name in ("train_000001", "val_000000"):
        program.write_token_file(place / f"data/{name}.bin", tokens)
    (place / "book.txt").write_text("It was a dark and stormy night. " * 500)
    example = {"ctx": "A man sits. He", "label": 2, "endings": ["flies.", "is red.", "gets up.", "rains."]}
    (place / "hellaswag_val.jsonl").write_text(2 * (json.dumps(example) + "\n"))
    for name in ("x", "a", "b"):
        program.run("--layers=1", "--heads=1", "--channels=16", "--seq-len=16", "--steps=3", "--sample-tokens=0", "--device=cpu",
                    f"--out-dir={place}/runs/{name}")
    return place


def make_wrapper(place, is_tiny):
    wrapper = place / "train_gpt"
    wrapper.write_text(WRAPPER.format(python=sys.executable, tiny=TINY, is_tiny=is_tiny, program=program.PROGRAM))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)


def run_in(place, command):
    environment = {**os.environ, "PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    done = subprocess.run(["bash", "-ec", command], cwd=place, capture_output=True, text=True, env=environment,
                          timeout=200 * program.PATIENCE)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("line, how, commands", COMMANDS, ids=[f"{commands[0]}" for _, _, commands in COMMANDS])
def test_the_commands_run(clone, line, how, commands):
    if how in SKIPPED:
        pytest.skip(SKIPPED[how])
    words = {word for command in commands for word in shlex.split(command, comments=True)}
    lacking = [name for name in ("torchrun", "mpirun") if name in words and not shutil.which(name)]
    if lacking:
        pytest.skip(f"no {' or '.join(lacking)} here")
    make_wrapper(clone, how != "run")
    if how != "run: make -n":
        run_in(clone, "\n".join(commands))
        return
    for command in commands:
        if not command.startswith("make"):
            run_in(clone, command)
            continue
        said = run_in(clone, command.split("#")[0] + " -n")
        for would in re.findall(r"^(?:scripts/launch\.sh|\S*python3? scripts/).*$", said, re.MULTILINE):
            run_in(clone, would.replace("runs/quickstart", "runs/quick"))
