"""Real text: a small model on tinyshakespeare reaches the loss that PyTorch reaches (1.81 with the same settings)."""

import os
import pathlib

import pytest

import program

FOLDERS = [os.environ.get("TRAIN_GPT_DATA", "data"), "data", "../shared/data"]


def find_text():
    for folder in FOLDERS:
        path = program.ROOT / folder / "tinyshakespeare.txt"
        if path.exists():
            return path
    pytest.skip(f"tinyshakespeare.txt is in none of {', '.join(dict.fromkeys(FOLDERS))}; TRAIN_GPT_DATA=folder says where")


def test_validation_loss(tmp_path):
    out_dir = pathlib.Path(os.environ.get("KEEP_RUN", tmp_path))
    run = program.train(out_dir, f"--train-data={find_text()}", "--layers=4", "--heads=4", "--channels=128", "--seq-len=64",
                        f"--global-batch-tokens={12 * 64}", "--steps=2000", "--lr=2e-3", "--min-lr-fraction=0.1",
                        "--val-every=500", "--val-batches=0", timeout=3600)
    losses = {line["step"]: line["val_loss"] for line in run.lines if "val_loss" in line}
    print(f"validation loss on the whole of the last 10%: {losses}")
    assert losses[2000] <= 1.84
