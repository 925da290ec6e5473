#!/usr/bin/env python3
"""Tokens of your own text: files, .jsonl files with a text in each line, or `-` for standard input.

    python data/text.py book.txt letters.txt --out data/mine
    python data/text.py notes.jsonl --field body --val-fraction 0.05
    zcat *.gz | python data/text.py - --out data/mine

Each text file is a document. In a .jsonl file, each line is one. The last tenth of all bytes, or --val-fraction, is for
validation. With --limit-tokens N, the script reads only the beginning of standard input, about 16 bytes for each
token. At most a tenth of the N tokens are then for validation.
"""

import argparse
import codecs
import fractions
import math
import os
import pathlib
import re
import sys

import common
import documents
from shards import checksum
from terminal import fail, say


def add_options(parser):
    parser.add_argument("files", nargs="+", metavar="FILE", help="text or *.jsonl file, or - for standard input")
    parser.add_argument("--field", default="text", metavar="NAME", help="read the text from this field of the objects in .jsonl files (default: text)")
    parser.add_argument("--val-fraction", type=fraction, default=fractions.Fraction(1, 10), metavar="X",
                        help="keep this fraction of the text, at its end, for validation (default: 0.1; 0: none)")


def fraction(text):
    value = fractions.Fraction(text) if re.fullmatch(r"\d*\.?\d+", text) else fractions.Fraction(-1)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a fraction from 0 to less than 1")
    return value


def name(arguments):
    first = arguments.files[0]
    return "stdin" if first == "-" else pathlib.Path(first).stem


def bytes_of_limit(arguments):
    """The bytes that hold as many tokens as requested, in the part that is not for validation; infinite without a
    limit."""
    if arguments.limit_tokens is None:
        return math.inf
    each = 1 if arguments.tokenizer == "bytes" else common.BYTES_OF_TOKEN
    return math.ceil(arguments.limit_tokens * each / (1 - arguments.val_fraction))


def require_files(arguments):
    """Ends the script if a file cannot be read."""
    if arguments.files.count("-") > 1:
        fail("standard input (-) is given twice, but can be read only once")
    for file in arguments.files:
        if file != "-":
            require_text(pathlib.Path(file))


def require_text(path):
    if path.exists() and not (path.is_file() or path.is_dir()):  # (opening such a file would begin to read it)
        fail(f"{path} can be read only once, but files are read several times; give - and pipe it into standard input")
    try:
        with open(path, "rb") as file:
            begin = file.read(1 << 16)
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    if b"\0" in begin:
        fail(f"{path} has NUL bytes, so it is not UTF-8 text; unpack it (zcat, with - as the file) or convert it (iconv -t UTF-8)")
    if begin.startswith(codecs.BOM_UTF8):
        say(f"note: {path} begins with a UTF-8 byte order mark, which is skipped")


def keep_standard_input(folder, room):
    """Stores standard input, at most `room` bytes, because it is read several times and may never end."""
    folder.mkdir(parents=True, exist_ok=True)
    path, temporary = folder / "stdin.txt", folder / ".stdin.txt.tmp"
    try:
        with open(temporary, "wb") as file:
            while room and (block := sys.stdin.buffer.read(min(room, 1 << 20))):
                file.write(block)
                room -= len(block)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    require_text(path)
    return path


def plan(arguments, downloader):
    paths = [keep_standard_input(arguments.out / "download", bytes_of_limit(arguments)) if file == "-" else pathlib.Path(file)
             for file in arguments.files]
    inputs = [{"file": str(path), "sha256": checksum(path)} for path in paths]

    def read():
        for path in paths:
            if path.suffix.lower() == ".jsonl":
                yield from documents.json_line_texts(path, arguments.field)
            else:
                yield documents.file_bytes(path)

    streams = common.split_streams(read, lambda: inputs, arguments.val_fraction)
    # The checksums identify these files, wherever they are.
    source = ", ".join(path.name for path in map(pathlib.Path, arguments.files))
    settings = {"source": source, "inputs": [entry["sha256"] for entry in inputs], "field": arguments.field, "val_fraction": str(arguments.val_fraction)}
    return common.Plan(", ".join(arguments.files), streams, settings)


if __name__ == "__main__":
    common.main(__doc__, name, plan, add_options, require_files)
