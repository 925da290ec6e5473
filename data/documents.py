"""Reads documents from files. Not run by itself: the dataset scripts use it.

Documents are bytes, or views of a file's bytes. Text is UTF-8; invalid bytes are kept here.
"""

import codecs
import json
import mmap

from modules import why_not
from terminal import fail

END_OF_TEXT = b"<|endoftext|>"  # as text files write it between documents


def to_bytes(text):
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON allows and UTF-8 does not
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def file_bytes(path):
    """The whole file as one view, without reading it at once; without a byte order mark."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    return view[len(codecs.BOM_UTF8):] if view[:len(codecs.BOM_UTF8)] == codecs.BOM_UTF8 else view


def separated_texts(path):
    """The documents of a text file that has <|endoftext|> between them, without surrounding white space."""
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            *texts, rest = (rest + block).split(END_OF_TEXT)
            yield from filter(None, map(bytes.strip, texts))
    if last := rest.strip():
        yield last


def json_line_texts(path, field):
    """The texts in one field of each line's object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):  # RecursionError: nested too deeply
                fail(f"{path}, line {number}: not JSON; a .jsonl file has one object per line")
            if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
                if isinstance(entry, dict) and field in entry:
                    fail(f"{path}, line {number}: the field '{field}' is not text but {json.dumps(entry[field])[:40]}")
                fields = ", ".join(sorted(entry)) if isinstance(entry, dict) else "none, it is not an object"
                fail(f"{path}, line {number}: no text in the field '{field}' (its fields: {fields}); name the text's field with --field")
            yield to_bytes(entry[field])


def parquet_texts(path):
    """The texts in the column `text` of a parquet file."""
    import pyarrow
    import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024, columns=["text"]):
                for text in batch.column(0).to_pylist():
                    yield to_bytes(text or "")
    except (pyarrow.ArrowException, KeyError, IndexError) as error:
        fail(f"{path} is not a parquet file with a column `text` ({error}); remove it to download it again")


def require_parquet(arguments):
    """Fails before any download if parquet files cannot be read."""
    if trouble := why_not("pyarrow"):
        fail(f"this dataset is in parquet files and needs the Python module pyarrow, which {trouble}")


def boundary(document, position):
    """The first position from `position` on at which a UTF-8 character begins or the document ends. A position outside the
    document, or in bytes that are not UTF-8, stays."""
    if not 0 < position < len(document):
        return position
    # A character has at most three bytes after its first.
    for place in range(position, position + 4):
        if place == len(document) or document[place] & 0xC0 != 0x80:
            return place
    return position


def before(documents, place):
    """The documents before a position in their concatenation, as (bytes of a document, whether they include its
    beginning, whether they include its end)."""
    for document in documents:
        if place <= 0:
            return
        end = boundary(document, min(place, len(document)))
        yield memoryview(document)[:end], True, end == len(document)
        place -= len(document)


def after(documents, place):
    """The documents from a position in their concatenation on, in the same form."""
    for document in documents:
        begin = boundary(document, max(place, 0))
        if begin < len(document):
            yield memoryview(document)[begin:], begin == 0, True
        place -= len(document)
