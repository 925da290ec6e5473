"""Converts text to tokens, in several processes. Not run by itself: the dataset scripts use it.

Text is handled as bytes. Long documents are cut into pieces at places that no GPT-2 token crosses. The tokens are
therefore those of the whole document, and they do not depend on the number of processes.
"""

import collections
import contextlib
import concurrent.futures
import concurrent.futures.process
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import signal
import subprocess
import threading

import numpy as np

import bpe_files
from bpe_files import END_OF_TEXT, characters_of_bytes
from download import RemoteFile
from modules import ROOT, why_not
from shards import checksum
from terminal import fail, say

BPE_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
# GPT-2's split of text into words, before bytes are merged.
WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

END_SIGNALS = {signal.SIGINT, signal.SIGTERM}

PIECE = 1 << 20  # bytes of a piece; longer documents are cut
BATCH = 1 << 20  # bytes of one task of a process
# White space after a visible character always begins a word.
BETWEEN_WORDS = re.compile(rb"[!-~](?=[ \n])")


def cut(document):
    """The pieces of a document (bytes or a view of them), as bytes."""
    begin = 0
    while begin < len(document):
        found = BETWEEN_WORDS.search(document, begin + PIECE) if begin + PIECE < len(document) else None
        end = found.end() if found else len(document)
        yield bytes(document[begin:end])
        begin = end


class ByteTokenizer:
    """Each byte is a token. Documents are separated by a new line, and the first has none before it, so the tokens of
    a single document are its bytes."""

    name, vocabulary, separator, separates_first = "bytes", 256, 10, False

    def encode(self, text):
        return np.frombuffer(text, dtype=np.uint8)


class TiktokenTokenizer:
    """GPT-2's tokens by tiktoken, from local files only: tiktoken's own loaders may use the network or a cache."""

    name, vocabulary, separator, separates_first = "gpt2", 50257, END_OF_TEXT, True

    def __init__(self, folder):
        import tiktoken
        ids = json.loads(pathlib.Path(folder, "encoder.json").read_bytes())
        byte_of = {char: byte for byte, char in enumerate(characters_of_bytes())}
        ranks = {bytes(map(byte_of.get, token)): rank for token, rank in ids.items() if rank != END_OF_TEXT}
        self.encoding = tiktoken.Encoding("gpt2", pat_str=WORDS, mergeable_ranks=ranks,
                                          special_tokens={"<|endoftext|>": END_OF_TEXT}, explicit_n_vocab=self.vocabulary)

    def encode(self, text):
        text = text.decode(errors="replace")
        # Check here, because tiktoken would print a stack trace first.
        if has_spaces(text, 999_999):
            self.refuse()
        try:
            return np.array(self.encoding.encode_ordinary(text), dtype=np.uint16)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # its own exception, whose class cannot be named
                raise
            self.refuse()

    def refuse(self):
        fail("tiktoken cannot encode a document with a million white spaces in a row; use --encoder native")


def has_spaces(text, count):
    """Whether the text has `count` white spaces in a row. Such a run contains one of the indices
    count - 1, 2 count - 1, 3 count - 1 ..."""
    for place in range(count - 1, len(text), count):
        before, behind = text[place + 1 - count:place], text[place:place + count]
        if len(before) - len(before.rstrip()) + len(behind) - len(behind.lstrip()) >= count:
            return True
    return False


class NativeTokenizer:
    """GPT-2's tokens by the project's own encoder (llmc/data/bpe_c.h)."""

    name, vocabulary, separator, separates_first = "gpt2", 50257, END_OF_TEXT, True

    def __init__(self, folder):
        self.library = ctypes.CDLL(str(native_library()))
        self.library.gpt2_bpe_open.restype = ctypes.c_void_p
        self.library.gpt2_bpe_open.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
        self.library.gpt2_bpe_encode.restype = ctypes.c_int64
        self.library.gpt2_bpe_encode.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p,
                                                 ctypes.c_size_t]
        error = ctypes.create_string_buffer(1024)
        self.encoder = self.library.gpt2_bpe_open(os.fsencode(folder), error, len(error))
        if not self.encoder:
            fail(error.value.decode(errors="replace"))

    def encode(self, text):
        ids = np.empty(len(text), dtype=np.int32)
        count = self.library.gpt2_bpe_encode(self.encoder, text, len(text), ids.ctypes.data, len(ids))
        if count < 0:
            raise MemoryError
        return ids[:count].astype(np.uint16)


def native_library():
    return ROOT / "build" / "libgpt2_bpe.so"


def build_native_library():
    """Builds the library if it is missing, with the default settings even within another make."""
    if native_library().exists():
        return
    say("building the project's own encoder: make tokenizer")
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "SANITIZE")}
    try:
        built = subprocess.run(["make", "-s", "tokenizer", "BUILD=build"], cwd=ROOT, env=environment, capture_output=True, text=True)
        complaint = (built.stderr or built.stdout).strip().splitlines()[-1:] if built.returncode else []
    except OSError as error:
        complaint = [error.strerror]
    if complaint or not native_library().exists():
        fail(f"`make tokenizer` cannot build the project's own encoder, which is used without tiktoken (`make deps`): "
             f"{(complaint or ['it built nothing'])[0]}")


def prepare_gpt2(folder, downloader, encoder):
    """Ensures that GPT-2's vocabulary is in the folder and that an encoder is available. Returns the kind of
    tokenizer for open_tokenizer."""
    if downloader and not downloader.mirror:
        bpe_files.make(folder)  # if that fails, the server of OpenAI has them
    for name, sha256 in bpe_files.FILES.items():
        path = folder / name
        if downloader:
            downloader.fetch(RemoteFile(f"{BPE_URL}/{name}", name, sha256), folder)
        elif not path.is_file():
            fail(f"--bpe-dir {folder} has no {name}; leave the option out to download GPT-2's")
        elif checksum(path) != sha256:
            fail(f"{path} is not GPT-2's (its sha256 should be {sha256}); leave --bpe-dir out to download GPT-2's")
    trouble = why_not("tiktoken") if encoder != "native" else ""
    if encoder == "tiktoken" and trouble:
        fail(f"--encoder tiktoken: tiktoken {trouble}; or leave the option out")
    if encoder != "native" and not trouble:
        return "tiktoken"
    build_native_library()
    return "native"


def open_tokenizer(kind, folder):
    """Opens a tokenizer; `kind` is bytes, tiktoken or native."""
    return {"bytes": lambda: ByteTokenizer(), "tiktoken": lambda: TiktokenTokenizer(folder),
            "native": lambda: NativeTokenizer(folder)}[kind]()


class Worker:
    """The state of a tokenizing process."""

    tokenizer = None

    @classmethod
    def begin(cls, kind, folder):
        for number in END_SIGNALS:  # often sent to all processes of a job; the parent process ends the work
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)
        threading.Thread(target=cls.end_with_parent, daemon=True).start()
        cls.tokenizer = open_tokenizer(kind, folder)

    @staticmethod
    def end_with_parent():
        """Ends this process when its parent ends, because a parent that is killed does not tell it."""
        multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    @classmethod
    def encode(cls, texts):
        return encode_pieces(cls.tokenizer, texts)


def encode_pieces(tokenizer, pieces):
    """The tokens of each piece (text, separated), as uint16 arrays. With `separated`, they begin with the separator."""
    encoded = []
    for text, separated in pieces:
        tokens = tokenizer.encode(text)
        out = np.empty(len(tokens) + separated, dtype=np.uint16)
        out[:separated] = tokenizer.separator
        out[separated:] = tokens
        encoded.append(out)
    return encoded


def batches_of(pieces):
    """Yields (batch, whether a part of the source ends with it). A batch is a list of (position, text, separated) of about BATCH bytes."""
    batch, size = [], 0
    for piece in pieces:
        if piece is not None:
            batch.append(piece)
            size += len(piece[1]) + 64  # short documents have a cost too
        if piece is None or size >= BATCH:
            yield batch, piece is None
            batch, size = [], 0


@contextlib.contextmanager
def ending_later():
    """Delays Ctrl-C and SIGTERM until the block ends. Processes started in the block have them blocked until
    Worker.begin."""
    came = []
    handlers = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in END_SIGNALS}
    # Blocks them for the new processes. In this process other threads may still receive a signal, so it has handlers.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in came[:1]:
            signal.raise_signal(number)


def encode_in_order(pieces, tokenizer, kind, folder, processes):
    """Takes (position, text, separated), and None at the end of each part of the source. Yields (position, tokens) in
    the same order, computed by `processes` processes. A few batches are read ahead, but none beyond the end of a
    part: opening the next part may need a download that turns out to be unnecessary."""
    pool, waiting = None, collections.deque()

    def first_done():
        batch, future = waiting.popleft()
        return zip((piece[0] for piece in batch), future.result())

    try:
        for batch, ends in batches_of(pieces):
            if processes == 1 or (pool is None and ends and not waiting):  # too little for several processes
                yield from zip((piece[0] for piece in batch), encode_pieces(tokenizer, [piece[1:] for piece in batch]))
                continue
            # Spawned, not forked, so that they inherit no connections and files of the parent. The pool is made outside
            # ending_later(), because Python may start a helper process for it and then unblocks Ctrl-C.
            pool = pool or concurrent.futures.ProcessPoolExecutor(
                processes, multiprocessing.get_context("spawn"), Worker.begin, (kind, folder))
            with ending_later():
                waiting.append((batch, pool.submit(Worker.encode, [piece[1:] for piece in batch])))
            while waiting and (ends or len(waiting) > 2 * processes):
                yield from first_done()
    except concurrent.futures.process.BrokenProcessPool:
        fail("a tokenizing process was killed, perhaps because memory ran out; fewer --processes need less, and the same "
             "command continues from here")
    finally:
        if pool:
            pool.shutdown(cancel_futures=True)
