"""Reads and writes safetensors files as numpy arrays."""

import numpy as np

import safetensors_file

# numpy has no bfloat16: it is read as the float32 number with the same value.
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
          "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?"}
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.items()}


def save(path, tensors, metadata=None):
    """Writes {name: array} and metadata {text: text}."""
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    safetensors_file.save(path, {name: (NAMES[array.dtype], array.shape, array.tobytes()) for name, array in arrays.items()},
                          metadata)


def save_bf16(path, tensors):
    """Writes {name: array} of numbers that bf16 holds."""
    bits = {name: np.asarray(array, dtype=np.float32).view(np.uint32) for name, array in tensors.items()}
    assert not any((array & 0xffff).any() for array in bits.values())
    safetensors_file.save(path, {name: ("BF16", array.shape, (array >> 16).astype("<u2").tobytes()) for name, array in bits.items()})


def load(path):
    """Returns {name: array}."""
    return {name: _array(*entry) for name, entry in safetensors_file.load(path).items()}


def _array(dtype, shape, data):
    if dtype == "BF16":
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, DTYPES[dtype])
    return values.reshape(shape)
