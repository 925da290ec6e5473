#!/usr/bin/env python3
"""Makes GPT-2's encoder.json and vocab.bpe in data/gpt2_bpe, from the ranks of its tokens in PyPI's mlx-whisper (MIT license).

    python data/bpe_files.py

A file of ranks has all 50,256 tokens in the order in which GPT-2's byte-pair encoding learned them. That order
determines both files: encoder.json numbers the tokens, and vocab.bpe lists the two parts of each token. The results
are GPT-2's own files, byte for byte; their checksums say so.
"""

import base64
import hashlib
import json
import math
import pathlib
import sys
import tempfile

import pypi

FOLDER = pathlib.Path(__file__).resolve().parent / "gpt2_bpe"
FILES = {"encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
         "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"}
PACKAGE = "mlx-whisper==0.4.3"
RANKS = "mlx_whisper/assets/gpt2.tiktoken"  # in the package
BYTES = 256  # the first tokens are single bytes
END_OF_TEXT = 50256
# Its split of text into words, before bytes are merged.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def characters_of_bytes():
    """The character that encoder.json uses for each of the 256 bytes: visible Latin-1 characters stand for
    themselves, and characters from 256 on for the others."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def parts(token, ranks):
    """The two tokens that were merged into this one: what is left if only earlier merges are applied."""
    pieces = [token[i:i + 1] for i in range(len(token))]
    while len(pieces) > 2:
        rank, i = min((ranks.get(a + b, math.inf), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:])))
        if rank >= ranks[token]:
            raise ValueError(f"token {ranks[token]} is not the merge of two earlier tokens")
        pieces[i:i + 2] = [pieces[i] + pieces[i + 1]]
    return pieces


def contents(ranks):
    """The text of both files, from the rank of each token (bytes)."""
    characters = characters_of_bytes()

    def text(token):
        return "".join(characters[byte] for byte in token)

    tokens = sorted(ranks, key=ranks.get)
    numbers = {**{text(token): ranks[token] for token in tokens}, "<|endoftext|>": END_OF_TEXT}
    merges = [" ".join(map(text, parts(token, ranks))) for token in tokens[BYTES:]]
    return {"encoder.json": json.dumps(numbers), "vocab.bpe": "\n".join(["#version: 0.2", *merges, ""])}


def downloaded_ranks(folder):
    """The ranks of the package, which pip puts into the folder."""
    lines = pypi.file_of(PACKAGE, RANKS, folder).read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def is_whole(folder):
    return all((folder / name).is_file() and hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256
               for name, sha256 in FILES.items())


def make(folder=FOLDER):
    """Makes the files in the folder if they are not there. Returns why that failed, or None."""
    if is_whole(folder):
        return None
    try:
        with tempfile.TemporaryDirectory() as place:
            made = contents(downloaded_ranks(place))
        for name, text in made.items():
            if hashlib.sha256(text.encode()).hexdigest() != FILES[name]:
                return f"{PACKAGE} does not give GPT-2's {name}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            part = folder / f"{name}.part"
            part.write_bytes(text.encode())
            part.replace(folder / name)
    except pypi.CannotGet as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    why = make()
    if why:
        sys.exit(f"error: GPT-2's BPE files cannot be made: {why}")
    print(f"GPT-2's encoder.json and vocab.bpe are in {FOLDER}")
