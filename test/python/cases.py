"""One call of an operation with its required results: random operands, exact results, bounds, and the comparison.

The operands of a Case are random and rounded to the dtype in which the device holds them. `expected` holds the results in
fp64 from these rounded operands. `bounds` says how far from them each element may be.
"""

import dataclasses

import numpy as np
import torch

import bounded
from bounded import Bounded

@dataclasses.dataclass
class Case:
    name: str
    inputs: dict
    expected: dict
    bounds: dict


class Maker:
    """Random operands for one case of an operation in a dtype. Where ops.h names a rounding of the GPU's own, bounds are those of
    the device."""

    def __init__(self, random, dtype, device="cpu"):
        self.random, self.dtype, self.device = random, dtype, device

    def normal(self, *shape, scale=1.0, offset=0.0):
        """An operand in the compute dtype."""
        return self.rounded(offset + scale * self.random.standard_normal(shape))

    def normal_fp32(self, *shape, scale=1.0):
        return to_fp32(scale * self.random.standard_normal(shape))

    def integers(self, low, high, *shape):
        return self.random.randint(low, high, shape).astype(np.float64)

    def rounded(self, x):
        return {"fp32": to_fp32, "fp16": to_fp16}.get(self.dtype, to_bf16)(x)


def to_fp32(x):
    return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def to_bf16(x):
    return torch.tensor(np.asarray(x)).to(torch.float32).to(torch.bfloat16).to(torch.float64).numpy()


def to_fp16(x):
    with np.errstate(over="ignore"):
        return to_fp32(x).astype(np.float16).astype(np.float64)


def in_fp32(exact):
    """An operand that the forward pass saved in fp32: (the device's number, the exact number with its distance from it)."""
    given = to_fp32(exact)
    return given, Bounded(exact, abs(given - exact))


def make_case(inputs, exact, derived):
    """`exact` are PyTorch's results. `derived` are the Bounded results of the formula in ops.h, or arrays if nothing is
    rounded."""
    expected, bounds = {}, {}
    for name, result in exact.items():
        expected[name] = np.asarray(result.detach() if isinstance(result, torch.Tensor) else result, dtype=np.float64)
        of_formula = bounded.bounded(derived[name])
        bounds[name] = np.where(np.isnan(expected[name]), 0.0, of_formula.error)  # NaN is what must be there
        with np.errstate(invalid="ignore"):  # infinity - infinity
            distance = abs(of_formula.value - expected[name])
        # fp64 against fp32: 2^-29 of the bound, with room for fp64's own sums. Where their terms cancel, these are off by the last
        # bits of the terms, which are as large as the tensor's elements.
        largest = np.max(abs(expected[name]), where=np.isfinite(expected[name]), initial=0.0)
        ok = (distance <= 1e-6 * bounds[name] + 2**-50 * largest) | np.isnan(expected[name]) | (of_formula.value == expected[name])
        assert ok.all(), f"{name}: the formula in ops.h is not what PyTorch computes"
    return Case("", inputs, expected, bounds)


def far_elements(result, expected, bound):
    """The elements that are not within their bounds, as a text; nothing if all are."""
    same = (result == expected) | (np.isnan(result) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        far = ~(same | (abs(result - expected) <= bound))
    if far.any():
        worst = tuple(int(i) for i in np.argwhere(far)[0])
        yield (f"{list(worst)} is {result[worst]!r}, not {expected[worst]!r} within {bound[worst]:.3g}; "
               f"{far.sum()} of {far.size} are off")
