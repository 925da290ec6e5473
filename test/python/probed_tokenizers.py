"""The program's tokenizer, by its probe (test/probe/tokens_probe.cpp), and texts on which it is compared with PyPI's
`tokenizers`."""

import pathlib
import struct
import subprocess

import numpy as np

import bpe_corpus
import program

PROBE = pathlib.Path(program.ROOT / program.BUILD / "test/probe/tokens_probe")


class Refused(Exception):
    """The one line with which the program refuses a tokenizer."""


def probed(folder, stdin):
    done = subprocess.run([PROBE, folder], input=stdin, capture_output=True)
    if done.returncode:
        raise Refused(done.stderr.decode().removeprefix("error: ").removesuffix("\n"))
    return done.stdout


def checksum(folder):
    return int(probed(folder, b""), 16)


def encoded(folder, texts):
    """The (ids, bytes that they decode to) of each (text, whether special tokens count)."""
    stdin = b"".join((b"s" if special else b"o") + struct.pack("<I", len(text)) + text for text, special in texts)
    out, place, results = probed(folder, stdin), 0, []
    for _ in texts:
        parts = []
        for size, dtype in ((4, "<i4"), (1, "u1")):
            count, = struct.unpack_from("<I", out, place)
            parts.append(np.frombuffer(out, dtype, count, place + 4))
            place += 4 + size * count
        results.append((parts[0].tolist(), parts[1].tobytes()))
    assert place == len(out)
    return results


def texts(tokens, count, seed):
    """`count` texts of all kinds, drawn with a seed, as bytes: those of bpe_corpus.py, and mixtures with tokens of the
    tokenizer, marks that NFC composes or reorders, and single code points of all planes."""
    random = bpe_corpus.Random(f"texts {seed}")
    pieces = [*bpe_corpus.WORDS, *bpe_corpus.MARKS, *bpe_corpus.CODE, *bpe_corpus.SPACES, "e\u0301", "\u0323\u0307", "\u1100\u1161\u11a8",
              "\u0344", "\u2126", "\u1e9b\u0323", "\U00011935\U00011930", "'ſ", "'S", "123456789"]

    def piece():
        kind = random.below(4)
        if kind == 0 and tokens:
            return random.choice(tokens)
        if kind == 1:
            first, end = random.choice(bpe_corpus.BLOCKS)
            return chr(first + random.below(end - first))
        return random.choice(pieces)

    makers = [*bpe_corpus.GROUPS.values(), *[lambda random, length: "".join(piece() for _ in range(length // 4)).encode()] * 3]
    return [random.choice(makers)(random, 1 + random.below(200)) for _ in range(count)]


def compare(folder, count, seed, more=()):
    """Compares ids and texts of `count` drawn texts, and of `more`, with those of PyPI's `tokenizers`."""
    from tokenizers import Tokenizer

    reference = Tokenizer.from_file(str(pathlib.Path(folder) / "tokenizer.json"))
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    cases = [(text, number % 2 == 0) for number, text in enumerate([*more, *texts(added, count, seed)])]
    for (text, special), (ids, back) in zip(cases, encoded(folder, cases)):
        reference.encode_special_tokens = not special
        expected = reference.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        assert ids == expected, (text, special)
        assert back.decode(errors="replace") == reference.decode(ids, skip_special_tokens=False), text
