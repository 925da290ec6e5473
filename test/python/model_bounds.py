"""How far a whole model's loss and gradients may be from PyTorch's in fp64.

fp32: the project promises gradients within 1e-5 of their norm and losses within 1e-5.

bf16: every activation, and every gradient of one, is rounded to bf16 where it is stored, with a relative error of at most
u = 2^-8 in each element; products and sums are in fp32, whose errors do not count beside it. The roundings are independent,
so R of them along the way to a gradient add up as the root of the sum of their squares. One rounding's relative error,
uniform between -u and u for the smallest significands and -u/2 and u/2 for the largest, has the root mean square
u sqrt(7/36) = 0.44 u over significands spread evenly. Layers pass a perturbation on with a gain of about one (that is
what initialisation and layernorm are for), but the products in a backward step put the forward's error of one factor
beside the backward's of the other; we allow a gain of 2 for both together, thus 0.88 u sqrt(R), in the norm of each tensor.

On the way are, forward: the embedding, in each block ln_1, qkv, attention, its projection, the residual, ln_2, the GELU's
input and output, the projection, the residual, and at the end ln_f and the logits; backward: dlogits and the gradients of
ln_f and the residual, and in each block those of the GELU's input, ln_2, the residual, attention, qkv, ln_1, the residual.

The loss is a mean over N tokens of errors of the logits, which are independent between tokens in their roundings: it is
off by at most u sqrt(R) times the logits' spread, of which 1 is generous for our random models, over sqrt(N); and it has
a second-order term, the softmax's curvature, (u sqrt(R))^2.
"""

import math

UNIT_BF16 = 2.0**-8
FORWARD_ROUNDINGS = (3, 10)   # in all, and in each block
BACKWARD_ROUNDINGS = (3, 7)


def gradient_bound(dtype, layers):
    """Of |error| / |gradient|, in the norm of a tensor."""
    if dtype == "fp32":
        return 1e-5
    roundings = FORWARD_ROUNDINGS[0] + BACKWARD_ROUNDINGS[0] + layers * (FORWARD_ROUNDINGS[1] + BACKWARD_ROUNDINGS[1])
    return 0.88 * UNIT_BF16 * math.sqrt(roundings)


def loss_bound(dtype, layers, tokens):
    """Of |error|, in nats."""
    if dtype == "fp32":
        return 1e-5
    relative = UNIT_BF16 * math.sqrt(FORWARD_ROUNDINGS[0] + layers * FORWARD_ROUNDINGS[1])
    return relative / math.sqrt(tokens) + relative**2
