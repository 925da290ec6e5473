#!/usr/bin/env python3
"""OpenWebText: an open reproduction of GPT-2's training data, 8 million web pages.

    python data/openwebtext.py                           9 billion tokens of GPT-2, in data/openwebtext
    python data/openwebtext.py --limit-tokens 100_000_000

Each page is a document. The first shard is for validation. Files are downloaded as they are needed.
"""

import common
import documents
from download import hub_files

REPOSITORY = "Skylion007/openwebtext"


def plan(arguments, downloader):
    folder = arguments.out / "download"
    revision, files = hub_files(downloader, REPOSITORY, "plain_text", r"train-.*\.parquet", folder / "files.json")
    parts = [common.remote_part(remote, downloader, folder, documents.parquet_texts) for remote in files]
    return common.Plan(f"https://huggingface.co/datasets/{REPOSITORY}", [common.Stream("all", parts)], {"revision": revision})


if __name__ == "__main__":
    common.main(__doc__, "openwebtext", plan, require=documents.require_parquet)
