"""The required results of the operations on heads (llmc/device/ops.h, "heads"), as in reference_ops.py. The names of operands
and results are those of test/probe/head_calls.h.

Heads lie inside wider rows. The elements outside of them must neither matter nor change.
"""

import dataclasses

import numpy as np
import torch

from bounded import Bounded
from cases import make_case, to_fp32

OUTSIDE = 77.0


@dataclasses.dataclass
class Place:
    """`count` heads of `size` elements, from element `first` of rows of `row` elements."""
    first: int
    count: int
    size: int
    row: int

    def slice(self):
        return slice(self.first, self.first + self.count * self.size)

    def numbers(self):
        return np.array([self.first, self.count, self.size], dtype=np.float64)

    def rows_with(self, heads):
        """Rows (..., row) with these heads (..., count, size) in them."""
        rows = np.full((*heads.shape[:-2], self.row), OUTSIDE)
        rows[..., self.slice()] = heads.reshape(*heads.shape[:-2], -1)
        return rows

    def bounded_rows_with(self, heads):
        error = self.rows_with(heads.error)
        return Bounded(self.rows_with(heads.value), np.where(self.rows_with(np.ones(heads.value.shape)) == 1.0, error, 0.0))


def place(count, size, first=0, more=0):
    """Heads with `more` elements behind them."""
    return Place(first, count, size, first + count * size + more)


# ---- rotary positions


def rope(make, *leading, count, size, first=0, more=0, position=0, longer=0, inverse=False):
    """`leading` is (B, T) or (n,). The table has `longer` more positions than needed."""
    at = place(count, size, first, more)
    x = make.normal(*leading, count, size)
    positions = position + leading[-1] + longer
    angle = make.random.uniform(-np.pi, np.pi, (positions, size // 2))
    table = to_fp32(np.stack([np.cos(angle), np.sin(angle)], axis=-1))
    cos, sin = (table[position:position + leading[-1], None, :, k] for k in range(2))
    sin = -sin if inverse else sin
    # The angle of a pair is that of a complex number, which is multiplied by cos + i sin.
    pairs = torch.complex(torch.tensor(x[..., :size // 2]), torch.tensor(x[..., size // 2:]))
    turned = pairs * torch.complex(torch.tensor(cos.copy()), torch.tensor(sin.copy()))
    exact = torch.cat([turned.real, turned.imag], dim=-1).numpy()
    low, high = Bounded(x[..., :size // 2]), Bounded(x[..., size // 2:])
    parts = [low * cos - high * sin, high * cos + low * sin]
    derived = Bounded(*(np.concatenate([getattr(part, of) for part in parts], axis=-1) for of in ("value", "error")))
    inputs = {"x": at.rows_with(x), "x_heads": at.numbers(), "angles": table, "position": np.array([float(position)]),
              "inverse": np.array([float(inverse)])}
    return make_case(inputs, {"x": at.rows_with(exact)}, {"x": at.bounded_rows_with(derived.stored(make.dtype))})
