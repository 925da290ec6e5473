#!/usr/bin/env python3
"""Rows of tokens of conversations, for fine-tuning a model that has a chat template. The loss counts the answers alone.

    python data/chat.py talks.jsonl --tokenizer SmolLM2-135M-Instruct
    python data/chat.py talks.jsonl --tokenizer DIR --template training.jinja --max-tokens 1024
    python data/chat.py --format DIR         only what stands around each role's text, in DIR/chat_format.json

Each line of FILE has a conversation: `messages` (role, content), `conversations` (from, value), or `prompt` and
`completion`. A row is a conversation in the text of the template. The last tenth of them, or --val-fraction, is for
validation.
"""

import argparse
import collections
import contextlib
import datetime
import fractions
import itertools
import json
import os
import pathlib
import shlex
import shutil

from modules import need

need("numpy", "requests", "tqdm", "xxhash", "jinja2")

import numpy as np  # noqa: E402

import chat_format  # noqa: E402
import common  # noqa: E402
import shards  # noqa: E402
from chat_template import Renderer, read_template, special_texts  # noqa: E402
from conversations import REASONS, REFUSED, SHORTENED, TURNS, Conversations  # noqa: E402
from encode import encode_in_order  # noqa: E402
from shards import COUNTED  # noqa: E402
from terminal import Parser, fail, plain_endings, progress, say  # noqa: E402
from text import fraction, require_text  # noqa: E402
from tokenizer import read_folder, require_library  # noqa: E402

FORMAT, TEMPLATE = "chat_format.json", "chat_template.jinja"
UNFINISHED = ".unfinished"


def parse():
    parser = Parser(__doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help=".jsonl file of conversations")
    parser.add_argument("--tokenizer", type=pathlib.Path, metavar="DIR",
                        help="the model's folder, with its tokenizer and template")
    parser.add_argument("--template", type=pathlib.Path, metavar="FILE",
                        help="use this chat template instead of the folder's")
    parser.add_argument("--max-tokens", type=common.number(2, 1 << 30), default=2048, metavar="N",
                        help="of a longer conversation, leave out whole turns (default: 2048)")
    parser.add_argument("--val-fraction", type=fraction, default=fractions.Fraction(1, 10), metavar="X",
                        help="keep this fraction, the last conversations, for validation (default: 0.1; 0: none)")
    parser.add_argument("--date", type=day, default="2024-07-26", metavar="YYYY-MM-DD",
                        help="the date that templates may write (default: 2024-07-26)")
    parser.add_argument("--format", type=pathlib.Path, metavar="DIR",
                        help=f"write only {FORMAT}, into this model's folder")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR",
                        help="write the results to DIR (default: data/ and the name of the first file)")
    common.add_shard_options(parser)
    arguments = parser.parse_args()
    if bool(arguments.files) == bool(arguments.format):
        parser.error("give files of conversations, or --format DIR")
    if arguments.files and not arguments.tokenizer:
        parser.error("--tokenizer DIR is missing: the folder of the model that is to learn from the conversations")
    return arguments


def day(text):
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no date like 2024-07-26") from None


def main():
    arguments = parse()
    with plain_endings():
        if arguments.format:
            write_format(arguments, arguments.format)
            return
        for file in arguments.files:
            require_text(pathlib.Path(file))
        require_library(arguments.tokenizer)
        folder, name = arguments.tokenizer, pathlib.Path(arguments.files[0]).stem
        out = arguments.out or pathlib.Path(os.path.relpath(common.ROOT / "data" / name))
        encoder = Conversations(read_folder(folder), read_template(folder, arguments.template), special_texts(folder),
                                arguments.date, arguments.max_tokens)
        with contextlib.closing(encoder):
            encoder.require_texts()
            with shards.locked(out):
                if not arguments.overwrite:
                    common.refuse_unlisted_shards(out)
                Writing(arguments, out, encoder).run()


def write_format(arguments, folder):
    """Writes what the template puts around each role's text into a model's folder."""
    content, why = format_file(read_template(folder, arguments.template), special_texts(folder), arguments.date)
    if why:
        fail(f"{why}; give another one with --template FILE")
    shards.write_whole(folder / FORMAT, content)
    if arguments.template:  # for whoever else reads the folder
        shards.write_whole(folder / TEMPLATE, read_template(folder, arguments.template).encode())
    say(f"{folder / FORMAT} has what the chat template puts around each role's text")


def format_file(*template):
    """The content of that file, or why there is none."""
    try:
        found = chat_format.find(*template, Renderer)
        return (json.dumps(found, ensure_ascii=False, indent=1) + "\n").encode(), None
    except chat_format.NoFormat as error:
        return None, ("the chat template does more than to put texts around each role's, which is all that `--chat` can "
                      f"do: {error}")


def lines_of(files):
    """(bytes, its place in words) of each line that is not empty."""
    for file in files:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield line, f"{file}, line {number}"


class Writing:
    """Writes the rows of conversations. They appear in the folder when all are there."""

    def __init__(self, arguments, out, encoder):
        self.arguments, self.out, self.encoder = arguments, out, encoder
        tokenizer = encoder.tokenizer
        self.source = ", ".join(arguments.files)
        self.settings = shards.in_utf8({
            "dataset": "conversations",
            "source": ", ".join(pathlib.Path(file).name for file in arguments.files),
            "inputs": [shards.checksum(file) for file in arguments.files], "tokenizer": tokenizer.name,
            "vocabulary": tokenizer.vocabulary, "checksum": f"{tokenizer.checksum:016x}",
            "template": chat_format.checksum(encoder.template), "date": arguments.date,
            "max_tokens": arguments.max_tokens, "val_fraction": str(arguments.val_fraction),
            "shard_tokens": arguments.shard_tokens})
        # How often what happened; the tokens of the longest row; and why the template refused a conversation.
        self.counts, self.longest, self.refusal = {}, 0, None

    def run(self):
        manifest = None if self.arguments.overwrite else shards.read_manifest(self.out)
        if manifest:
            common.refuse_other_settings(self.out, self.source, manifest["settings"], self.settings)
            if manifest["finished"] and not shards.keep_whole_shards(self.out, manifest):
                say(f"{self.out} is already complete, and its checksums are right")
                return
        place = self.out / UNFINISHED
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            entries = list(self.write(place))
            self.require_answers()
            self.publish(place, entries)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        self.tell()

    def write(self, place):
        """Writes the shards into a folder. Yields their entries in the manifest."""
        files, capacity = self.arguments.files, max(self.arguments.shard_tokens, self.arguments.max_tokens)
        count = sum(1 for _ in lines_of(files))
        training = count - int(count * self.arguments.val_fraction)
        for split, first, last in (("train", 0, training), ("val", training, count)):
            rows = self.rows_of(split, itertools.islice(lines_of(files), first, last), last - first)
            row, number = next(rows, None), int(split == "train")
            while row is not None:
                path = place / f"{split}_{number:06}.bin"
                checksum = self.encoder.tokenizer.checksum
                with shards.ShardWriter(path, capacity, np.uint32, checksum, rows=True) as writer:
                    while row is not None and len(row) <= writer.room:
                        writer.append(row)
                        row = next(rows, None)
                    yield {"stream": split, **writer.finish(), "next": None}
                number += 1

    def rows_of(self, split, lines, count):
        """The rows of a split. Counts what happens."""
        names = ("conversations", "rows", "tokens", "counted", *REASONS)
        counts = self.counts[split] = collections.Counter(dict.fromkeys(names, 0))
        pieces = itertools.chain(((None, *line) for line in lines), [None])
        encoded = encode_in_order(pieces, self.encoder, self.arguments.processes)
        with contextlib.closing(encoded), progress(split, " conversations", count) as bar:
            for _, (rows, happened, refusal) in encoded:
                counts.update({"conversations": 1, "rows": len(rows), **happened})
                self.refusal = self.refusal or refusal
                for row in rows:
                    counts.update({"tokens": len(row), "counted": int(np.count_nonzero(row & COUNTED))})
                    self.longest = max(self.longest, len(row))
                    yield row
                bar.update()

    def total(self, name):
        return sum(counts[name] for counts in self.counts.values())

    def left_out(self):
        """In words, or nothing."""
        reasons = [why for why in REASONS if self.total(why)]
        return ", ".join(f"{self.total(why):,} {why}" + f" ({self.refusal})" * (why == REFUSED) for why in reasons)

    def require_answers(self):
        train = self.counts["train"]
        if train["counted"] == 0:
            fail(f"{self.source}: there is no answer to learn from; of {self.total('conversations'):,} conversations, "
                 f"of which {train['conversations']:,} are to train on, are left out: {self.left_out() or 'none'}")
        if self.total("counted") == self.total("tokens") - self.total("rows"):
            fail("the chat template marks all tokens as answers, so nothing would be asked; give another one with "
                 "--template FILE")

    def publish(self, place, entries):
        """Replaces the shards of the folder by those in `place`."""
        inputs = zip(self.arguments.files, self.settings["inputs"])
        files = shards.in_utf8([{"file": file, "sha256": sha256} for file, sha256 in inputs])
        manifest = {"finished": False, "settings": self.settings, "files": files, "shards": [], "complete": []}
        shards.write_manifest(self.out, manifest)
        for path in [*shards.shards_in(self.out), self.out / FORMAT, self.out / TEMPLATE]:
            path.unlink(missing_ok=True)
        for entry in entries:
            os.replace(place / entry["file"], self.out / entry["file"])
        shards.write_whole(self.out / TEMPLATE, self.encoder.template.encode())
        tokens = {split: counts["tokens"] for split, counts in self.counts.items()}
        content, why = format_file(self.encoder.template, self.encoder.special, self.arguments.date)
        if why:
            say(f"note: {why}")
        else:
            shards.write_whole(self.out / FORMAT, content)
        manifest |= {"finished": True, "shards": entries, "complete": ["train", "val"], "tokens": tokens}
        shards.write_manifest(self.out, {**manifest, "conversations": self.counts})

    def tell(self):
        folder, train, val = common.in_root(self.out), self.counts["train"], self.counts["val"]
        if left_out := self.left_out():
            say(f"left out: {left_out}")
        if self.total(SHORTENED):
            say(f"{SHORTENED}: {self.total(SHORTENED):,} rows, by {self.total(TURNS):,} turns")
        say(f"{folder}: {train['rows']:,} rows to train on, {val['rows']:,} to validate on; the loss counts "
            f"{self.total('counted'):,} of {self.total('tokens'):,} tokens")
        validation = f" --val-data {common.shell_pattern(folder, 'val')}" if val["rows"] else ""
        model = shlex.quote(str(common.in_root(self.arguments.tokenizer)))
        say(f"train with: ./train_gpt --init {model} --seq-len {self.longest} "
            f"--train-data {common.shell_pattern(folder, 'train')}{validation}")


if __name__ == "__main__":
    main()
