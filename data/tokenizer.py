"""The tokenizers of the dataset scripts: bytes, GPT-2's, or that of a model's folder. Not run by itself.

PyPI's `tokenizers` computes all tokens that are not bytes. A folder has tokenizer.json, or GPT-2's encoder.json and
vocab.bpe, from which the same is made here.
"""

import functools
import hashlib
import json
import math
import os
import pathlib

import numpy as np

import bpe_files
import tokenizer_checksum
from cuts import Cuts
from model_folder import read_json, refuse_token, token_ids
from modules import why_not
from terminal import fail, reason

# Processes share the work, not threads.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

END_OF_TEXT = "<|endoftext|>"
PIECE = 1 << 14  # bytes of a piece; longer documents are cut
LARGEST_PIECE = 1 << 23  # of 10 million characters the library gives up to find the end of a word


class Tokenizer:
    """What the tokenizers have in common. A piece is (text, ids before it, ids behind it)."""

    def encode_pieces(self, pieces):
        encoded = self.encode([text for text, _, _ in pieces])
        return [np.concatenate([np.asarray(part, self.dtype) for part in (before, tokens, behind)])
                for (_, before, behind), tokens in zip(pieces, encoded)]


class ByteTokenizer(Tokenizer):
    """Each byte is a token. Documents are separated by a new line, and the first has none before it, so the tokens of
    a single document are its bytes."""

    name, vocabulary, begin, end, checksum, dtype = "bytes", 256, [], [], 0, np.uint16

    def encode(self, texts):
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def around(self, begins, ends, is_first):
        """The tokens before and behind a piece of a document, which may begin or end it, or be the first of all."""
        return [ord("\n")] * (begins and not is_first), []

    def cut(self, document, position):
        return min(position, len(document))


class BpeTokenizer(Tokenizer):
    """Byte-level BPE: `parts` is the dictionary of a tokenizer.json. The names of special tokens within a text are
    text. `begin` and `end` are the ids before and behind each document."""

    def __init__(self, name, parts, end):
        self.name, self.parts, self.begin, self.end = name, parts, tokenizer_checksum.begin_tokens(parts), end
        self.vocabulary = 1 + max(numbers_of(parts))
        self.dtype = np.uint16 if self.vocabulary <= 1 << 16 else np.uint32
        self.library = self.of_special_tokens()
        self.library.encode_special_tokens = True
        # The names of special tokens are text, in which no other added token is found.
        found_in_text = added_of(parts) if any(not added.get("special") for added in added_of(parts)) else []
        self.cuts = Cuts(tokenizer_checksum.steps(parts), found_in_text, tokenizer_checksum.normalizes(parts))

    def special(self):
        """The texts of the special tokens."""
        return [added["content"] for added in added_of(self.parts) if added.get("special")]

    def longest(self):
        """The most bytes of a text that one token can stand for."""
        if any(added.get("lstrip") or added.get("rstrip") for added in added_of(self.parts)):
            return math.inf  # it takes all spaces around it
        return max(map(len, [*self.parts["model"]["vocab"], *(added["content"] for added in added_of(self.parts))]))

    def of_special_tokens(self):
        """The library's tokenizer, which finds special tokens in a text."""
        import tokenizers
        # The post-processor would also change what encodings say of places in the text.
        library = tokenizers.Tokenizer.from_str(json.dumps({**self.parts, "post_processor": None}))
        library.no_truncation()
        library.no_padding()
        return library

    def __reduce__(self):
        return BpeTokenizer, (self.name, self.parts, self.end)

    @functools.cached_property
    def checksum(self):
        return tokenizer_checksum.checksum(self.parts)

    def encode(self, texts):
        try:
            encoded = self.library.encode_batch_fast([text.decode(errors="replace") for text in texts],
                                                     add_special_tokens=False)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's own exception, whose class cannot be named
                raise
            fail(f"the tokenizer {self.name} cannot encode a document ({reason(error)}); leave that document out")
        return [np.array(each.ids, dtype=self.dtype) for each in encoded]

    def around(self, begins, ends, is_first):
        return self.begin * begins, self.end * ends

    def cut(self, document, position):
        return self.cuts.first(document, position)


def cut(document, tokenizer):
    """The pieces of a document (bytes or a view of them), as bytes. Their tokens are those of the whole."""
    begin = 0
    while begin < len(document):
        end = tokenizer.cut(document, begin + PIECE) if begin + PIECE < len(document) else len(document)
        if end - begin > LARGEST_PIECE:
            fail(f"a document has {end - begin:,} bytes in a row in which the tokenizer's words may have no end; put "
                 "spaces between its words, or use another tokenizer")
        yield bytes(document[begin:end])
        begin = end


def open_tokenizer(source):
    """The tokenizer of the option --tokenizer: gpt2, bytes or a folder. Ends the script if that cannot be had."""
    if source == "bytes":
        return ByteTokenizer()
    require_library(source)
    if source == "gpt2":
        if why := bpe_files.make():
            fail(f"GPT-2's BPE files cannot be made: {why}; give a folder that has them with --tokenizer DIR")
        return read_folder(bpe_files.FOLDER)
    return read_folder(pathlib.Path(source))


def require_library(source):
    """Ends the script if the library is not there."""
    if trouble := why_not("tokenizers"):
        fail(f"--tokenizer {source} needs the Python module tokenizers, which {trouble}")


def read_folder(folder):
    """The tokenizer of a folder."""
    path = folder / "tokenizer.json"
    if path.is_file():
        name, parts = folder.resolve().name, read_json(path, {})
    elif all((folder / file).is_file() for file in bpe_files.FILES):
        path, name, parts = folder / "encoder.json", "gpt2", gpt2_parts(folder)
    else:
        fail(f"--tokenizer {folder}: the folder has no tokenizer.json, and not both of encoder.json and vocab.bpe; give "
             "gpt2, bytes, or a model's folder")
    try:
        check(parts)
        tokenizer = BpeTokenizer(name, parts, [end_token(folder, parts)])
    except Unsupported as error:
        fail(f"{path} has {error}, but the trainer knows byte-level BPE alone; give another tokenizer")
    except Exception as error:  # the library has no class for its own
        fail(f"{path} is damaged ({reason(error)}); get it again")
    of_model = read_json(folder / "config.json", {}).get("vocab_size")
    if isinstance(of_model, int) and of_model < tokenizer.vocabulary:
        fail(f"{path} has {tokenizer.vocabulary:,} tokens, but the model's vocabulary in {folder / 'config.json'} is {of_model:,}; give the "
             "model's own tokenizer")
    return tokenizer


class Unsupported(ValueError):
    """A tokenizer of another kind."""


def check(parts):
    """Raises Unsupported if this is no byte-level BPE."""
    model = parts["model"]
    if model.get("type", "BPE") != "BPE":
        raise Unsupported(f"a model of type {model['type']}")
    if len(set(model["vocab"].values())) < len(model["vocab"]):
        raise ValueError("two tokens have one id")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise Unsupported(f"a BPE with {name}")
    try:
        tokenizer_checksum.normalizes(parts)
        tokenizer_checksum.steps(parts)
    except ValueError as error:
        raise Unsupported(str(error)) from None
    if not any(part["type"] == "ByteLevel" for part in tokenizer_checksum.pre_tokenizers(parts)):
        raise Unsupported("no pre-tokenizer of type ByteLevel")


def added_of(parts):
    return parts.get("added_tokens") or []


def numbers_of(parts):
    return [*parts["model"]["vocab"].values(), *(added["id"] for added in added_of(parts))]


def end_token(folder, parts):
    """The id of the token behind each document: that at which generation ends, the first if there are several."""
    ids = {**parts["model"]["vocab"], **{added["content"]: added["id"] for added in added_of(parts)}}
    for found in token_ids(folder, "eos_token_id")[:1]:
        return found if found in numbers_of(parts) else refuse_token(folder, found)
    text = read_json(folder / "tokenizer_config.json", {}).get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    if text is not None and text not in ids:
        fail(f"{folder / 'tokenizer_config.json'}: eos_token is {text}, which is no token of the tokenizer; correct it")
    if text is None and END_OF_TEXT not in ids:
        fail(f"{folder} names no end token, which stands behind each document; write {{\"eos_token_id\": ID}} into its "
             "generation_config.json")
    return ids[text or END_OF_TEXT]


def gpt2_parts(folder):
    """What GPT-2's tokenizer.json says, from its two files."""
    contents = {name: (folder / name).read_bytes() for name in bpe_files.FILES}
    for name, sha256 in bpe_files.FILES.items():
        if hashlib.sha256(contents[name]).hexdigest() != sha256:
            fail(f"{folder / name} is not GPT-2's (its sha256 should be {sha256}); --tokenizer gpt2 makes GPT-2's")
    vocabulary = json.loads(contents["encoder.json"])
    merges = [line.split(" ") for line in contents["vocab.bpe"].decode().splitlines()[1:]]
    return byte_level(vocabulary, merges, {END_OF_TEXT: bpe_files.END_OF_TEXT})


def byte_level(vocabulary, merges, special):
    """A tokenizer.json with GPT-2's rules for words."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": number, "content": text, **flags, "special": True} for text, number in special.items()],
        "normalizer": None, "pre_tokenizer": words, "post_processor": None, "decoder": words,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}
