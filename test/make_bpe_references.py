#!/usr/bin/env python3
"""Makes test/reference/gpt2_bpe.json: the tokens of tiktoken's "gpt2" for the texts of test/python/bpe_corpus.py.

For each group of texts it has the numbers of bytes and tokens, and the SHA-256 of the bytes and of the ids (int32,
with -1 after the ids of each document). The tests do not need tiktoken. FOLDER has encoder.json and vocab.bpe:

    python3 -m venv VENV && VENV/bin/pip install tiktoken numpy pytest
    VENV/bin/python test/make_bpe_references.py FOLDER
"""

import json
import pathlib
import sys

TEST = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(TEST / "python"), str(TEST.parent / "data")]

import numpy as np
import tiktoken

import bpe_corpus
import bpe_files
import gpt2_bpe

FILE = TEST / "reference" / "gpt2_bpe.json"


def tiktoken_encoding(folder):
    """tiktoken's own pattern with the ranks of the files. Nothing is downloaded."""
    import tiktoken_ext.openai_public

    ids = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    byte_of = {character: byte for byte, character in enumerate(bpe_files.characters_of_bytes())}
    ranks = {bytes(map(byte_of.get, name)): number for name, number in ids.items() if number != bpe_files.END_OF_TEXT}
    return tiktoken.Encoding("gpt2", pat_str=tiktoken_ext.openai_public.r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={"<|endoftext|>": bpe_files.END_OF_TEXT})


def ids_of(encoding, text):
    """int32 ids of bytes."""
    return np.array(encoding.encode_ordinary(text.decode("utf-8", errors="replace")), np.int32)


def main():
    if len(sys.argv) != 2:
        sys.exit(f"error: {sys.argv[0]} takes the folder of encoder.json and vocab.bpe")
    encoding = tiktoken_encoding(pathlib.Path(sys.argv[1]))
    groups = {group: gpt2_bpe.summary(bpe_corpus.documents(group), lambda text: ids_of(encoding, text))
              for group in bpe_corpus.ALL_GROUPS}
    FILE.write_text(json.dumps({"tiktoken": tiktoken.__version__, "groups": groups}, indent=1) + "\n")
    print(f"{FILE.relative_to(TEST.parent)}  {sum(group['tokens'] for group in groups.values())} tokens")


if __name__ == "__main__":
    main()
