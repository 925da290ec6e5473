#!/usr/bin/env python3
"""TinyStories: 2 GB of short stories by GPT-4 in the vocabulary of small children (arXiv:2305.07759).

    python data/tinystories.py                           half a billion tokens of GPT-2, in data/tinystories
    python data/tinystories.py --limit-tokens 10_000_000

Each story is a document. The validation stories are the source's own.
"""

import common
import documents
from download import hub_files
from terminal import fail

REPOSITORY = "roneneldan/TinyStories"
FILES = {"train": "TinyStoriesV2-GPT4-train.txt", "val": "TinyStoriesV2-GPT4-valid.txt"}


def plan(arguments, downloader):
    folder = arguments.out / "download"
    wanted = "|".join(name.replace(".", r"\.") for name in FILES.values())
    revision, files = hub_files(downloader, REPOSITORY, "", wanted, folder / "files.json")
    remotes = {remote.name: remote for remote in files}
    for name in FILES.values():
        if name not in remotes:
            fail(f"{REPOSITORY} no longer has {name}; the dataset has changed at its source")
    streams = [common.Stream(split, [common.remote_part(remotes[FILES[split]], downloader, folder, documents.separated_texts)])
               for split in ("val", "train")]
    return common.Plan(f"https://huggingface.co/datasets/{REPOSITORY}", streams, {"revision": revision})


if __name__ == "__main__":
    common.main(__doc__, "tinystories", plan)
