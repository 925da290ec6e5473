"""GPT-2 in PyTorch, the reference for the trainer, with the names and shapes of Hugging Face's files. It may have no biases, and
a separate head "lm_head.weight" instead of the token embedding.

Weights are a dict of tensors, {"h.0.attn.c_attn.weight": (C,3C), ...}. A matrix W of a block is used as x W + b. Everything
runs in the dtype of the weights: fp64 for references.
"""

import dataclasses
import math

import torch
from torch.nn import functional


@dataclasses.dataclass(frozen=True)
class Sizes:
    layers: int
    heads: int
    channels: int
    seq_len: int
    vocab_size: int
    bias: bool = True  # layernorms and products have biases
    tied_head: bool = True  # the head is the token embedding

    def options(self):
        """As options of the program. Switches that are on are its defaults."""
        return [f"--{name.replace('_', '-')}={str(value).lower()}" for name, value in dataclasses.asdict(self).items()
                if value is not True]


# Arguments for `dataclasses.replace(sizes, **switches)`: each switch off alone, and all of them together.
SWITCHES_OFF = [{"bias": False}, {"tied_head": False}, {"bias": False, "tied_head": False}]


def shapes(sizes):
    """{name: shape} of every tensor, in the order of the program's units."""
    C = sizes.channels
    result = {"wte.weight": (sizes.vocab_size, C), "wpe.weight": (sizes.seq_len, C)}
    for i in range(sizes.layers):
        result |= {
            f"h.{i}.ln_1.weight": (C,), f"h.{i}.ln_1.bias": (C,),
            f"h.{i}.attn.c_attn.weight": (C, 3 * C), f"h.{i}.attn.c_attn.bias": (3 * C,),
            f"h.{i}.attn.c_proj.weight": (C, C), f"h.{i}.attn.c_proj.bias": (C,),
            f"h.{i}.ln_2.weight": (C,), f"h.{i}.ln_2.bias": (C,),
            f"h.{i}.mlp.c_fc.weight": (C, 4 * C), f"h.{i}.mlp.c_fc.bias": (4 * C,),
            f"h.{i}.mlp.c_proj.weight": (4 * C, C), f"h.{i}.mlp.c_proj.bias": (C,),
        }
    result |= {"ln_f.weight": (C,), "ln_f.bias": (C,)}
    if not sizes.tied_head:
        result["lm_head.weight"] = (sizes.vocab_size, C)
    return {name: shape for name, shape in result.items() if sizes.bias or not name.endswith(".bias")}


def random_weights(sizes, generator, dtype=torch.float32):
    """Weights a little away from their initial values, including biases and layernorms, so that every gradient matters.

    They are numbers of `dtype`, held in fp64.
    """
    weights = {}
    for name, shape in shapes(sizes).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_gain = ".ln_" in "." + name and name.endswith("weight")
        weights[name] = ((1.0 if is_gain else 0.0) + 0.1 * noise).to(dtype).double()
    return weights


def random_tokens(sizes, batch, generator):
    """(batch, T+1): inputs are all but the last of a row, targets all but the first."""
    return torch.randint(sizes.vocab_size, (batch, sizes.seq_len + 1), generator=generator)


class RoundToBf16(torch.autograd.Function):
    """Rounds a tensor to bf16, randomly up or down so that it is right on average, and its gradient likewise."""

    @staticmethod
    def forward(ctx, x, generator):
        ctx.generator = generator
        return round_stochastically(x, generator)

    @staticmethod
    def backward(ctx, gradient):
        return round_stochastically(gradient, ctx.generator), None


def round_stochastically(x, generator):
    bits = x.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, generator=generator, dtype=torch.int32)
    return ((bits + noise) & -(1 << 16)).view(torch.float32).double()


def rounded_activations(generator):
    """A `store` for logits() that models the program's bf16, with independent random roundings."""
    return lambda x: RoundToBf16.apply(x, generator)


def logits(weights, sizes, inputs, store=lambda x: x, factor=lambda x: x):
    """(B,T) -> (B,T,V). `store` is applied to every activation that the program keeps in memory. `factor` is applied to the
    probabilities that attention multiplies by values, which GPUs' tensor cores take in the compute dtype."""
    B, T = inputs.shape
    C, NH = sizes.channels, sizes.heads

    def layernorm(x, name):
        return functional.layer_norm(x, (C,), weights[f"{name}.weight"], weights.get(f"{name}.bias"), 1e-5)

    def linear(x, name):
        return x @ weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = store(weights["wte.weight"][inputs] + weights["wpe.weight"][:T])
    for i in range(sizes.layers):
        qkv = store(linear(store(layernorm(x, f"h.{i}.ln_1")), f"h.{i}.attn.c_attn"))
        q, k, v = (part.view(B, T, NH, C // NH).transpose(1, 2) for part in qkv.split(C, dim=2))
        scores = (q @ k.transpose(2, 3) / math.sqrt(C // NH)).masked_fill(mask, -math.inf)
        attention = store((factor(scores.softmax(-1)) @ v).transpose(1, 2).reshape(B, T, C))
        x = store(x + store(linear(attention, f"h.{i}.attn.c_proj")))
        hidden = store(linear(store(layernorm(x, f"h.{i}.ln_2")), f"h.{i}.mlp.c_fc"))
        # GELU in its tanh form; torch 1.13 calls it approximate="tanh".
        x = store(x + store(linear(store(functional.gelu(hidden, approximate="tanh")), f"h.{i}.mlp.c_proj")))
    return store(store(layernorm(x, "ln_f")) @ weights["wte.weight" if sizes.tied_head else "lm_head.weight"].T)


def loss(weights, sizes, tokens, **options):
    """Mean cross-entropy of a batch (B,T+1), in nats."""
    predicted = logits(weights, sizes, tokens[:, :-1], **options)
    return functional.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())


def loss_and_gradients(weights, sizes, tokens, **options):
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    value = loss(leaves, sizes, tokens, **options)
    gradients = torch.autograd.grad(value, list(leaves.values()))
    return value.item(), dict(zip(leaves, gradients))


def train(weights, sizes, batches, lr, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, grad_clip=0.0, lr_factor=None,
          gradients_of=None, **options):
    """AdamW over a list of batches. `lr_factor` is a function of the step, from 0 on, that multiplies the rate.

    `gradients_of` is a function of the weights and a batch. It gives the loss and a gradient of each weight, instead of the
    exact ones. Returns the losses before each update, the gradient norms, and the final weights.
    """
    leaves = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    groups = [{"params": [p for p in leaves.values() if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in leaves.values() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor or (lambda step: 1.0))
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        if gradients_of is None:
            value = loss(leaves, sizes, batch, **options)
            value.backward()
        else:
            value, gradients = gradients_of(leaves, batch)
            for name, gradient in gradients.items():
                leaves[name].grad = gradient
        norms.append(torch.nn.utils.clip_grad_norm_(leaves.values(), grad_clip if grad_clip > 0 else math.inf).item())
        optimizer.step()
        schedule.step()
        losses.append(value.item())
    return losses, norms, {name: p.detach() for name, p in leaves.items()}
