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


def fault_of(line, split):
    """Why `--eval-hellaswag` would not take a line of the validation set, in its words; None where it would. In the other
    sets, whose checksums are not known, an empty text passes, and labels of the test set are not public."""
    def is_text(value):
        return isinstance(value, str) and (value != "" or split != "val")

    try:
        question = json.loads(line)
    except (ValueError, RecursionError):  # the latter of what is nested too deeply
        question = None
    if not isinstance(question, dict):
        return "it is no JSON object"
    ctx, endings, label = map(question.get, ("ctx", "endings", "label"))
    if not is_text(ctx):
        return 'it has no text "ctx"'
    if not (isinstance(endings, list) and len(endings) == 4 and all(map(is_text, endings))):
        return 'its "endings" are not 4 texts'
    if split != "test" and not (type(label) is int and label in range(4)):
        return 'its "label" is not 0 to 3'
    return None


def count_questions(path, split):
    """How many there are; fails where a line is none."""
    count = 0
    with open(path, "rb") as file:
        for count, line in enumerate(file, 1):
            if fault := fault_of(line, split):
                fail(f"{path}, line {count}: no HellaSwag question, {fault}; remove the file and {path.name}.sha256 to have it "
                     "downloaded again")
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
            questions = count_questions(path, split)
            files.append({"file": path.name, "questions": questions, "sha256": shards.checksum(path), "url": remote.url})
            say(f"{path}: {questions:,} questions")
        shards.write_manifest(arguments.out, {"finished": True, "source": "https://github.com/rowanz/hellaswag", "files": files})


if __name__ == "__main__":
    main()
