"""Numbers with a proven bound on the rounding error with which a device computes them.

A Bounded carries the exact value and a bound on the distance of the device's fp32 number from it. (The value is in fp64,
whose own errors are 2^-29 of the bounds.) Each operation adds the error of its own rounding and propagates the errors of
its operands. This is the standard model of floating-point arithmetic (Higham, "Accuracy and Stability of Numerical
Algorithms", chapters 2 and 3). So writing an operation's formula with Bounded numbers derives the tolerance of its result.

    fl(a op b) = (a op b)(1 + d),  |d| <= u = 2^-24        fp32 rounds to nearest with 24 bits
    sum of n terms:  error <= g(n-1) sum |terms|, g(k) = k u / (1 - k u), in any order, with or without fma
    exp, log, sqrt: within 4 units in the last place, that is 8 u |result|; tanh within 8 u, as if computed by exp
    a result below the smallest normal number, 2^-126, may be lost
    storing in bf16:  rounds to nearest with 8 bits, so another 2^-8 |result|
    storing in fp16:  with 11 bits, so another 2^-11 |result|; below 2^-14 to multiples of 2^-24, so another 2^-25
"""

import numpy as np

UNIT = 2.0**-24
UNITS_OF_16_BITS = {"bf16": (2.0**-8, 0.0), "fp16": (2.0**-11, 2.0**-25)}  # relative, absolute
FUNCTION_UNITS = 8
TINY = 2.0**-126


def gamma(roundings):
    return roundings * UNIT / (1 - roundings * UNIT)


class Bounded:
    __array_ufunc__ = None  # array * Bounded calls our operator, not numpy's

    def __init__(self, value, error=0.0):
        self.value = np.asarray(value, dtype=np.float64)
        self.error = np.broadcast_to(error, self.value.shape)

    @property
    def largest(self):
        """The greatest magnitude that the device's number may have."""
        return abs(self.value) + self.error

    def __add__(self, other):
        other = bounded(other)
        return _rounded(self.value + other.value, self.error + other.error)

    def __sub__(self, other):
        other = bounded(other)
        return _rounded(self.value - other.value, self.error + other.error)

    def __mul__(self, other):
        other = bounded(other)
        error = self.largest * other.error + self.error * abs(other.value)
        return _rounded(self.value * other.value, error)

    def __truediv__(self, other):
        other = bounded(other)
        value = self.value / other.value
        return _rounded(value, (self.error + abs(value) * other.error) / (abs(other.value) - other.error))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other):
        return bounded(other) - self

    def __rtruediv__(self, other):
        return bounded(other) / self

    def __getitem__(self, index):
        return Bounded(self.value[index], self.error[index])

    def rearranged(self, f):
        """f rearranges the elements: reshape, moveaxis, pad, ..."""
        return Bounded(f(self.value), f(self.error))

    def reshape(self, *shape):
        return self.rearranged(lambda x: x.reshape(shape))

    def where(self, condition):
        """Zero, without error, at elements where the condition is false."""
        return self.rearranged(lambda x: np.where(condition, x, 0.0))

    def sum(self, axis, keepdims=False, onto=None):
        """The sum along an axis, added to `onto` if given."""
        onto = bounded(0.0 if onto is None else onto)
        terms = self.value.shape[axis] + 1
        total = lambda x: x.sum(axis=axis, keepdims=keepdims)
        return Bounded(total(self.value) + onto.value, total(self.error) + onto.error
                       + gamma(terms - 1) * (total(self.largest) + onto.largest))

    def mean(self, keepdims=True):
        """The mean over the last axis: a sum, times a rounded 1/n (this error is larger than that of a division by n)."""
        return self.sum(-1, keepdims) * constant(1 / self.value.shape[-1])

    def stored(self, dtype):
        """Rounded to the dtype of the result. An fp32 number does not change."""
        if dtype == "fp32":
            return self
        relative, absolute = UNITS_OF_16_BITS[dtype]
        return Bounded(self.value, self.error + relative * self.largest + absolute)


def bounded(x):
    return x if isinstance(x, Bounded) else Bounded(x)


def stack(parts, axis):
    return Bounded(np.stack([part.value for part in parts], axis), np.stack([part.error for part in parts], axis))


def constant(value):
    """A constant that fp32 may not represent exactly."""
    return _rounded(np.asarray(value, dtype=np.float64), 0.0)


def _rounded(value, error, units=1):
    return Bounded(value, error + units * UNIT * (abs(value) + error) + TINY)


def einsum(subscripts, a, b, onto=0.0):
    """numpy's einsum of two operands, added to `onto`."""
    a, b, onto = bounded(a), bounded(b), bounded(onto)
    operands, result = subscripts.split("->")
    sizes = {}
    for letters, x in zip(operands.split(","), (a, b)):
        sizes.update(zip(letters, x.value.shape))
    terms = np.prod([size for letter, size in sizes.items() if letter not in result])
    product = lambda x, y: np.einsum(subscripts, x, y)
    propagated = product(a.largest, b.error) + product(a.error, abs(b.value))
    # One rounding of each product and one of each addition. Each product below TINY may also be lost.
    rounding = gamma(terms + 1) * (product(a.largest, b.largest) + onto.largest) + terms * TINY
    return Bounded(product(a.value, b.value) + onto.value, propagated + onto.error + rounding)


def exp(x):
    value = np.exp(x.value)
    return _rounded(value, value * np.expm1(x.error), FUNCTION_UNITS)


def log(x):
    return _rounded(np.log(x.value), -np.log1p(-x.error / x.value), FUNCTION_UNITS)


def sqrt(x):
    # The root is steepest towards 0.
    value = np.sqrt(x.value)
    return _rounded(value, value - np.sqrt(np.maximum(x.value - x.error, 0.0)), FUNCTION_UNITS)


def tanh(x):
    # The derivative 1 - tanh^2 is greatest at the argument nearest to 0.
    nearest = np.maximum(abs(x.value) - x.error, 0.0)
    error = x.error * (1 - np.tanh(nearest)**2)
    return Bounded(np.tanh(x.value), error + FUNCTION_UNITS * UNIT)


def minimum(x, limit):
    """min(x, limit), for an exact limit."""
    return Bounded(np.minimum(x.value, limit), np.where(x.value - x.error > limit, 0.0, x.error))
