"""Shared by the tests of the recipes: their tiny sizes, and a folder like a clone after the dataset scripts."""

import json
import shutil

import numpy as np

import program

# Settings that make a recipe small: sizes and amounts only. Everything else is the recipe's own.
TINY = {"layers": 4, "heads": 2, "channels": 32, "seq-len": 16, "vocab-size": 256, "global-batch-tokens": 512, "steps": 3,
        "warmup-steps": 2, "val-every": 2, "val-batches": 1, "eval-every": 2, "sample-every": 0, "sample-tokens": 4,
        "checkpoint-every": 2, "device": "cpu"}
# 64 GPUs as 8 x 4 x 2 become 2 x 2 x 2 here.
SMALLER_MESH = ["--pipeline-parallel=2"]


def options():
    return [f"--{key}={value}" for key, value in TINY.items()]


def make(place):
    """Puts the scripts, the program and small data into the folder."""
    shutil.copytree(program.ROOT / "scripts", place / "scripts")
    (place / "train_gpt").symlink_to((program.ROOT / program.PROGRAM).resolve())
    tokens = np.random.default_rng(1).integers(0, 256, 5000)
    for size in ("10B", "100B"):
        folder = place / f"data/fineweb_edu_{size}"
        folder.mkdir(parents=True)
        for name in ("train_000001", "train_000002", "val_000000"):
            program.write_token_file(folder / f"{name}.bin", tokens)
    (place / "data/hellaswag").mkdir()
    example = {"ctx": "A man sits. He", "label": 2, "endings": ["flies.", "is red.", "gets up.", "rains."]}
    (place / "data/hellaswag/hellaswag_val.jsonl").write_text(2 * (json.dumps(example) + "\n"))
