"""Options of all dataset scripts, and the conversion of documents to shards. Not run by itself.

A script has a function plan(arguments, downloader), which lists the documents; main() here does the rest. The folder
--out then has

    train_000001.bin ...  val_000000.bin    tokens (shards.py)
    manifest.json                           what they are, with checksums; `finished` once all are there
    tokenizer.json, tokenizer_config.json   with --train-tokenizer
    download/                               what was downloaded, with checksums (download.py)

The shards are a function of the documents and the options alone. A run that was interrupted or killed continues after
its last complete shard. That shard's entry in the manifest has the position in the source at which the next one
begins: the part, the piece of it (tokenizer.py) and the token of that piece.
"""

import argparse
import contextlib
import dataclasses
import fractions
import glob
import math
import os
import pathlib
import re
import shlex
import typing

from modules import ROOT, need

need("numpy", "requests", "tqdm", "xxhash")

import documents  # noqa: E402
import encode  # noqa: E402
import shards  # noqa: E402
import tokenizer_training  # noqa: E402
from download import Downloader, recorded_checksum  # noqa: E402
from terminal import Parser, fail, plain_endings, progress, say  # noqa: E402
from tokenizer import cut, open_tokenizer  # noqa: E402

BYTES_OF_TOKEN = 16  # more than the average of any text: English has 4 to 5, and source code at most 8


@dataclasses.dataclass
class Part:
    """A piece of the source that is opened separately, usually a file."""

    # Yields (bytes of a document, whether they include its beginning, whether its end); downloads the file if necessary.
    open: typing.Callable
    files: typing.Callable = list  # the part's source files, for the manifest: [{"file", "sha256", "url"}]


@dataclasses.dataclass
class Stream:
    """A sequence of documents and the shards that they fill."""

    name: str  # val, train, or all: its first shard for validation, the others for training
    parts: list


@dataclasses.dataclass
class Plan:
    """A dataset."""

    source: str  # its origin, for the user
    streams: list
    # Other settings that determine the shards of this dataset.
    settings: dict = dataclasses.field(default_factory=dict)


def remote_part(remote, downloader, folder, texts):
    """The documents texts(path) of a file to download."""
    def read():
        path = downloader.fetch(remote, folder)
        return ((text, True, True) for text in texts(path))

    def files():
        return [{"file": remote.name, "sha256": recorded_checksum(folder / remote.name), "url": remote.url}]

    return Part(read, files)


def split_streams(read, files, fraction):
    """Streams for training and validation. The function read() gives the documents; the last `fraction` of their bytes is for validation."""
    total = sum(len(document) for document in read())
    if total == 0:
        fail("the files have no text; give other files")
    place = int(total * (1 - fraction))  # the split that `train_gpt --train-data TEXT` uses, for a tenth
    streams = [Stream("train", [Part(lambda: documents.before(read(), place), files)])]
    return streams + [Stream("val", [Part(lambda: documents.after(read(), place), files)])] * (place < total)


def parse(description, name, add_options=None):
    """Parses the options of all datasets and those of this one."""
    parser = Parser(description)
    if add_options:
        add_options(parser)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="write the results to DIR (default: data/ and the name of the dataset)")
    add_tokens_options(parser)
    add_download_options(parser)
    arguments = parser.parse_args()
    arguments.dataset = name(arguments) if callable(name) else name
    arguments.out = arguments.out or pathlib.Path(os.path.relpath(ROOT / "data" / arguments.dataset))
    return arguments


def add_tokens_options(parser):
    parser.add_argument("--tokenizer", metavar="NAME",
                        help="make tokens of gpt2 (default), bytes, or the tokenizer in the folder NAME: a tokenizer.json and its settings")
    parser.add_argument("--train-tokenizer", type=number(tokenizer_training.SMALLEST, 1 << 24), metavar="N",
                        help="train a tokenizer of N tokens on the text to train on, write it beside the shards, and use it")
    parser.add_argument("--limit-tokens", type=number(20), metavar="N",
                        help="for a quick trial, stop after N tokens; a tenth of them is for validation, if the dataset has validation text")
    add_shard_options(parser)


def add_shard_options(parser):
    parser.add_argument("--shard-tokens", type=number(16, shards.LARGEST_SHARD), default=100_000_000, metavar="N",
                        help="write N tokens per shard (default: 100 million)")
    parser.add_argument("--processes", type=number(1, 1024), default=len(os.sched_getaffinity(0)), metavar="N",
                        help="tokenize with N processes (default: one per core); the shards are the same for any N")
    parser.add_argument("--overwrite", action="store_true", help="make all shards again and replace those in the folder")


def add_download_options(parser):
    parser.add_argument("--mirror", default="", metavar="URL",
                        help="download from URL instead of the dataset's server: URL replaces https://HOST in all addresses")
    parser.add_argument("--tries", type=number(1), default=8, metavar="N", help="give up after N failures in a row (default: 8)")
    parser.add_argument("--pause", type=seconds, default=1.0, metavar="SECONDS",
                        help="wait this long after the first failure, and twice as long after each further one (default: 1)")


def number(least, most=2**63):
    """Returns a parser of whole numbers from least to most; 100_000_000 and 1e8 are valid too."""
    def read(text):
        sound = re.fullmatch(r"\d[\d_]*(\.\d+)?([eE]\d{1,2})?", text)
        value = fractions.Fraction(text.replace("_", "")) if sound else fractions.Fraction(-1)
        if value.denominator != 1 or not least <= value <= most:
            upper = f" to {most:,}" if most < 2**63 else " or more"
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of {least:,}{upper}")
        return int(value)

    return read


def seconds(text):
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds")
    return value


def make_downloader(arguments):
    return Downloader(arguments.mirror, arguments.tries, arguments.pause)


def main(description, name, plan, add_options=None, require=None):
    """Runs the script of a dataset that becomes tokens. `name` may be a function of the arguments. require(arguments)
    ends the script, before any download, if modules or files that this dataset needs are missing."""
    arguments = parse(description, name, add_options)
    if require:
        require(arguments)
    with plain_endings():
        source, tokenizer = choose_tokenizer(arguments)
        with shards.locked(arguments.out):
            if not arguments.overwrite:
                refuse_unlisted_shards(arguments.out)
            found = plan(arguments, make_downloader(arguments))
            if tokenizer is None:
                source, tokenizer = trained_tokenizer(arguments, found)
            Writing(arguments, found, source, tokenizer).run()


def refuse_unlisted_shards(out):
    """Fails if the folder has shards of unknown origin, which would be used for training together with the new ones."""
    strangers = shards.shards_in(out)
    if strangers and shards.read_manifest(out) is None:
        fail(f"{out} has {strangers[0].name}, which is not listed in {shards.MANIFEST}; give another --out, or --overwrite to remove it")


def choose_tokenizer(arguments):
    """The argument of open_tokenizer and its result; None twice if the tokenizer is to be trained."""
    if arguments.train_tokenizer is None:
        source = arguments.tokenizer or "gpt2"
        return source, open_tokenizer(source)
    if arguments.tokenizer:
        fail(f"--train-tokenizer makes a tokenizer, and --tokenizer {arguments.tokenizer} names another; give one of them")
    tokenizer_training.require()
    return None, None


def trained_tokenizer(arguments, plan):
    """The same for a tokenizer that is trained, by an earlier run of this command if there was one."""
    out, size = arguments.out, arguments.train_tokenizer
    manifest = None if arguments.overwrite else shards.read_manifest(out)
    if manifest:
        refuse_other_settings(out, plan.source, manifest["settings"], {**manifest["settings"], "train_tokenizer": size})
    if manifest is None or not (out / "tokenizer.json").is_file():
        say(f"training a tokenizer of {size:,} tokens")
        tokenizer_training.train(training_texts(arguments, plan), size, out)
    return str(out), open_tokenizer(str(out))


def training_texts(arguments, plan):
    """The documents to train on. Of a stream whose first shard is for validation, as many bytes are left out as that
    shard can have, and with --limit-tokens no more are read than the tokens can have."""
    left = math.inf if arguments.limit_tokens is None else arguments.limit_tokens * BYTES_OF_TOKEN
    for stream in plan.streams:
        skipped = BYTES_OF_TOKEN * validation_capacity(arguments) if stream.name == "all" else 0
        for part in stream.parts if stream.name != "val" else []:
            for document, _, _ in part.open():
                if left <= 0:
                    return
                text = memoryview(document)[documents.boundary(document, max(skipped, 0)):]
                skipped -= len(document)
                left -= len(text)
                yield text


def validation_capacity(arguments):
    """The most tokens of a first shard that is for validation."""
    return min(arguments.shard_tokens, arguments.limit_tokens // 10 if arguments.limit_tokens else arguments.shard_tokens)


def refuse_other_settings(out, source, earlier, settings):
    """Fails if the folder's shards were made with other settings."""
    key = next((key for key in {**earlier, **settings} if earlier.get(key) != settings.get(key)), None)
    if key == "inputs":  # the checksums of the files in `source`
        fail(f"{source}: the text has changed since the first shards in {out}; give --overwrite to make them again, or "
             "another --out")
    if key:
        fail(f"{out} has shards of another run, with {key} {earlier.get(key)} instead of {settings.get(key)}; give the same "
             "options, another --out, or --overwrite to make them again")


def in_root(folder):
    """The folder's path relative to the repository's root, or its absolute path if it is elsewhere."""
    folder = folder.resolve()
    return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder


def shell_pattern(folder, split):
    """A shell-quoted pattern of a split's shards, in which the trainer takes special characters of the folder
    literally."""
    return shlex.quote(glob.escape(str(folder).replace("\\", "\\\\")) + f"/{split}_*.bin")


class Writing:
    """Writes the shards of a plan."""

    def __init__(self, arguments, plan, source, tokenizer):
        self.out, self.plan, self.source, self.tokenizer = arguments.out, plan, source, tokenizer
        self.processes, self.capacity, self.limit = arguments.processes, arguments.shard_tokens, arguments.limit_tokens
        validates = any(stream.name != "train" for stream in plan.streams)
        self.val_limit = self.limit // 10 if self.limit and validates else 0
        self.head = validation_capacity(arguments)
        self.settings = shards.in_utf8({
            "dataset": arguments.dataset, "source": plan.source, "train_tokenizer": arguments.train_tokenizer,
            "tokenizer": "trained" if arguments.train_tokenizer else tokenizer.name, "vocabulary": tokenizer.vocabulary, "checksum": f"{tokenizer.checksum:016x}",
            "begin": tokenizer.begin, "end": tokenizer.end, "shard_tokens": self.capacity, "limit_tokens": self.limit, **plan.settings})
        self.manifest = self.begin(arguments.overwrite)

    def begin(self, overwrite):
        """The manifest to continue from. Removes shards that the manifest does not list."""
        manifest = None if overwrite else shards.read_manifest(self.out)
        if manifest is None:
            manifest = {"finished": False, "settings": self.settings, "files": [], "shards": [], "complete": []}
        else:
            refuse_other_settings(self.out, self.plan.source, manifest["settings"], self.settings)
        for name in shards.keep_whole_shards(self.out, manifest):
            say(f"{self.out / name} is missing or damaged: writing it and the later shards again")
        shards.write_manifest(self.out, manifest)
        listed = {entry["file"] for entry in manifest["shards"]}
        for path in shards.shards_in(self.out):
            if path.name not in listed:
                path.unlink()
        return manifest

    def run(self):
        if self.manifest["finished"]:
            say(f"{self.out} is already complete, and its checksums are right")
        elif self.manifest["shards"]:
            say(f"continuing after {self.manifest['shards'][-1]['file']}")
        for stream in self.plan.streams:
            if stream.name not in self.manifest["complete"]:
                self.write_stream(stream)
                self.manifest["complete"].append(stream.name)
                self.save()
        self.finish()

    def save(self):
        """Writes the manifest, with shards in the order of the streams, not in the order of their writing."""
        order = [stream.name for stream in self.plan.streams]
        self.manifest["shards"].sort(key=lambda entry: order.index(entry["stream"]))
        self.manifest["complete"].sort(key=order.index)
        shards.write_manifest(self.out, self.manifest)

    def finish(self):
        tokens = {split: sum(entry["tokens"] for entry in self.manifest["shards"] if entry["file"].startswith(split))
                  for split in ("train", "val")}
        if tokens["train"] == 0:
            remedy = ("--overwrite and a smaller --shard-tokens" if "all" in self.manifest["complete"] else
                      "more text, or --overwrite and a smaller --val-fraction" if "val_fraction" in self.settings else "more text")
            fail(f"all of the {tokens['val']:,} tokens are for validation, and none are left to train on; give {remedy}")
        self.manifest["tokens"], self.manifest["finished"] = tokens, True
        self.save()
        folder = in_root(self.out)
        say(f"{folder}: {tokens['train']:,} tokens to train on, {tokens['val']:,} to validate on")
        validation = f" --val-data {shell_pattern(folder, 'val')}" if tokens["val"] else ""
        say(f"train with: ./train_gpt {self.model()} --train-data {shell_pattern(folder, 'train')}{validation}")

    def model(self):
        """The trainer's options for a model of these tokens."""
        if self.source in ("gpt2", "bytes"):
            return "--model gpt2" if self.source == "gpt2" else "--model mini"
        folder = shlex.quote(str(in_root(pathlib.Path(self.source))))
        if pathlib.Path(self.source, "config.json").is_file():
            return f"--init {folder}"
        sizes = "gpt2" if self.tokenizer.name == "gpt2" else f"mini --vocab-size {self.tokenizer.vocabulary}"
        return f"--model {sizes} --tokenizer {folder}"

    def shard_of(self, stream, count):
        """The name and the capacity in tokens of a stream's next shard, after `count` earlier ones."""
        if stream.name == "all":
            return ("val_000000.bin", self.head) if count == 0 else (f"train_{count:06}.bin", self.capacity)
        return f"{stream.name}_{count + (stream.name == 'train'):06}.bin", self.capacity

    def limit_of(self, stream):
        if self.limit is None:
            return None
        return {"all": self.limit, "val": self.val_limit, "train": self.limit - self.val_limit}[stream.name]

    def write_stream(self, stream):
        done = [entry for entry in self.manifest["shards"] if entry["stream"] == stream.name]
        position = done[-1]["next"] if done else [0, 0, 0]
        written, tokens = sum(entry["tokens"] for entry in done), ()
        limit = self.limit_of(stream)
        encoded = self.tokens_from(stream, position or [0, 0, 0])
        with contextlib.closing(encoded), progress(stream.name, " tokens", limit, written) as bar:
            while position is not None and (limit is None or written < limit):
                name, capacity = self.shard_of(stream, len(done))
                room = capacity if limit is None else min(capacity, limit - written)
                with shards.ShardWriter(self.out / name, room, self.tokenizer.dtype, self.tokenizer.checksum) as writer:
                    while writer.room and position is not None:
                        if len(tokens) == 0:
                            position, tokens = next(encoded, (None, ()))
                            continue
                        taken, tokens = tokens[:writer.room], tokens[writer.room:]
                        writer.append(taken)
                        bar.update(len(taken))
                        position = [*position[:2], position[2] + len(taken)]
                    if writer.tokens == 0:
                        break
                    entry = {"stream": stream.name, **writer.finish(), "next": position}
                written += entry["tokens"]
                done.append(entry)
                self.manifest["shards"].append(entry)
                self.save()
                say(f"{self.out / name}: {entry['tokens']:,} tokens")

    def tokens_from(self, stream, start):
        """Yields (position, tokens), from the position `start` on. The position is that of the first of these
        tokens."""
        first_part, first_piece, offset = start

        def pieces():
            for part in range(first_part, len(stream.parts)):
                number = 0
                for document, begins, ends in self.opened(stream.parts[part]):
                    left = len(document)
                    for text in cut(document, self.tokenizer):
                        left -= len(text)
                        if part > first_part or number >= first_piece:
                            around = self.tokenizer.around(begins, ends and left == 0, part == number == 0)
                            yield (part, number), text, *around
                        begins = False
                        number += 1
                yield None

        encoded = encode.encode_in_order(pieces(), self.tokenizer, self.processes)
        with contextlib.closing(encoded):
            for (part, piece), tokens in encoded:
                skipped = offset if (part, piece) == (first_part, first_piece) else 0
                if len(tokens) > skipped:
                    yield [part, piece, skipped], tokens[skipped:]

    def opened(self, part):
        """The documents of a part. Records its files in the manifest."""
        found = part.open()
        for file in shards.in_utf8(part.files()):
            earlier = next((entry for entry in self.manifest["files"] if entry["file"] == file["file"]), None)
            if earlier is None:
                self.manifest["files"].append(file)
            elif earlier["sha256"] != file["sha256"]:
                fail(f"{file['file']} has changed since the first shards in {self.out}; give --overwrite to make them again, "
                     "or another --out")
        return found
