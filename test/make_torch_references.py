#!/usr/bin/env python3
"""Makes what PyTorch writes and reads for the suite `checkpoints`, which runs without a PyTorch that has this format:

    test/reference/saved_by_torch/          a GPT-2, saved by two processes of PyTorch
    test/reference/saved_by_train_gpt/      the tensors of a checkpoint of ./train_gpt, saved by four ranks
    test/reference/torch_checkpoints.json   the dtype, the shape and the SHA-256 of each tensor in PyTorch

It needs ./train_gpt and a PyTorch of its own, of version 2.15. (PyTorch writes a file's metadata in a random order.)

    python3 -m venv VENV && VENV/bin/pip install torch==2.15.0 safetensors numpy
    VENV/bin/python test/make_torch_references.py
"""

import json
import pathlib
import shutil
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp

TEST = pathlib.Path(__file__).resolve().parent
FOLDER = TEST / "reference"
sys.path.insert(0, str(TEST / "python"))

import program
import torch_reader
from reference_gpt2 import GPT2
from reference_model import random_weights

SEED = 1
MODEL = GPT2(layers=1, heads=2, channels=12, seq_len=8, vocab_size=257)
# A rank has columns of c_attn in three boxes, and ZeRO divides the tables within rows. Lion's state is small.
MESH = (4, ["--tensor-parallel=2", "--zero-stage=3", "--optimizer=lion"])


def weights():
    return {name: weight.float() for name, weight in random_weights(MODEL, torch.Generator().manual_seed(SEED)).items()}


def placement(name, weight):
    """As tensor parallelism and FSDP place them: columns of the first products, else rows; and some norms are whole."""
    from torch.distributed.tensor import Replicate, Shard
    if "ln_f" in name:
        return Replicate()
    return Shard(1 if name.endswith(("c_attn.weight", "c_fc.weight")) else 0)


def save_as_rank(rank, store, folder):
    from torch.distributed.tensor import distribute_tensor
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=torch_reader.RANKS)
    mesh = torch.distributed.init_device_mesh("cpu", (torch_reader.RANKS,))
    tensors = {name: distribute_tensor(weight, mesh, [placement(name, weight)]) for name, weight in weights().items()}
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
    torch.distributed.destroy_process_group()


def save_by_torch(folder):
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(save_as_rank, (f"{place}/store", str(folder)), nprocs=torch_reader.RANKS)
    return torch_reader.description(weights())


def save_by_train_gpt(folder):
    ranks, options = MESH
    with tempfile.TemporaryDirectory() as place:
        program.run(*MODEL.options(), *options, "--device=cpu", "--steps=2", "--global-batch-tokens=64", "--sample-tokens=0", "--val-every=0",
                    f"--out-dir={place}/run", ranks=ranks)
        shutil.copytree(f"{place}/run/checkpoint-00000002", folder, ignore=shutil.ignore_patterns("*.json"))
    return torch_reader.whole(str(folder))


def main():
    found = {}
    for name, save in (("saved_by_torch", save_by_torch), ("saved_by_train_gpt", save_by_train_gpt)):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        found[name] = save(FOLDER / name)
    texts = [f'"options": {json.dumps(MODEL.options())}']
    for name, tensors in found.items():
        texts.append(f'"{name}": {{\n' + ",\n".join(f"  {json.dumps(tensor)}: {json.dumps(about)}" for tensor, about in tensors.items()) + "\n}")
    (FOLDER / "torch_checkpoints.json").write_text("{\n" + ",\n".join(texts) + "\n}\n")


if __name__ == "__main__":
    main()
