"""Reads and writes safetensors files as bytes, with Python alone (llmc/io/safetensors.h describes the format).
safetensors_numpy.py handles numpy tensors."""

import json


def save(path, tensors, metadata=None):
    """Writes {name: (dtype as the format names it, shape, bytes)} and metadata {text: text}."""
    header = {"__metadata__": {**(metadata or {}), "format": "pt"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(data for _, _, data in tensors.values())


def load(path):
    """Returns {name: (dtype, shape, bytes)}."""
    with open(path, "rb") as file:
        content = file.read()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], entry["shape"], content[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]])
            for name, entry in header.items()}
