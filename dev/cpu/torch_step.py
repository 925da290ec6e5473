#!/usr/bin/env python3
"""The step that bench_cpu.py compares with: the same GPT in PyTorch, as its users write it.

    torch_step.py LAYERS HEADS CHANNELS T V BATCH MICRO_BATCH DTYPE THREADS [compile]

It uses nn.Linear, nn.LayerNorm, nn.GELU, fused attention if this PyTorch has it, bf16 by autocast, fused AdamW if
available, otherwise foreach AdamW, and gradient clipping. It does no Python work that a good script would avoid. It uses
bench_step's protocol: a first line about itself, then for each line "step" on standard input a line of JSON with its
milliseconds and its loss.
"""

import json
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, heads, channels):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(approximate="tanh"),
                                 nn.Linear(4 * channels, channels))

    def attention(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        if hasattr(F, "scaled_dot_product_attention"):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(C // self.heads)
            scores = scores.masked_fill(self.mask[:T, :T], float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C))

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers, heads, channels, T, V):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, channels), nn.Embedding(T, channels)
        self.blocks = nn.ModuleList(Block(heads, channels) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        for block in self.blocks:
            block.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def make_adamw(parameters):
    options = dict(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    try:
        return torch.optim.AdamW(parameters, fused=True, **options)
    except (TypeError, RuntimeError):
        return torch.optim.AdamW(parameters, foreach=True, **options)


def main():
    layers, heads, channels, T, V, batch, micro_batch = map(int, sys.argv[1:8])
    dtype, threads, compiled = sys.argv[8], int(sys.argv[9]), "compile" in sys.argv[10:]
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    model = GPT(layers, heads, channels, T, V)
    step_model = torch.compile(model) if compiled else model
    adamw = make_adamw(model.parameters())
    generator = torch.Generator().manual_seed(2)
    print(json.dumps({"torch": torch.__version__, "compiled": compiled, "threads": torch.get_num_threads(),
                      "blas": "openblas" if "openblas" in open("/proc/self/maps").read() else "other"}), flush=True)
    for line in sys.stdin:
        if line.strip() != "step":
            sys.exit(f"error: torch_step.py knows no command {line.strip()!r}")
        tokens = torch.randint(V, (batch, T + 1), generator=generator)
        start = time.perf_counter()
        total = 0.0
        for part in tokens.split(micro_batch):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
                loss = step_model(part[:, :-1], part[:, 1:]) * (len(part) / batch)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        print(json.dumps({"ms": 1e3 * (time.perf_counter() - start), "loss": total}), flush=True)


if __name__ == "__main__":
    main()
