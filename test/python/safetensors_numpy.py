"""Reads and writes safetensors files with numpy alone (the format is described in llmc/io/safetensors.h)."""

import json

import numpy as np

# numpy has no bfloat16: it is read as the float32 with the same value.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
          "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def save(path, tensors, metadata=None):
    """Writes {name: array}, metadata {text: text}."""
    header = {"__metadata__": {**(metadata or {}), "format": "pt"}}
    chunks, offset = [], 0
    for name, array in tensors.items():
        array = np.asarray(array)
        data = array.tobytes()
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(chunks)


def load(path):
    """Returns {name: array}."""
    with open(path, "rb") as file:
        content = file.read()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    header.pop("__metadata__", None)
    return {name: _array(content[begin + entry["data_offsets"][0]:begin + entry["data_offsets"][1]], entry)
            for name, entry in header.items()}


def _array(data, entry):
    if entry["dtype"] == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, DTYPES[entry["dtype"]])
    return values.reshape(entry["shape"])
