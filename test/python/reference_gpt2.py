"""GPT-2 in PyTorch, the reference for the trainer, with the names and shapes of Hugging Face's files. It may have no biases, and
a separate head "lm_head.weight" instead of the token embedding. A matrix W of a block is used as x W + b.
"""

import dataclasses
import math

import torch
from torch.nn import functional

from reference_model import Model


@dataclasses.dataclass(frozen=True)
class GPT2(Model):
    layers: int
    heads: int
    channels: int
    seq_len: int
    vocab_size: int
    bias: bool = True  # layernorms and products have biases
    tied_head: bool = True  # the head is the token embedding

    def shapes(self):
        C = self.channels
        result = {"wte.weight": (self.vocab_size, C), "wpe.weight": (self.seq_len, C)}
        for i in range(self.layers):
            result |= {
                f"h.{i}.ln_1.weight": (C,), f"h.{i}.ln_1.bias": (C,),
                f"h.{i}.attn.c_attn.weight": (C, 3 * C), f"h.{i}.attn.c_attn.bias": (3 * C,),
                f"h.{i}.attn.c_proj.weight": (C, C), f"h.{i}.attn.c_proj.bias": (C,),
                f"h.{i}.ln_2.weight": (C,), f"h.{i}.ln_2.bias": (C,),
                f"h.{i}.mlp.c_fc.weight": (C, 4 * C), f"h.{i}.mlp.c_fc.bias": (4 * C,),
                f"h.{i}.mlp.c_proj.weight": (4 * C, C), f"h.{i}.mlp.c_proj.bias": (C,),
            }
        result |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
        if not self.tied_head:
            result["lm_head.weight"] = (self.vocab_size, C)
        return {name: shape for name, shape in result.items() if self.bias or not name.endswith(".bias")}

    def logits(self, weights, inputs, store=lambda x: x, factor=lambda x: x, product=torch.matmul, store_gelu=None):
        """`product` multiplies in the blocks. `store_gelu` stores GELU's output, whose gradient the program need not keep."""
        B, T = inputs.shape
        C, NH = self.channels, self.heads

        def layernorm(x, name):
            return functional.layer_norm(x, (C,), weights[f"{name}.weight"], weights.get(f"{name}.bias"), 1e-5)

        def linear(x, name):
            return product(x, weights[f"{name}.weight"]) + weights.get(f"{name}.bias", 0)

        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        x = store(weights["wte.weight"][inputs] + weights["wpe.weight"][:T])
        for i in range(self.layers):
            qkv = store(linear(store(layernorm(x, f"h.{i}.ln_1")), f"h.{i}.attn.c_attn"))
            q, k, v = (part.view(B, T, NH, C // NH).transpose(1, 2) for part in qkv.split(C, dim=2))
            scores = (q @ k.transpose(2, 3) / math.sqrt(C // NH)).masked_fill(mask, -math.inf)
            attention = store((factor(scores.softmax(-1)) @ v).transpose(1, 2).reshape(B, T, C))
            x = store(x + store(linear(attention, f"h.{i}.attn.c_proj")))
            hidden = store(linear(store(layernorm(x, f"h.{i}.ln_2")), f"h.{i}.mlp.c_fc"))
            # GELU in its tanh form; torch 1.13 calls it approximate="tanh".
            x = store(x + store(linear((store_gelu or store)(functional.gelu(hidden, approximate="tanh")), f"h.{i}.mlp.c_proj")))
        return store(store(layernorm(x, "ln_f")) @ weights["wte.weight" if self.tied_head else "lm_head.weight"].T)


# Arguments for `dataclasses.replace(model, **switches)`: each switch off alone, and all of them together.
SWITCHES_OFF = [{"bias": False}, {"tied_head": False}, {"bias": False, "tied_head": False}]
