"""Every command on the pages of the documentation runs as it stands there, in a folder like a clone after the commands before it.

A comment before each block of commands says how; a block without one fails the test:
    <!-- run -->                  as it is
    <!-- run: tiny -->            train_gpt with a tiny model's sizes and few steps in place of those that are given
    <!-- run: mirror -->          the same; scripts of data/ download small files from a local server and keep few tokens
    <!-- run: then Ctrl-C -->     a program that runs until Ctrl-C gets Ctrl-C after a few seconds
    <!-- run: simulated -->       as it is, if the trainer on simulated GPUs has been built
    <!-- run: slurm -->, <!-- run: gpu -->, <!-- run: net -->   needs Slurm, a GPU or the internet: skipped here
    <!-- run: long -->            needs a real model and minutes: long_fine_tuning.py runs it
    <!-- run: torch -->           Python, for a newer PyTorch: long_torch.py runs it
    <!-- prints -->               printed output, not commands (test_pages_prints.py), or the map of the folders
`make` runs with -n, except that its training and drawing commands run, and that labs in dev/ are built. test_pages_of_lab.py has their tests.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest

import file_server
import gpt2_bpe
import model_folders
import program
from dataset_scripts import hub_of
from pages import GENERATED, TEXTS, blocks

ROOT = program.ROOT
HOWS = {"run", "run: tiny", "run: mirror", "run: then Ctrl-C", "run: simulated", "run: slurm", "run: gpu", "run: net", "run: long", "run: torch",
        "prints"}
SKIPPED = {"run: slurm": "no Slurm is set up; test/python/long_slurm.py starts one",
           "run: gpu": "it takes a GPU, and CUDA's libraries",
           "run: net": "it downloads or installs from the net",
           "run: long": "it takes minutes; test/python/long_fine_tuning.py runs it",
           "run: torch": "it takes a newer PyTorch; test/python/long_torch.py runs it"}
# These values replace those of options of the same name, and are added if there are none.
TINY = {"layers": "4", "heads": "4", "channels": "32", "seq-len": "16", "vocab-size": "256", "global-batch-tokens": "1024",
        "steps": "2", "warmup-steps": "1", "val-every": "0", "val-batches": "1", "sample-tokens": "5", "device": "cpu"}

# A script that replaces ./train_gpt.
TRAIN_GPT = """#!{python}
import os, sys
tiny, given, out = {tiny!r}, sys.argv[1:], []
while tiny and given:
    word = given.pop(0)
    name = word[2:].split("=")[0]
    if not word.startswith("--") or name not in tiny:
        out.append(word)
        continue
    value = word.split("=", 1)[1] if "=" in word else given.pop(0)
    if name == "steps" and value == "0":
        tiny["steps"] = "0"
os.execv({program!r}, ["./train_gpt", *out, *given, *(f"--{{key}}={{value}}" for key, value in tiny.items())])
"""

# A script that replaces make: it installs nothing, and builds only labs, whose parts other tests have built.
MAKE = """#!/usr/bin/env bash
set -euo pipefail
[[ $1 != dev/* ]] || exec {make} -C {root} "$@"
would=$({make} -n "$@")
grep -E '^(scripts/launch\\.sh|\\S*python3? scripts/)' <<<"$would" | bash -e || [[ $* != quickstart ]]
"""

# A script that replaces python: downloads come from a local server. (The data of the recipes and of fine-tuning are bytes,
# because the tiny models read bytes.)
PYTHON = """#!/usr/bin/env bash
case $1 in
    data/hellaswag.py) options=() ;;
    data/fineweb.py | data/text.py) options=(--tokenizer bytes --limit-tokens 20_000) ;;
    *) options=(--tokenizer "{bpe}" --limit-tokens 20_000) ;;
esac
exec {python} "$@" --mirror {url} "${{options[@]}}"
"""


ALL = [(line, how, commands) for line, how, commands in blocks() if how != "prints"]


def is_of_lab(commands):
    return any(word.startswith("dev/") for command in commands for word in shlex.split(command, comments=True))


OF_LAB = [block for block in ALL if is_of_lab(block[2])]  # test_pages_of_lab.py runs these, when the lab is built
COMMANDS = [block for block in ALL if not is_of_lab(block[2])]


def test_every_block_says_how_it_is_run():
    untold = [f"{place}: {commands[0]}" for place, how, commands in blocks() if how not in HOWS]
    assert not untold, "\n".join(untold)
    assert len(ALL) > 30 and len({place.split(":")[0] for place, _, _ in ALL}) > 8 and OF_LAB
    for name, text in TEXTS.items():
        other = re.findall(r"^\s*(?:```|~~~).*|^ *[-*\d.]* +(?:\./train_gpt|scripts/|python3? |make |mpirun ).*", re.sub(r"^    .*", "", text, flags=re.MULTILINE),
                           re.MULTILINE)
        assert not other or name == GENERATED, f"commands of {name} that blocks() does not see: " + "; ".join(other)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with what the pages speak of: scripts and sources, small data and weights, runs x, a, b and quickstart."""
    place = tmp_path_factory.mktemp("clone")
    for path in ROOT.iterdir():
        if path.name not in ("runs", "train_gpt", "data", "scripts"):
            (place / path.name).symlink_to(path)
    for name in ("scripts", "data"):  # copied: a linked script would find the wrong folder, and data/ is written to
        (place / name).mkdir()
        for path in (ROOT / name).iterdir():
            if path.is_file():
                shutil.copy(path, place / name)
    shutil.copytree(ROOT / "scripts/recipes", place / "scripts/recipes")
    tokens = np.random.default_rng(1).integers(0, 256, 20000)
    for folder, name in itertools.product(["data", "data/fineweb_edu_10B"], ["train_000001", "val_000000"]):
        (place / folder).mkdir(exist_ok=True)
        program.write_token_file(place / f"{folder}/{name}.bin", tokens)
    (place / "book.txt").write_text("It was a dark and stormy night. " * 500)
    example = {"ctx": "A man sits. He", "label": 2, "endings": ["flies.", "is red.", "gets up.", "rains."]}
    (place / "data/hellaswag").mkdir()
    (place / "data/hellaswag/hellaswag_val.jsonl").write_text(2 * (json.dumps(example) + "\n"))
    sizes = [f"--{name}={TINY[name]}" for name in ("layers", "heads", "channels", "seq-len", "vocab-size", "device")]
    for name in ("x", "a", "b", "quickstart"):
        program.run(*sizes, "--steps=3", "--warmup-steps=1", "--sample-tokens=0", f"--out-dir={place}/runs/{name}",
                    f"--export={place}/gpt2.safetensors")
    model_folders.write(place / "Llama-3.2-1B", {**model_folders.LLAMA, "vocab_size": 256})
    (place / "bin").mkdir()
    write_command(place / "bin/make", MAKE.format(make=shutil.which("make"), root=ROOT))
    return place


def write_command(path, text):
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def run_in(place, command):
    environment = {**os.environ, "PATH": f"{place}/bin:{os.environ['PATH']}",
                   "OMPI_MCA_rmaps_base_oversubscribe": "1"}  # more processes than cores
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
        environment.pop(name, None)
    done = subprocess.run(["bash", "-ec", command], cwd=place, capture_output=True, text=True, env=environment,
                          timeout=200 * program.PATIENCE)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.parametrize("how, commands", [(how, commands) for _, how, commands in COMMANDS], ids=[f"{place} {commands[0]}" for place, _, commands in COMMANDS])
def test_the_commands_run(clone, parquet_of_lines, how, commands):
    if how in SKIPPED:
        pytest.skip(SKIPPED[how])
    if how == "run: simulated" and not (ROOT / "build/test/train_gpt-plain").exists():
        pytest.skip("the trainer on simulated GPUs is not in build/test/")
    words = {word for command in commands for word in shlex.split(command, comments=True)}
    lacking = [name for name in ("torchrun", "mpirun") if name in words and not shutil.which(name)]
    if lacking or ("mpirun" in words and not program.HAS_MPI):
        pytest.skip(f"no {' or '.join(lacking) or 'MPI'} here")
    if "torchrun" in words and subprocess.run(["torchrun", "--no_python", "true"], capture_output=True).returncode != 0:
        pytest.skip("the torchrun here starts nothing (Debian's PyTorch 1.13 on Python 3.11)")
    tiny = dict(TINY) if how in ("run: tiny", "run: mirror") else {}
    script = "\n".join(commands)
    with contextlib.ExitStack() as stack:
        if how == "run: mirror":
            if "--init" not in words:  # the given weights are for bytes
                del tiny["vocab-size"]
            server = stack.enter_context(file_server.serving())
            bpe = ""
            if "data/tinyshakespeare.py" in words:
                server.files["/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"] = file_server.File(gpt2_bpe.shared_text())
                bpe = gpt2_bpe.require_files().resolve()
            if "data/fineweb.py" in words:
                files = {"000_00000.parquet": parquet_of_lines(["It was a dark and stormy night. " * 10] * 100)}
                server.files.update(hub_of("HuggingFaceFW/fineweb-edu", files, "sample/10BT/"))
                shutil.rmtree(clone / "data/fineweb_edu_10B")
            if "data/hellaswag.py" in words:
                serve_hellaswag(server, clone)
            write_command(clone / "bin/python", PYTHON.format(python=sys.executable, url=server.url, bpe=bpe))
        if how == "run: then Ctrl-C":
            # (timeout exits with status 124 if it had to send the signal.)
            commands = [f"timeout --signal=INT 5 {command.split('#')[0]} || [[ $? == 124 ]]" for command in commands]
            script = "\n".join(commands)
        write_command(clone / "train_gpt", TRAIN_GPT.format(python=sys.executable, tiny=tiny, program=str((ROOT / program.PROGRAM).resolve())))
        run_in(clone, script)


def serve_hellaswag(server, clone):
    """Serves a few questions. The clone's script gets their checksum, so that it accepts them."""
    questions = (clone / "data/hellaswag/hellaswag_val.jsonl").read_bytes()
    for split in ("val", "train", "test"):
        server.files[f"/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl"] = file_server.File(questions)
    script = clone / "data/hellaswag.py"
    script.write_text(re.sub('"[0-9a-f]{64}"', f'"{hashlib.sha256(questions).hexdigest()}"', script.read_text()))
    (clone / "data/hellaswag/hellaswag_val.jsonl").unlink()
