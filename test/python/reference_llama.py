"""Llama and its kin (Mistral, Qwen 2.5 and 3, OLMo 2), and nanochat, in PyTorch, with the names and shapes of Hugging Face's
files. long_huggingface.py compares them with Hugging Face's library. A matrix W is used as x W^T.
"""

import dataclasses
import math

import torch
from torch.nn import functional

from reference_model import Model


def rmsnorm(x, eps, weight=1.0):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def frequencies(head_size, theta, scaling="none"):
    """theta^(-2i/D); scaled as in Llama 3.1 by FACTOR,LOW,HIGH,POSITIONS."""
    f = theta ** (-torch.arange(0, head_size, 2).double() / head_size)
    if scaling == "none":
        return f
    factor, low, high, positions = map(float, scaling.split(","))
    # The share that a frequency keeps grows with the number of its waves in the original positions.
    kept = ((positions * f / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return f * (kept + (1 - kept) / factor)


def rotated(x, f):
    """Rotary positions: turns the pairs (i, i + D/2) of heads (B,T,H,D) by t f_i."""
    angles = (torch.arange(x.shape[1]).double()[:, None] * f)[:, None]
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def attention(q, k, v, window, factor):
    """Maps q (B,T,H,D), k and v (B,T,K,D) to (B,T,HD). Each of the K heads serves H/K query heads in a row. A token sees the last
    `window` tokens; 0: all."""
    T, H, D = q.shape[1:]
    q, k, v = (heads.repeat_interleave(H // heads.shape[2], 2).transpose(1, 2) for heads in (q, k, v))
    distance = torch.arange(T)[:, None] - torch.arange(T)
    hidden = (distance < 0) | (distance >= (window or T))
    scores = (q @ k.transpose(2, 3) / math.sqrt(D)).masked_fill(hidden, -math.inf)
    return (factor(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)


@dataclasses.dataclass(frozen=True)
class Llama(Model):
    named_model = "llama-tiny"
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    channels: int
    mlp_size: int
    seq_len: int
    vocab_size: int
    window: int = 0
    rope_theta: float = 1e4
    rope_scaling: str = "none"
    norm_eps: float = 1e-5
    qk_norm: str = "none"
    norms: str = "before"
    qkv_bias: bool = False
    tied_head: bool = False
    z_loss: float = 0.0

    def shapes(self):
        C, F = self.channels, self.mlp_size
        Q, K = self.heads * self.head_size, self.kv_heads * self.head_size
        result = {"model.embed_tokens.weight": (self.vocab_size, C), "model.norm.weight": (C,)}
        if not self.tied_head:
            result["lm_head.weight"] = (self.vocab_size, C)
        block = {"self_attn.q_proj.weight": (Q, C), "self_attn.k_proj.weight": (K, C), "self_attn.v_proj.weight": (K, C),
                 "self_attn.o_proj.weight": (C, Q), "mlp.gate_proj.weight": (F, C), "mlp.up_proj.weight": (F, C),
                 "mlp.down_proj.weight": (C, F), "post_attention_layernorm.weight": (C,)}
        block["input_layernorm.weight" if self.norms == "before" else "post_feedforward_layernorm.weight"] = (C,)
        if self.qkv_bias:
            block |= {"self_attn.q_proj.bias": (Q,), "self_attn.k_proj.bias": (K,), "self_attn.v_proj.bias": (K,)}
        if self.qk_norm != "none":
            all_heads = self.qk_norm == "all"
            block |= {"self_attn.q_norm.weight": (Q if all_heads else self.head_size,),
                      "self_attn.k_norm.weight": (K if all_heads else self.head_size,)}
        return result | {f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in block.items()}

    def logits(self, weights, inputs, store=lambda x: x, factor=lambda x: x):
        f = frequencies(self.head_size, self.rope_theta, self.rope_scaling)

        def norm(x, name):
            return store(rmsnorm(x, self.norm_eps, weights[f"{name}.weight"]))

        def linear(x, name):
            return store(x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0))

        def attend(x, at):
            q, k, v = (linear(x, f"{at}.{name}_proj") for name in "qkv")
            if self.qk_norm == "all":
                q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
            q, k, v = (x.unflatten(2, (-1, self.head_size)) for x in (q, k, v))
            if self.qk_norm == "head":
                q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
            q, k = store(rotated(q, f)), store(rotated(k, f))
            return linear(store(attention(q, k, v, self.window, factor)), f"{at}.o_proj")

        def mlp(x, at):
            gate, up = linear(x, f"{at}.gate_proj"), linear(x, f"{at}.up_proj")
            return linear(store(functional.silu(gate) * up), f"{at}.down_proj")

        x = store(weights["model.embed_tokens.weight"][inputs])
        for i in range(self.layers):
            at = f"model.layers.{i}"
            if self.norms == "before":
                x = store(x + attend(norm(x, f"{at}.input_layernorm"), f"{at}.self_attn"))
                x = store(x + mlp(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp"))
            else:
                x = store(x + norm(attend(x, f"{at}.self_attn"), f"{at}.post_attention_layernorm"))
                x = store(x + norm(mlp(x, f"{at}.mlp"), f"{at}.post_feedforward_layernorm"))
        table = "model.embed_tokens.weight" if self.tied_head else "lm_head.weight"
        return store(norm(x, "model.norm") @ weights[table].T)


@dataclasses.dataclass(frozen=True)
class Nanochat(Model):
    named_model = "nanochat-tiny"
    layers: int
    heads: int
    kv_heads: int
    channels: int
    mlp_size: int
    seq_len: int
    vocab_size: int
    rope_theta: float = 1e4
    norm_eps: float = 1e-6
    logit_cap: float = 15.0
    z_loss: float = 0.0

    def shapes(self):
        C, F, V = self.channels, self.mlp_size, self.vocab_size
        K = self.kv_heads * C // self.heads
        block = {"self_attn.q_proj.weight": (C, C), "self_attn.k_proj.weight": (K, C), "self_attn.v_proj.weight": (K, C),
                 "self_attn.o_proj.weight": (C, C), "mlp.fc1.weight": (F, C), "mlp.fc2.weight": (C, F)}
        return {"model.embed_tokens.weight": (V, C), "lm_head.weight": (V, C)} | {
            f"model.layers.{i}.{name}": shape for i in range(self.layers) for name, shape in block.items()}

    def logits(self, weights, inputs, store=lambda x: x, factor=lambda x: x):
        D = self.channels // self.heads

        def norm(x):
            return store(rmsnorm(x, self.norm_eps))

        def linear(x, name):
            return store(x @ weights[f"{name}.weight"].T)

        # Rotated by negative angles.
        def attend(x, at):
            q, k, v = (linear(x, f"{at}.{name}_proj").unflatten(2, (-1, D)) for name in "qkv")
            q, k = (store(rotated(norm(x), -frequencies(D, self.rope_theta))) for x in (q, k))
            return linear(store(attention(q, k, v, 0, factor)), f"{at}.o_proj")

        x = norm(store(weights["model.embed_tokens.weight"][inputs]))
        for i in range(self.layers):
            at = f"model.layers.{i}"
            x = store(x + attend(norm(x), f"{at}.self_attn"))
            hidden = linear(norm(x), f"{at}.mlp.fc1")
            x = store(x + linear(store(functional.relu(hidden).square()), f"{at}.mlp.fc2"))
        logits = linear(norm(x), "lm_head")
        return self.logit_cap * (logits / self.logit_cap).tanh()


# {model_type: model}. Some share a key head among several query heads, and some have heads of another size than channels / heads.
# Sizes are odd, and vocabularies exceed 128 rows, the unit of padding, or do not.
MODELS = {
    "llama": Llama(layers=2, heads=3, kv_heads=1, head_size=32, channels=51, mlp_size=77, seq_len=63, vocab_size=101,
                   rope_theta=5e5, rope_scaling="8,1,4,64"),
    "mistral": Llama(layers=3, heads=6, kv_heads=2, head_size=14, channels=45, mlp_size=91, seq_len=37, vocab_size=97,
                     rope_theta=1e6, window=8),
    "qwen2": Llama(layers=2, heads=6, kv_heads=3, head_size=10, channels=60, mlp_size=83, seq_len=64, vocab_size=150,
                   rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied_head=True),
    "qwen3": Llama(layers=2, heads=4, kv_heads=2, head_size=34, channels=55, mlp_size=71, seq_len=50, vocab_size=131,
                   rope_theta=1e6, norm_eps=1e-6, qk_norm="head"),
    "olmo2": Llama(layers=2, heads=6, kv_heads=2, head_size=12, channels=72, mlp_size=65, seq_len=64, vocab_size=99,
                   rope_theta=5e5, norm_eps=1e-6, qk_norm="all", norms="behind"),
    "nanochat": Nanochat(layers=2, heads=6, kv_heads=2, channels=60, mlp_size=115, seq_len=64, vocab_size=150, logit_cap=2.0)}
