"""What documents a file holds. Not run by itself: the scripts of the datasets use it.

Documents are bytes, or views of a file's bytes; text is UTF-8, and bytes that are none stay as they are here.
"""

import json
import mmap

from modules import why_not
from terminal import fail

END_OF_TEXT = b"<|endoftext|>"  # as text files write it between documents


def to_bytes(text):
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates, which JSON can hold and UTF-8 cannot
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def file_bytes(path):
    """The whole file as one view, without reading it at once."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)) if size else memoryview(b"")


def separated_texts(path):
    """The documents of a text file that has <|endoftext|> between them, without the white space around each."""
    rest = b""
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            *texts, rest = (rest + block).split(END_OF_TEXT)
            yield from filter(None, map(bytes.strip, texts))
    if last := rest.strip():
        yield last


def json_line_texts(path, field):
    """The texts in a field of each line's object."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):  # the latter of what is nested too deeply
                fail(f"{path}, line {number}: not JSON; a .jsonl file has one object a line")
            if not isinstance(entry, dict) or not isinstance(entry.get(field), str):
                if isinstance(entry, dict) and field in entry:
                    fail(f"{path}, line {number}: the field '{field}' holds no text but {json.dumps(entry[field])[:40]}")
                fields = ", ".join(sorted(entry)) if isinstance(entry, dict) else "none, it is no object"
                fail(f"{path}, line {number}: no text in the field '{field}' (its fields: {fields}); --field says which it is")
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
        fail(f"{path} is no parquet file with a column `text` ({error}); remove it to have it downloaded again")


def require_parquet(arguments):
    """Says before any download that parquet files could not be read."""
    if trouble := why_not("pyarrow"):
        fail(f"this dataset comes as parquet files, which the Python module pyarrow reads, and that {trouble}")


def boundary(document, position):
    """The first place from `position` on where a character of UTF-8 begins."""
    for place in range(position, min(position + 4, len(document))):
        if document[place] & 0xC0 != 0x80:
            return place
    return position


def before(documents, place):
    """The documents up to a place in all of them in a row, as (document, whether it begins here)."""
    for document in documents:
        if place <= 0:
            return
        yield memoryview(document)[:boundary(document, place)], True
        place -= len(document)


def after(documents, place):
    """The documents from a place on, as (document, whether it begins here)."""
    for document in documents:
        begin = boundary(document, max(place, 0)) if place < len(document) else len(document)
        if begin < len(document):
            yield memoryview(document)[begin:], begin == 0
        place -= len(document)
