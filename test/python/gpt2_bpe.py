"""GPT-2's byte-pair encoding: its files, texts, and what tiktoken's ids for them are."""

import hashlib
import os

import numpy as np
import pytest

import program

FOLDERS = [os.environ.get("TRAIN_GPT_DATA", "data"), "data", "../shared/data"]


def find_files():
    """The folder of encoder.json and vocab.bpe, or None."""
    folders = [program.ROOT / folder / "gpt2_bpe" for folder in FOLDERS]
    return next((folder for folder in folders if (folder / "encoder.json").exists()), None)


def require_files():
    folder = find_files()
    if folder is None:
        pytest.skip(f"gpt2_bpe/encoder.json is in none of {', '.join(dict.fromkeys(FOLDERS))}; TRAIN_GPT_DATA=folder says where")
    return folder


def shared_text():
    """The bytes of tinyshakespeare."""
    for folder in FOLDERS:
        path = program.ROOT / folder / "tinyshakespeare.txt"
        if path.exists():
            return path.read_bytes()
    pytest.skip(f"tinyshakespeare.txt is in none of {', '.join(dict.fromkeys(FOLDERS))}; TRAIN_GPT_DATA=folder says where")


def summary(documents, encode):
    """The entry of test/reference/gpt2_bpe.json for these texts."""
    ids = [np.append(encode(text), np.int32(-1)) for text in documents]
    return {"bytes": sum(map(len, documents)), "tokens": sum(map(len, ids)) - len(ids),
            "text": hashlib.sha256(b"".join(documents)).hexdigest(),
            "ids": hashlib.sha256(b"".join(part.astype("<i4").tobytes() for part in ids)).hexdigest()}
