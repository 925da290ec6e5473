"""Reads and writes folders in Hugging Face's format, a tensor at a time. Not run by itself: from_gguf.py and
to_gguf.py use it.

A folder has config.json, other files in JSON, and its weights: model.safetensors, or else several files with an index.
A safetensors file is 8 bytes with the size of a header, the header in JSON, and the tensors' bytes.
"""

import contextlib
import itertools
import json
import math
import os
import shutil

import numpy as np

from shards import sync_folder
from terminal import fail, naming

LARGEST_FILE = 5_000_000_000  # bytes of weights in a file
ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
AGAIN = "get the folder again"


def fail_if_there(out):
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        fail(f"--out {out} is there already; give another name, or remove it")


@contextlib.contextmanager
def partial(out):
    """A context with a path beside `out`. What is made there gets the name `out` at the end, and is removed if the
    block fails."""
    fail_if_there(out)
    path = out.with_name(f".{out.name}.part")

    def remove():
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    remove()
    try:
        with naming(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            yield path
            sync_folder(path)  # (or a file)
            os.replace(path, out)
            sync_folder(out.parent)
    finally:
        remove()


# ---- Writing

def write(path, blocks):
    with open(path, "wb") as file:
        file.writelines(blocks)
        file.flush()
        os.fsync(file.fileno())


def write_json(path, value):
    write(path, [(json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()])


def write_weights(folder, shapes, read):
    """Writes weights in fp32: {name: shape}, and read(name) is the array."""
    files = divided(shapes)
    for file, names in files.items():
        ends = list(itertools.accumulate(bytes_of(shapes[name]) for name in names))
        header = {"__metadata__": {"format": "pt"}}
        for name, begin, end in zip(names, [0, *ends], ends):
            header[name] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        arrays = (np.ascontiguousarray(read(name), "<f4").data for name in names)
        write(folder / file, itertools.chain([len(text).to_bytes(8, "little"), text], arrays))
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(map(bytes_of, shapes.values()))}, "weight_map": weight_map})


def bytes_of(shape):
    return 4 * math.prod(shape)


def divided(shapes):
    """The files and the names of their tensors, in order."""
    groups, size = [[]], 0
    for name, shape in shapes.items():
        if groups[-1] and size + bytes_of(shape) > LARGEST_FILE:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += bytes_of(shape)
    if len(groups) == 1:
        return {ONE_FILE: groups[0]}
    return {f"model-{number:05}-of-{len(groups):05}.safetensors": names for number, names in enumerate(groups, 1)}


# ---- Reading

def read_json(path, default=None):
    """The object in a file. Without the file, the default; an error if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if default is None:
            fail(f"{path.parent} has no {path.name}; give a folder in Hugging Face's format")
        return default
    except (ValueError, RecursionError):
        value = None
    except OSError as error:
        fail(f"cannot read {path}: {error.strerror}")
    if not isinstance(value, dict):
        fail(f"{path} is not a JSON object; {AGAIN}")
    return value


def token_ids(folder, key):
    """The tokens that a folder names, such as those that end an answer (eos_token_id): a number or a list of them in
    generation_config.json, else in config.json. Null and an empty list name none."""
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name, {}).get(key)
        ids = found if isinstance(found, list) else [found] * (found is not None)
        if any(type(id) is not int for id in ids):
            fail(f"{folder / name}: {key} is {json.dumps(found)}, which is no token and no list of them; correct it")
        if ids:
            return ids
    return []


def refuse_token(folder, id):
    fail(f"{folder} names the token {id}, which its tokenizer does not have; {AGAIN}")


class Weights:
    """The tensors of a folder: names, shapes, and arrays in fp32."""

    def __init__(self, folder):
        names = [ONE_FILE]
        if not (folder / ONE_FILE).exists():
            weight_map = read_json(folder / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                fail(f"{folder / INDEX} has no weight_map; {AGAIN}")
            names = sorted(set(weight_map.values()))
        self.tensors = {}
        for name in names:
            self.open(folder / name)

    def open(self, path):
        try:
            data = np.memmap(path, np.uint8, "r")
            begin = 8 + int.from_bytes(bytes(data[:8]), "little")
            header = json.loads(bytes(data[8:begin]))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                first, end = entry["data_offsets"]
                values = data[begin + first:begin + end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
                self.tensors[name] = values, entry["dtype"]
        except OSError as error:
            fail(f"cannot read {path}: {error.strerror}")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            fail(f"{path} is damaged, or has tensors of another kind ({type(error).__name__}: {error}); {AGAIN}")

    def shape(self, name):
        return self.tensors[name][0].shape

    def read(self, name):
        values, dtype = self.tensors[name]
        return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else values.astype(np.float32)
