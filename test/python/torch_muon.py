"""Trains a model with torch.optim.Muon, in fp64 but for Muon's iteration, on the files of an Experiment
(model_comparison.py):

    PYTHON test/python/torch_muon.py FOLDER MODEL STEPS [DTYPE]

PYTHON has torch 2.9 or later. The weights are written to FOLDER/torch.safetensors. PyTorch iterates in bf16; DTYPE
float64 replaces it.
"""

import array
import contextlib
import pathlib
import sys
import unittest.mock

import torch

import reference_llama
import reference_model
import safetensors_file
from reference_gpt2 import GPT2

MODELS = {"gpt2": GPT2(layers=2, heads=3, channels=48, seq_len=20, vocab_size=97), **reference_llama.MODELS}
BATCH, RATE, DECAY, MAX_NORM = 4, 2e-3, 0.1, 0.5


class Muon(torch.optim.Optimizer):
    """PyTorch's Muon for the matrices of layers' products, which are views of the weights, and AdamW for the rest."""

    def __init__(self, groups, lr, dtype):
        super().__init__(groups, {"lr": lr})
        self.dtype = dtype
        self.views = [(p, [torch.nn.Parameter(view) for view in reference_model.matrices_of(p.label, p.data)])
                      for group in groups for p in group["params"]]
        self.muon = torch.optim.Muon([view for _, views in self.views for view in views], lr=lr, weight_decay=DECAY, momentum=0.95,
                                     nesterov=True, adjust_lr_fn="match_rms_adamw")
        is_other = {p for p, views in self.views if not views}
        self.others = torch.optim.AdamW([{**group, "params": [p for p in group["params"] if p in is_other]} for group in groups],
                                        lr=lr, betas=(0.9, 0.95), eps=1e-8)

    def step(self, closure=None):
        for p, views in self.views:
            for view, gradient in zip(views, reference_model.matrices_of(p.label, p.grad)):
                view.grad = gradient
        with contextlib.ExitStack() as patches:
            if self.dtype:
                patches.enter_context(unittest.mock.patch.object(torch, "bfloat16", self.dtype))
                patches.enter_context(unittest.mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.to(self.dtype, copy=True)))
            self.muon.step()
        self.others.step()


def main(folder, name, steps, dtype=None):
    folder, model = pathlib.Path(folder), MODELS[name]
    tensors = safetensors_file.load(folder / "init.safetensors")
    weights = {name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape).double() for name, (_, shape, data) in tensors.items()}
    run = array.array("H", (folder / "train.bin").read_bytes()[1024:]).tolist()
    T = model.seq_len
    tokens = torch.tensor([run[i * T:(i + 1) * T + 1] for i in range(BATCH)])
    _, _, trained = reference_model.train(weights, model, [tokens] * int(steps), lr=RATE, weight_decay=DECAY, grad_clip=MAX_NORM,
                                          make_optimizer=lambda groups, lr: Muon(groups, lr, dtype and getattr(torch, dtype)))
    safetensors_file.save(folder / "torch.safetensors", {
        name: ("F64", weight.shape, array.array("d", weight.flatten().tolist()).tobytes()) for name, weight in trained.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
