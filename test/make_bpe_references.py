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
sys.path.insert(0, str(TEST / "python"))

import bpe_corpus
import gpt2_bpe

FILE = TEST / "reference" / "gpt2_bpe.json"


def main():
    if len(sys.argv) != 2:
        sys.exit(f"error: {sys.argv[0]} takes the folder of encoder.json and vocab.bpe")
    import tiktoken

    encoding = gpt2_bpe.tiktoken_encoding(sys.argv[1])
    groups = {group: gpt2_bpe.summary(bpe_corpus.documents(group), lambda text: gpt2_bpe.tiktoken_ids(encoding, text))
              for group in bpe_corpus.ALL_GROUPS}
    FILE.write_text(json.dumps({"tiktoken": tiktoken.__version__, "groups": groups}, indent=1) + "\n")
    print(f"{FILE.relative_to(TEST.parent)}  {sum(group['tokens'] for group in groups.values())} tokens")


if __name__ == "__main__":
    main()
