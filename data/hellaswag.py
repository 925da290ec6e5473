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
# Published results use the validation set.
SHA256 = {"val": "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"}


def fault_of(line, split):
    """Why `--eval-hellaswag` would refuse a line of the validation set, in its words; None if it would not. In the
    other sets, whose checksums are not known, an empty text passes. The labels of the test set are not public."""
    def is_text(value):
        return isinstance(value, str) and (value != "" or split != "val")

    try:
        question = json.loads(line)
    except (ValueError, RecursionError):  # RecursionError: nested too deeply
        question = None
    if not isinstance(question, dict):
        return "not a JSON object"
    ctx, endings, label = map(question.get, ("ctx", "endings", "label"))
    if not is_text(ctx):
        return '"ctx" is missing, empty or not a string'
    if not (isinstance(endings, list) and len(endings) == 4 and all(map(is_text, endings))):
        return '"endings" is not a list of 4 non-empty strings'
    if split != "test" and not (type(label) is int and label in range(4)):
        return '"label" is not 0 to 3'
    return None


def count_questions(path, split):
    """The number of questions; fails if a line is not a question."""
    count = 0
    with open(path, "rb") as file:
        for count, line in enumerate(file, 1):
            if fault := fault_of(line, split):
                fail(f"{path}, line {count}: not a HellaSwag question ({fault}); remove the file and {path.name}.sha256 to "
                     "download it again")
    return count


def main():
    parser = Parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=common.ROOT / "data" / "hellaswag", metavar="DIR",
                        help="write the results to DIR (default: data/hellaswag)")
    common.add_download_options(parser)
    arguments = parser.parse_args()
    with plain_endings(), shards.locked(arguments.out):
        downloader = common.make_downloader(arguments)
        files = []
        for split in SPLITS:
            remote = RemoteFile(URL.format(split), f"hellaswag_{split}.jsonl", SHA256.get(split, ""))
            path = downloader.fetch(remote, arguments.out)
            questions = count_questions(path, split)
            files.append({"file": path.name, "questions": questions, "sha256": shards.checksum(path), "url": remote.url})
            say(f"{path}: {questions:,} questions")
        shards.write_manifest(arguments.out, {"finished": True, "source": "https://github.com/rowanz/hellaswag", "files": files})


if __name__ == "__main__":
    main()
