#!/usr/bin/env python3
"""HellaSwag: sentences with four endings each, of which one makes sense (arXiv:1905.07830).

    python data/hellaswag.py                             its JSON lines, in data/hellaswag

They stay text: `./train_gpt --eval-hellaswag data/hellaswag/hellaswag_val.jsonl` makes the tokens itself.
"""

import json
import pathlib

import common
import shards
from download import RemoteFile
from terminal import Parser, fail, plain_endings, say

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_{}.jsonl"
SPLITS = ["val", "train", "test"]
# The one that results are compared on.
SHA256 = {"val": "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"}


def count_questions(path, labelled):
    """How many there are; fails where a line is none."""
    count = 0
    with open(path, "rb") as file:
        for count, line in enumerate(file, 1):
            try:
                question = json.loads(line)
                sound = isinstance(question["ctx"], str) and len(question["endings"]) == 4
                sound = sound and (not labelled or question["label"] in range(4))
            except (ValueError, KeyError, TypeError):
                sound = False
            if not sound:
                fail(f"{path}, line {count}: no HellaSwag question; remove the file and {path.name}.sha256 to have it downloaded again")
    return count


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=common.ROOT / "data" / "hellaswag", metavar="DIR",
                        help="folder of the results (default: data/hellaswag)")
    common.add_download_options(parser)
    arguments = parser.parse_args()
    with plain_endings(), shards.locked(arguments.out):
        downloader = common.make_downloader(arguments)
        files = []
        for split in SPLITS:
            remote = RemoteFile(URL.format(split), f"hellaswag_{split}.jsonl", SHA256.get(split, ""))
            path = downloader.fetch(remote, arguments.out)
            questions = count_questions(path, labelled=split != "test")
            files.append({"file": path.name, "questions": questions, "sha256": shards.checksum(path), "url": remote.url})
            say(f"{path}: {questions:,} questions")
        shards.write_manifest(arguments.out, {"finished": True, "source": "https://github.com/rowanz/hellaswag", "files": files})


if __name__ == "__main__":
    main()
