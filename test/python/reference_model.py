"""Models in PyTorch, the references for the trainer, whatever their family (reference_gpt2.py, reference_llama.py).

Weights are a dict of tensors, {"model.norm.weight": (C), ...}. Everything runs in the dtype of the weights: fp64 for
references.
"""

import dataclasses
import math
import re

import torch
from torch.nn import functional


class Model:
    """A family derives a dataclass. Its fields are the program's options, layers, seq_len and vocab_size among them.

    It has `shapes()`, {name: shape} of every tensor. `logits(weights, inputs, store, factor)` maps (B,T) to (B,T,V). `store`
    is applied to every activation that the program keeps in memory. `factor` is applied to the probabilities that attention
    multiplies by values, which GPUs' tensor cores take in the compute dtype.
    """
    named_model = "tiny"  # the one of the program whose sizes and switches the fields replace
    z_loss = 0.0

    def options(self):
        """As options of the program. It has the same defaults as the fields."""
        return [f"--model={self.named_model}", *(f"--{field.name.replace('_', '-')}={str(getattr(self, field.name)).lower()}"
                                                 for field in dataclasses.fields(self)
                                                 if getattr(self, field.name) != field.default)]


def random_weights(model, generator, dtype=torch.float32):
    """Weights a little away from their initial values, including biases and layernorms, so that every gradient matters.

    They are numbers of `dtype`, held in fp64.
    """
    weights = {}
    for name, shape in model.shapes().items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        is_gain = len(shape) == 1 and name.endswith("weight")
        weights[name] = ((1.0 if is_gain else 0.0) + 0.1 * noise).to(dtype).double()
    return weights


def random_tokens(model, batch, generator):
    """(batch, T+1): inputs are all but the last of a row, targets all but the first."""
    return torch.randint(model.vocab_size, (batch, model.seq_len + 1), generator=generator)


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


def loss_and_objective(weights, model, tokens, **options):
    """The mean cross-entropy of a batch (B,T+1), in nats, and what training minimises: with the model's z-loss."""
    predicted = model.logits(weights, tokens[:, :-1], **options)
    value = functional.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())
    return value, value + model.z_loss * predicted.logsumexp(-1).square().mean()


def loss(weights, model, tokens, **options):
    return loss_and_objective(weights, model, tokens, **options)[0]


def loss_and_gradients(weights, model, tokens, **options):
    """The cross-entropy, and the gradients of the objective."""
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    value, objective = loss_and_objective(leaves, model, tokens, **options)
    gradients = torch.autograd.grad(objective, list(leaves.values()))
    return value.item(), dict(zip(leaves, gradients))


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2. PyTorch has none."""

    def __init__(self, groups, lr, betas=(0.9, 0.99)):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), rate = group["betas"], group["lr"]
            for p in group["params"]:
                momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - rate * group["weight_decay"]).sub_(rate * torch.sign(beta1 * momentum + (1 - beta1) * p.grad))
                momentum.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def matrices_of(name, weight):
    """The matrices of a layer's product, (outputs, inputs) each, as views of the weight; none if it is no such product's. GPT-2's
    files have (inputs, outputs), and q, k and v in one tensor."""
    if not re.search(r"(^|\.)(h|layers)\.\d+\.", name) or weight.dim() != 2:
        return []
    if re.search(r"(^|\.)h\.\d+\.(attn|mlp)\.c_", name):
        return list(weight.T.chunk(3 if "c_attn" in name else 1))
    return [weight]


def errors_of_changes(begin, end, other):
    """How far each matrix of a layer's product is in `other` from `end`, as a share of its change from `begin` to `end`:
    the largest of each kind of matrix."""
    errors = {}
    for name in end:
        for a, b, c in zip(*(matrices_of(name, weights[name]) for weights in (begin, end, other))):
            kind = re.sub(r"\d+", "", name)
            errors[kind] = max(errors.get(kind, 0), (torch.norm(c - b) / torch.norm(b - a)).item())
    return errors


def orthogonal(u, steps=5, coefficients=(3.4445, -4.7750, 2.0315), store=lambda x: x):
    """The iteration of torch.optim.Muon, in the dtype of u. `store` is applied to every matrix that PyTorch keeps."""
    a, b, c = coefficients
    x = store(u.T if u.shape[0] > u.shape[1] else u)
    x = store(x / x.norm().clamp(min=1e-7))
    for _ in range(steps):
        gram = store(x @ x.T)
        x = store(a * x + store(b * gram + c * gram @ gram) @ x)
    return x.T if u.shape[0] > u.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of layers' products, AdamW for the rest. `fault` names one that programs have had."""

    def __init__(self, groups, lr, momentum=0.95, betas=(0.9, 0.95), eps=1e-8, scale="match_rms_adamw", own_rate=None, fault=None,
                 store=lambda x: x):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.momentum, self.scale, self.own_rate, self.fault, self.store = momentum, scale, own_rate, fault, store
        self.others = torch.optim.AdamW([{**group, "params": [p for p in group["params"] if not matrices_of(p.label, p)]} for group in groups],
                                        lr=lr, betas=betas, eps=eps)

    @torch.no_grad()
    def step(self, closure=None):
        for group, other in zip(self.param_groups, self.others.param_groups):
            other["lr"] = group["lr"]
            rate = group["lr"] * (self.own_rate / self.defaults["lr"] if self.own_rate else 1)
            for p in group["params"]:
                matrices = matrices_of(p.label, p.data)
                if not matrices:
                    continue
                buffers = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                for w, m, g in zip(matrices, matrices_of(p.label, buffers), matrices_of(p.label, p.grad)):
                    self.update(w, m, g, rate, group["weight_decay"])
        self.others.step()

    def update(self, w, m, g, rate, decay):
        for _ in range(4 if self.fault == "momentum once a micro-batch" else 1):
            m.lerp_(g, 1 - self.momentum)
        u = g.lerp(m, self.momentum)
        if self.fault == "no Nesterov":
            u = m
        rows, columns = w.shape
        factor = max(1, rows / columns)**0.5 if self.scale == "original" else 0.2 * max(rows, columns)**0.5
        if self.fault == "flat":  # a shard of a flat buffer, as one row
            half = u.flatten().chunk(2)
            direction = torch.cat([orthogonal(part[None])[0] for part in half]).view_as(u)
        else:
            direction = u if self.fault == "no iteration" else orthogonal(u, store=self.store)
        w.mul_(1 - rate * decay * (factor if self.fault == "decay with the adjusted rate" else 1))
        w.sub_(rate * factor * direction)


def train(weights, model, batches, lr, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8, grad_clip=0.0, lr_factor=None,
          gradients_of=None, make_optimizer=None, **options):
    """AdamW over a list of batches, or what `make_optimizer` makes of groups of parameters and the rate. `lr_factor` is a function of the step, from 0 on, that multiplies the rate.

    `gradients_of` is a function of the weights and a batch. It gives the loss and a gradient of each weight, instead of the
    exact ones. Returns the losses before each update, the gradient norms, and the final weights.
    """
    leaves = {name: torch.nn.Parameter(weight.clone()) for name, weight in weights.items()}
    for name, p in leaves.items():
        p.label = name
    groups = [{"params": [p for p in leaves.values() if p.dim() >= 2], "weight_decay": weight_decay},
              {"params": [p for p in leaves.values() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = make_optimizer(groups, lr) if make_optimizer else torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor or (lambda step: 1.0))
    losses, norms = [], []
    for batch in batches:
        optimizer.zero_grad()
        if gradients_of is None:
            value, objective = loss_and_objective(leaves, model, batch, **options)
            objective.backward()
        else:
            value, gradients = gradients_of(leaves, batch)
            for name, gradient in gradients.items():
                leaves[name].grad = gradient
        norms.append(torch.nn.utils.clip_grad_norm_(leaves.values(), grad_clip if grad_clip > 0 else math.inf).item())
        optimizer.step()
        schedule.step()
        losses.append(value.item())
    return losses, norms, {name: p.detach() for name, p in leaves.items()}
