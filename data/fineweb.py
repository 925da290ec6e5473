#!/usr/bin/env python3
"""FineWeb: cleaned web pages (arXiv:2406.17557); `edu` has the educational ones. The samples have 10 or 100 billion tokens.

    python data/fineweb.py --name edu --size 10B         in data/fineweb_edu_10B, with 28 GB of downloads
    python data/fineweb.py --name classic --size 10B --limit-tokens 100_000_000

Each page is a document. The first shard is for validation. Files are downloaded as they are needed.
"""

import common
import documents
from download import hub_files

REPOSITORIES = {"edu": "HuggingFaceFW/fineweb-edu", "classic": "HuggingFaceFW/fineweb"}
FOLDERS = {"10B": "sample/10BT", "100B": "sample/100BT"}


def add_options(parser):
    parser.add_argument("--name", choices=REPOSITORIES, default="edu", help="use educational pages (edu, default) or all pages (classic)")
    parser.add_argument("--size", choices=FOLDERS, default="10B", help="use the sample with so many tokens (default: 10B)")


def plan(arguments, downloader):
    folder, repository = arguments.out / "download", REPOSITORIES[arguments.name]
    revision, files = hub_files(downloader, repository, FOLDERS[arguments.size], r".*\.parquet", folder / "files.json")
    parts = [common.remote_part(remote, downloader, folder, documents.parquet_texts) for remote in files]
    source = f"https://huggingface.co/datasets/{repository}/tree/main/{FOLDERS[arguments.size]}"
    return common.Plan(source, [common.Stream("all", parts)], {"revision": revision})


if __name__ == "__main__":
    common.main(__doc__, lambda arguments: f"fineweb_{arguments.name}_{arguments.size}", plan, add_options,
                documents.require_parquet)
