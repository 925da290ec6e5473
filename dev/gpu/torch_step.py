#!/usr/bin/env python3
"""The step that the bench compares with, on a GPU: the GPT of dev/cpu/torch_step.py as a user of PyTorch trains it.

    torch_step.py LAYERS HEADS CHANNELS T V BATCH MICRO_BATCH DEVICE PROFILED

It uses bf16 by autocast, torch.compile, PyTorch's flash attention, fused AdamW, gradient clipping, and tokens from pinned
memory. Deep models are compiled one block at a time, as PyTorch recommends, since a whole one would take minutes. Writes a
line about itself, then a line of JSON per step, until it is killed. After a line on standard input it first profiles
PROFILED steps and writes the share of their time outside kernels.
"""

import json
import pathlib
import select
import sys

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cpu"))
from torch_step import GPT  # noqa: E402
import kernel_times  # noqa: E402

DEEP = 24  # layers


def take_flash_attention():
    """Allows only PyTorch's own flash attention; its default choice depends on its version and the GPU."""
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    if hasattr(torch.backends.cuda, "enable_cudnn_sdp"):
        torch.backends.cuda.enable_cudnn_sdp(False)


def make_adamw(model, device):
    """AdamW with weight decay only for matrices, as in the trainer."""
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), **({"fused": True} if device == "cuda" else {}))


def compiled(model, layers, device):
    if device != "cuda":
        return model, "not"
    if layers < DEEP:
        return torch.compile(model), "whole"
    for block in model.blocks:
        block.compile()
    model.head = torch.compile(model.head)
    return model, "by blocks"


class WithHead(GPT):
    """The GPT with its head as a separate function, which can be compiled separately."""

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)

    def head(self, x, targets):
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def mean_loss(model, part, batch, device):
    """A micro-batch's share of the batch's mean loss, with matrix products in bf16."""
    with torch.autocast(device, dtype=torch.bfloat16):
        return model(part[:, :-1], part[:, 1:]) * (len(part) / batch)


def profiled(step, count):
    from torch.autograd import DeviceType
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
    spans = [(event.time_range.start, event.time_range.end) for event in profile.events()
             if event.device_type == DeviceType.CUDA]
    return kernel_times.outside(spans)


def main():
    layers, heads, channels, T, V, batch, micro_batch = map(int, sys.argv[1:8])
    device, count = sys.argv[8], int(sys.argv[9])
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    if device == "cuda":
        take_flash_attention()
    model = WithHead(layers, heads, channels, T, V).to(device)
    step_model, how = compiled(model, layers, device)
    adamw = make_adamw(model, device)
    generator = torch.Generator().manual_seed(2)
    print(json.dumps({"torch": torch.__version__, "compiled": how}), flush=True)

    def step():
        tokens = torch.randint(V, (batch, T + 1), generator=generator)
        if device == "cuda":
            tokens = tokens.pin_memory().to(device, non_blocking=True)
        total = 0.0
        for part in tokens.split(micro_batch):
            loss = mean_loss(step_model, part, batch, device)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        return total.item()

    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            if not sys.stdin.readline():
                return
            print(json.dumps({"outside_kernels": profiled(step, count)}), flush=True)
        print(json.dumps({"loss": step()}), flush=True)


if __name__ == "__main__":
    main()
