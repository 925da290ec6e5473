"""Token shards and their manifest. Not run by itself: the dataset scripts use it.

A shard is a file in the common .bin format. The header is 256 int32: 20240520, 1 for tokens of uint16 or 20240801, 7
for uint32, the number of tokens, the low and the high half of the tokenizer's checksum, then zeros. Then come the
tokens. A shard of rows has 20240801, 8, the same, and the number of rows; two bits of its uint32 tokens say what each is
(COUNTED, ROW). All is little-endian. A shard appears under its name only when it is whole. The manifest then has its
checksum, and the position in the source at which the next shard begins.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re

import numpy as np

from terminal import fail, naming, progress

HEADER_NUMBERS = 256
FORMATS = {2: (20240520, 1), 4: (20240801, 7)}  # bytes of a token: the first two numbers of the header
ROWS_FORMAT = (20240801, 8)
COUNTED, ROW = 1 << 31, 1 << 30  # the loss counts this token, as a target; a row begins with this token
LARGEST_SHARD = 2**31 - 1  # tokens; the header has their number as an int32
SHARD_NAME = re.compile(r"(train|val)_\d{6}\.bin")
MANIFEST = "manifest.json"


def sync_folder(folder):
    """Makes the names of files in a folder durable, so that they survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path):
    """The sha256 of a file, in hexadecimal digits."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            sha256.update(block)
    return sha256.hexdigest()


def write_whole(path, data):
    """Writes a file atomically: the file is either the new one, complete, or unchanged."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with naming(path), open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def header(dtype, tokens, tokenizer, rows):
    """The header of a shard; `tokenizer` is the checksum of the tokenizer, or 0, and `rows` None if there are none."""
    numbers = np.zeros(HEADER_NUMBERS, dtype="<u4")
    kind = FORMATS[np.dtype(dtype).itemsize] if rows is None else ROWS_FORMAT
    numbers[:6] = *kind, tokens, tokenizer & 0xFFFFFFFF, tokenizer >> 32, rows or 0
    return numbers.tobytes()


class ShardWriter:
    """A context that writes one shard of up to `capacity` tokens of uint16 or uint32. `tokenizer` is the checksum of
    their tokenizer, or 0. With `rows`, each call of append() is a row. The shard becomes visible only in finish()."""

    def __init__(self, path, capacity, dtype=np.uint16, tokenizer=0, rows=False):
        self.path, self.capacity, self.dtype, self.tokenizer, self.tokens = path, capacity, dtype, tokenizer, 0
        self.rows = 0 if rows else None
        self.temporary = path.with_name(f".{path.name}.tmp")

    def __enter__(self):
        self.file = open(self.temporary, "wb")
        self.file.write(self.header())
        return self

    def __exit__(self, *trouble):
        # Closing writes buffered data, which a full disk refuses again.
        with contextlib.suppress(OSError):
            self.file.close()
        self.temporary.unlink(missing_ok=True)

    def header(self):
        return header(self.dtype, self.tokens, self.tokenizer, self.rows)

    @property
    def room(self):
        return self.capacity - self.tokens

    def append(self, tokens):
        """Appends tokens, at most as many as there is room for. Wider ones than the shard's would be cut."""
        assert len(tokens) <= self.room and np.can_cast(tokens.dtype, self.dtype)
        with naming(self.path):
            self.file.write(tokens.astype(np.dtype(self.dtype).newbyteorder("<"), copy=False).tobytes())
        self.tokens += len(tokens)
        if self.rows is not None:
            self.rows += 1

    def finish(self):
        """Makes the shard visible; returns its entry in the manifest."""
        with naming(self.path):
            self.file.seek(0)
            self.file.write(self.header())
            self.file.flush()
            os.fsync(self.file.fileno())
        sha256 = checksum(self.temporary)
        os.replace(self.temporary, self.path)
        sync_folder(self.path.parent)
        rows = {} if self.rows is None else {"rows": self.rows}
        return {"file": self.path.name, "tokens": self.tokens, **rows, "sha256": sha256}


def is_whole(path, entry):
    """Whether a shard exists and matches the manifest."""
    try:
        return checksum(path) == entry["sha256"]
    except FileNotFoundError:
        return False


def keep_whole_shards(folder, manifest):
    """Keeps in the manifest, for each stream, the shards before the first that is missing or damaged. Returns the
    names of those first ones."""
    kept, broken = [], {}
    with progress("checking", " shards", len(manifest["shards"])) as bar:
        for entry in manifest["shards"]:
            if entry["stream"] not in broken and not is_whole(folder / entry["file"], entry):
                broken[entry["stream"]] = entry["file"]
            if entry["stream"] not in broken:
                kept.append(entry)
            bar.update()
    manifest["shards"] = kept
    manifest["complete"] = [stream for stream in manifest["complete"] if stream not in broken]
    manifest["finished"] = manifest["finished"] and not broken
    return list(broken.values())


@contextlib.contextmanager
def locked(folder):
    """Keeps other runs from writing into the folder while the block runs. Creates the folder if it is missing, and
    removes it again if nothing was written."""
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "w")
    except OSError as error:
        fail(f"--out {folder}: cannot write into this folder ({error.strerror}); give another one")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"another run is writing into {folder}; wait for it, or give another --out")
        try:
            yield
        finally:
            if made and os.listdir(folder) == [".lock"]:
                os.unlink(folder / ".lock")
                with contextlib.suppress(OSError):  # another file may be there
                    for path in made:
                        path.rmdir()


def in_utf8(value):
    """The value of a manifest, with text in valid UTF-8: a byte of a name that is not UTF-8 becomes \\xe9, in four
    characters. Python has half of a surrogate pair for it, which readers of JSON refuse."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    if isinstance(value, dict):
        return {in_utf8(key): in_utf8(entry) for key, entry in value.items()}
    return [in_utf8(entry) for entry in value] if isinstance(value, list) else value


def read_manifest(folder):
    """The manifest of a folder, or None."""
    path = folder / MANIFEST
    try:
        manifest = in_utf8(json.loads(path.read_bytes()))  # (earlier versions wrote such halves)
        sound = {"settings", "finished", "files", "complete"} <= manifest.keys() and all(
            SHARD_NAME.fullmatch(entry["file"]) and {"stream", "tokens", "sha256", "next"} <= entry.keys()
            for entry in manifest["shards"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        fail(f"{path} is damaged; give --overwrite to make all shards again")
    return manifest


def write_manifest(folder, manifest):
    write_whole(folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def shards_in(folder):
    """The files of a folder with the names of shards, and those that a killed run left unfinished."""
    return sorted(path for path in folder.iterdir()
                  if SHARD_NAME.fullmatch(path.name) or re.fullmatch(rf"\.{SHARD_NAME.pattern}\.tmp", path.name))
