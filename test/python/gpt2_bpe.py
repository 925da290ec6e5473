"""GPT-2's byte-pair encoders: the project's own through build/libgpt2_bpe.so, and tiktoken's with the same files."""

import ctypes
import hashlib
import json
import os
import pathlib

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


class Encoder:
    """The C interface of llmc/data/bpe_c.h. Raises ValueError with its message if the files are wrong."""

    def __init__(self, folder):
        self.library = ctypes.CDLL(program.ROOT / program.BUILD / "libgpt2_bpe.so")
        self.library.gpt2_bpe_open.restype = ctypes.c_void_p
        self.library.gpt2_bpe_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        self.library.gpt2_bpe_close.argtypes = [ctypes.c_void_p]
        self.library.gpt2_bpe_encode.restype = ctypes.c_int64
        self.library.gpt2_bpe_encode.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
        error = ctypes.create_string_buffer(1000)
        self.handle = self.library.gpt2_bpe_open(os.fsencode(folder), error, len(error))
        if not self.handle:
            raise ValueError(error.value.decode())

    def close(self):
        self.library.gpt2_bpe_close(self.handle)

    def encode(self, text, capacity=None):
        """int32 ids of bytes; None if there is too little room for them."""
        ids = np.empty(len(text) if capacity is None else capacity, np.int32)
        count = self.library.gpt2_bpe_encode(self.handle, text, len(text), ids.ctypes.data, len(ids))
        return None if count < 0 else ids[:count]


def byte_symbols():
    """The byte of each character in the files: printable bytes stand for themselves, the others begin at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def tiktoken_encoding(folder):
    """tiktoken's own pattern with the ranks of the files. Nothing is downloaded."""
    import tiktoken
    import tiktoken_ext.openai_public

    symbols = byte_symbols()
    ids = json.loads((pathlib.Path(folder) / "encoder.json").read_text(encoding="utf-8"))
    end_of_text = ids.pop("<|endoftext|>")
    ranks = {bytes(symbols[character] for character in name): id for name, id in ids.items()}
    return tiktoken.Encoding("gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": end_of_text})


def tiktoken_ids(encoding, text):
    """int32 ids of bytes."""
    return np.array(encoding.encode_ordinary(text.decode("utf-8", errors="replace")), np.int32)


def summary(documents, encode):
    """The entry of test/reference/gpt2_bpe.json for these texts."""
    ids = [np.append(encode(text), np.int32(-1)) for text in documents]
    return {"bytes": sum(map(len, documents)), "tokens": sum(map(len, ids)) - len(ids),
            "text": hashlib.sha256(b"".join(documents)).hexdigest(),
            "ids": hashlib.sha256(b"".join(part.astype("<i4").tobytes() for part in ids)).hexdigest()}
