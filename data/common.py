"""Options of all dataset scripts, and the conversion of documents to shards. Not run by itself.

A script has a function plan(arguments, downloader), which lists the documents; main() here does the rest. The folder
--out then has

    train_000001.bin ...  val_000000.bin    tokens (shards.py)
    manifest.json                           what they are, with checksums; `finished` once all are there
    download/                               what was downloaded, with checksums (download.py)

The shards are a function of the documents and the options alone. A run that was interrupted or killed continues after
its last complete shard. That shard's entry in the manifest has the position in the source at which the next one
begins: the part, the piece of it (encode.py) and the token of that piece.
"""

import argparse
import contextlib
import dataclasses
import fractions
import glob
import os
import pathlib
import re
import shlex
import typing

from modules import ROOT, need

need("numpy", "requests", "tqdm")

import bpe_files  # noqa: E402
import documents  # noqa: E402
import encode  # noqa: E402
import shards  # noqa: E402
from download import Downloader, recorded_checksum  # noqa: E402
from terminal import Parser, fail, plain_endings, progress, say  # noqa: E402


DEFAULT_BPE = bpe_files.FOLDER


@dataclasses.dataclass
class Part:
    """A piece of the source that is opened separately, usually a file."""

    open: typing.Callable  # yields (bytes of a document, whether they include its beginning); downloads the file if necessary
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
        return ((text, True) for text in texts(path))

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
    parser.add_argument("--tokenizer", choices=["gpt2", "bytes"], default="gpt2", help="use GPT-2's BPE (default) or bytes as tokens")
    parser.add_argument("--bpe-dir", type=pathlib.Path, metavar="DIR",
                        help="read GPT-2's encoder.json and vocab.bpe from DIR (default: data/gpt2_bpe, made once)")
    parser.add_argument("--bpe-mirror", default="", metavar="URL", help="like --mirror, for the server of encoder.json and vocab.bpe")
    parser.add_argument("--encoder", choices=["tiktoken", "native"],
                        help="compute GPT-2's BPE with this encoder; the tokens are the same (default: tiktoken if installed)")
    parser.add_argument("--shard-tokens", type=number(16, shards.LARGEST_SHARD), default=100_000_000, metavar="N",
                        help="write N tokens per shard (default: 100 million)")
    parser.add_argument("--limit-tokens", type=number(20), metavar="N",
                        help="for a quick trial, stop after N tokens; a tenth of them is for validation, if the dataset has validation text")
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
    with plain_endings(), shards.locked(arguments.out):
        if not arguments.overwrite:
            refuse_unlisted_shards(arguments.out)
        kind, bpe_folder = choose_tokenizer(arguments)
        Writing(arguments, plan(arguments, make_downloader(arguments)), kind, bpe_folder).run()


def refuse_unlisted_shards(out):
    """Fails if the folder has shards of unknown origin, which would be used for training together with the new ones."""
    strangers = shards.shards_in(out)
    if strangers and shards.read_manifest(out) is None:
        fail(f"{out} has {strangers[0].name}, which is not listed in {shards.MANIFEST}; give another --out, or --overwrite to remove it")


def choose_tokenizer(arguments):
    """The arguments of open_tokenizer."""
    if arguments.tokenizer == "bytes":
        return "bytes", None
    remedy = "give another server with --bpe-mirror URL, or your own encoder.json and vocab.bpe with --bpe-dir DIR"
    own = Downloader(arguments.bpe_mirror, arguments.tries, arguments.pause, remedy)
    folder = arguments.bpe_dir or DEFAULT_BPE
    return encode.prepare_gpt2(folder, None if arguments.bpe_dir else own, arguments.encoder), folder


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

    def __init__(self, arguments, plan, kind, bpe_folder):
        self.out, self.plan, self.kind, self.bpe_folder = arguments.out, plan, kind, bpe_folder
        self.tokenizer = encode.open_tokenizer(kind, bpe_folder)
        self.processes, self.capacity, self.limit = arguments.processes, arguments.shard_tokens, arguments.limit_tokens
        validates = any(stream.name != "train" for stream in plan.streams)
        self.val_limit = self.limit // 10 if self.limit and validates else 0
        self.settings = shards.in_utf8({
            "dataset": arguments.dataset, "source": plan.source, "tokenizer": self.tokenizer.name,
            "vocabulary": self.tokenizer.vocabulary, "separator": self.tokenizer.separator,
            "shard_tokens": self.capacity, "limit_tokens": self.limit, **plan.settings})
        self.manifest = self.begin(arguments.overwrite)

    def begin(self, overwrite):
        """The manifest to continue from. Removes shards that the manifest does not list."""
        manifest = None if overwrite else shards.read_manifest(self.out)
        if manifest is None:
            manifest = {"finished": False, "settings": self.settings, "files": [], "shards": [], "complete": []}
        elif manifest["settings"] != self.settings:
            self.refuse(manifest["settings"])
        for name in shards.keep_whole_shards(self.out, manifest):
            say(f"{self.out / name} is missing or damaged: writing it and the later shards again")
        shards.write_manifest(self.out, manifest)
        listed = {entry["file"] for entry in manifest["shards"]}
        for path in shards.shards_in(self.out):
            if path.name not in listed:
                path.unlink()
        return manifest

    def refuse(self, earlier):
        key = next(key for key in {**earlier, **self.settings} if earlier.get(key) != self.settings.get(key))
        if key == "inputs":  # the checksums of the files in `source`
            fail(f"{self.plan.source}: the text has changed since the first shards in {self.out}; give --overwrite to make "
                 "them again, or another --out")
        fail(f"{self.out} has shards of another run, with {key} {earlier.get(key)} instead of {self.settings.get(key)}; "
             "give the same options, another --out, or --overwrite to make them again")

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
        model = "gpt2" if self.tokenizer.name == "gpt2" else "mini"
        validation = f" --val-data {shell_pattern(folder, 'val')}" if tokens["val"] else ""
        bpe = f" --bpe-dir {shlex.quote(str(in_root(self.bpe_folder)))}" if self.bpe_folder not in (None, DEFAULT_BPE) else ""
        say(f"train with: ./train_gpt --model {model} --train-data {shell_pattern(folder, 'train')}{validation}{bpe}")

    def shard_of(self, stream, count):
        """The name and the capacity in tokens of a stream's next shard, after `count` earlier ones."""
        if stream.name == "all":
            head = min(self.capacity, self.val_limit or self.capacity)
            return ("val_000000.bin", head) if count == 0 else (f"train_{count:06}.bin", self.capacity)
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
                with shards.ShardWriter(self.out / name, room) as writer:
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
                for document, begins in self.opened(stream.parts[part]):
                    for text in encode.cut(document):
                        separated = begins and (self.tokenizer.separates_first or bool(part or number))
                        if part > first_part or number >= first_piece:
                            yield (part, number), text, separated
                        begins = False
                        number += 1
                yield None

        encoded = encode.encode_in_order(pieces(), self.tokenizer, self.kind, self.bpe_folder, self.processes)
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
