"""How far a whole model's loss and gradients may be from PyTorch's in fp64.

fp32: the project promises gradients within 1e-5 of their norm and losses within 1e-5.

bf16: the program rounds every activation, and every gradient of one, to bf16 when it stores it. Its products and sums are
in fp32, whose errors are negligible in comparison. The effect of such roundings on a loss or a gradient depends on the
model, so it is measured DRAWS times, by PyTorch in fp64 with the same tensors rounded to bf16. These roundings are random,
up or down, so that they are right on average (Monte Carlo arithmetic: Parker, 1997). A random rounding has twice the
variance of the program's rounding to nearest: 1/6 of a unit squared against 1/12. So four times the root mean square of
the draws is 5.6 standard deviations of the program's error.
"""

import math

import reference_model
import torch

DRAWS = 16
DEVIATIONS = 4
LOSS_FP32 = 1e-5
GRADIENT_FP32 = 1e-5  # share of the tensor's norm


def root_mean_square(values):
    return math.sqrt(sum(value**2 for value in values) / len(values))


def loss_and_gradient_bounds(dtype, weights, sizes, tokens):
    """The allowed (|error| of the loss in nats, {name: |error| of the gradient in norm})."""
    loss, gradients = reference_model.loss_and_gradients(weights, sizes, tokens)
    if dtype == "fp32":
        return LOSS_FP32, {name: GRADIENT_FP32 * gradient.norm().item() for name, gradient in gradients.items()}
    store = reference_model.rounded_activations(torch.Generator().manual_seed(0))
    draws = [reference_model.loss_and_gradients(weights, sizes, tokens, store=store) for _ in range(DRAWS)]
    return (DEVIATIONS * root_mean_square([drawn - loss for drawn, _ in draws]),
            {name: DEVIATIONS * root_mean_square([(drawn[name] - gradient).norm().item() for _, drawn in draws])
             for name, gradient in gradients.items()})


def gpu_training_bound_bf16(weights, sizes, batches, shares, rounds_gradients, draws, generator, **options):
    """The largest |difference| of the losses of any step between the CPU's training in bf16 and a GPU's.

    The draws round activations at random, the parameters computed from each step's master weights, and the operands that a
    GPU's attention gives to tensor cores. If gradients are kept in bf16, a rank rounds them once a micro-batch, and their sum
    over ranks is rounded once. `shares` is the number of micro-batches of each rank. The devices round to nearest, with half
    the variance of the draws. If the two devices' errors were independent, their difference would have the variance of one
    draw's error. Many of their roundings are the same, so DEVIATIONS are at least that many standard deviations of it.
    """
    exact, _, _ = reference_model.train(weights, sizes, batches, **options)
    store = reference_model.rounded_activations(generator)

    def rounded(x):
        return reference_model.round_stochastically(x, generator)

    def gradients_of(leaves, batch):
        held = {name: rounded(leaf.detach()) for name, leaf in leaves.items()}
        losses, ranks = [], []
        parts = iter(batch.chunk(sum(shares)))
        for micro_batches in shares:
            kept = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            for _ in range(micro_batches):
                value, own = reference_model.loss_and_gradients(held, sizes, next(parts), store=store, factor=store)
                losses.append(value)
                for name in kept:
                    kept[name] = kept[name] + own[name] / sum(shares)
                    kept[name] = rounded(kept[name]) if rounds_gradients else kept[name]
            ranks.append(kept)
        total = {name: sum(rank[name] for rank in ranks) for name in leaves}
        if rounds_gradients and len(shares) > 1:
            total = {name: rounded(gradient) for name, gradient in total.items()}
        return torch.tensor(losses).double().mean(), total

    drawn = [reference_model.train(weights, sizes, batches, gradients_of=gradients_of, **options)[0] for _ in range(draws)]
    return DEVIATIONS * max(root_mean_square([draw[step] - exact[step] for draw in drawn])
                            for step in range(len(exact)))


def training_bound_bf16(weights, sizes, batches, **options):
    """The largest |error| of the loss over all steps of a training in bf16."""
    exact, _, _ = reference_model.train(weights, sizes, batches, **options)
    store = reference_model.rounded_activations(torch.Generator().manual_seed(0))
    draws = [reference_model.train(weights, sizes, batches, store=store, **options)[0] for _ in range(DRAWS // 4)]
    return DEVIATIONS * max(root_mean_square([draw[step] - exact[step] for draw in draws])
                            for step in range(len(exact)))
