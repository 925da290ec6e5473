"""Reads a checkpoint as PyTorch's distributed checkpoint, into tensors of NaN, and prints what was read:

    PYTHON test/python/torch_reader.py FOLDER               # in one process
    PYTHON test/python/torch_reader.py FOLDER DIMENSION     # in two, which share this dimension of each tensor

PYTHON has torch 2.9 or later, and safetensors. It prints JSON: {name: [dtype, shape, SHA-256 of the bytes]}; bytes of bf16
are those of the same numbers in fp32, as in boxes.py.
"""

import hashlib
import json
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader

RANKS = 2


def load(folder, make):
    """{name: tensor}, each made by make(shape, dtype). Names, shapes and dtypes are those that PyTorch finds."""
    reader = HuggingFaceStorageReader(folder)
    found = reader.read_metadata().state_dict_metadata
    tensors = {name: make(about.size, about.properties.dtype) for name, about in found.items()}
    dcp.load(tensors, storage_reader=reader)
    return tensors


def description(tensors):
    bytes_of = lambda tensor: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy().tobytes()
    return {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), hashlib.sha256(bytes_of(tensor)).hexdigest()]
            for name, tensor in sorted(tensors.items())}


def whole(folder):
    return description(load(folder, lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype)))


def read_as_rank(rank, store, folder, dimension):
    from torch.distributed.tensor import Shard, full
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = torch.distributed.init_device_mesh("cpu", (RANKS,))
    tensors = load(folder, lambda shape, dtype: full(shape, torch.nan, dtype=dtype, device_mesh=mesh,
                                                     placements=[Shard(min(dimension, len(shape) - 1))]))
    tensors = {name: tensor.full_tensor() for name, tensor in tensors.items()}
    if rank == 0:
        print(json.dumps(description(tensors)))
    torch.distributed.destroy_process_group()


def main(folder, dimension=None):
    if dimension is None:
        print(json.dumps(whole(folder)))
        return
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(read_as_rank, (f"{place}/store", folder, int(dimension)), nprocs=RANKS)


if __name__ == "__main__":
    main(*sys.argv[1:])
