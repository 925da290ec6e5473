"""Reads checkpoints as PyTorch's distributed checkpoints do (HuggingFaceStorageReader of torch 2.15), in numpy: all safetensors
files of a folder, whose metadata say where their boxes lie in the whole tensors."""

import json
import pathlib

import numpy as np

import safetensors_numpy

VERSION, SHARDING, OFFSETS = "DCP_VERSION", "DCP_SHARDING_INFO", "saved_offsets"


def metadata(path):
    with open(path, "rb") as file:
        return json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]


def boxes(path):
    """{name: (offsets, array)} of a file. As in PyTorch, a file with places has one for each tensor."""
    text = metadata(path).get(SHARDING)
    places = json.loads(text) if text else None
    return {name: (places[name][OFFSETS] if places else [0] * array.ndim, array)
            for name, array in safetensors_numpy.load(path).items()}


def merge(paths):
    """{name: array} of the tensors whose boxes are in these files. Each element must be in exactly one box, which PyTorch does
    not check."""
    found = {}
    for path in paths:
        for name, box in boxes(path).items():
            found.setdefault(name, []).append(box)
    tensors = {}
    for name, parts in found.items():
        shape = np.max([np.add(offsets, array.shape) for offsets, array in parts], axis=0)
        times = np.zeros(shape, np.int8)
        tensors[name] = np.empty(shape, parts[0][1].dtype)
        for offsets, array in parts:
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, array.shape))
            tensors[name][place] = array
            times[place] += 1
        assert (times == 1).all(), f"{name} is not in boxes that cover it once"
    return tensors


def weights_files(checkpoint):
    return sorted(pathlib.Path(checkpoint).glob("weights-*.safetensors"))


def state_files(checkpoint):
    return sorted(pathlib.Path(checkpoint).glob("state-*.safetensors"))


def weights(checkpoint):
    """The weights of a checkpoint, whole."""
    return merge(weights_files(checkpoint))


def state(checkpoint):
    """The optimizer's state, by its names in the files."""
    return merge(state_files(checkpoint))


def contents(checkpoint):
    """The bytes of all tensors of a checkpoint, to be compared; whatever mesh wrote them."""
    return {name: (array.dtype.str, array.shape, array.tobytes())
            for name, array in {**weights(checkpoint), **state(checkpoint)}.items()}
