"""The required results of the operations on heads (llmc/device/ops.h, "heads"), as in reference_ops.py.

Heads lie inside wider rows. The elements outside of them must neither matter nor change.
"""

import dataclasses

import numpy as np
import torch

import bounded
from bounded import Bounded, constant
from cases import in_fp32, make_case, to_fp32

OUTSIDE = 77.0
OVERWRITTEN = 55.0


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

    def empty_rows(self, leading):
        """Rows whose heads are to be overwritten."""
        return self.rows_with(np.full((*leading, self.count, self.size), OVERWRITTEN))


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


# ---- the norm of heads


def shared_sums(terms, ranks):
    """The last axis of `terms`, in as many parts: (the sums of all parts in fp32 (R,N), their sum as Bounded (N,1,1), the
    part of this rank). The rank is the last one."""
    parts = np.array_split(terms, ranks, axis=-1)
    given, exact = zip(*(in_fp32(part.reshape(-1, part.shape[-1]).sum(-1)) for part in parts))
    total = bounded.stack(exact, axis=0).sum(0)
    return np.stack(given), total.rearranged(lambda x: x.reshape(*terms.shape[:-1], 1))


def own_part(whole, ranks):
    """The elements of the last rank."""
    return np.array_split(whole, ranks, axis=-1)[-1]


def torch_rms_norm(x, weight, eps):
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return x * rstd * weight, rstd


def norm_operands(make, leading, count, size, ranks, weight):
    x = make.normal(*leading, count, size, offset=0.3)
    return x, make.normal(size, offset=1.0) if weight else np.ones(size)


def mean_of(total, size):
    return total * constant(1 / size)


def head_norm_forward(make, *leading, count, size, first=0, more=0, out_first=0, out_more=0, ranks=0, eps=1e-6, weight=True):
    """`ranks` ranks share a row of one head of `size` elements; the last of them is called."""
    x, w = norm_operands(make, leading, count, size, ranks, weight)
    eps = float(np.float32(eps))
    exact, exact_rstd = torch_rms_norm(torch.tensor(x), torch.tensor(w), eps)
    parts = max(ranks, 1)
    inputs = {}
    if ranks:
        inputs["sums"], total = shared_sums(x * x, ranks)
        inputs["whole"] = np.array([float(size)])
    else:
        total = (Bounded(x) * x).sum(-1, keepdims=True)
    rstd = 1.0 / bounded.sqrt(mean_of(total, size) + eps)
    own_x, own_w = own_part(x, parts), own_part(w, parts)
    out = (Bounded(own_x) * rstd * own_w).stored(make.dtype)
    at, out_at = place(count, own_x.shape[-1], first, more), place(count, own_x.shape[-1], out_first, out_more)
    inputs |= {"in": at.rows_with(own_x), "in_heads": at.numbers(), "out": out_at.empty_rows(leading),
               "out_heads": out_at.numbers(), "eps": np.array([eps])}
    if weight:
        inputs["weight"] = own_w
    return make_case(inputs, {"out": out_at.rows_with(own_part(exact.numpy(), parts)), "rstd": exact_rstd.reshape(-1, count)},
                     {"out": out_at.bounded_rows_with(out), "rstd": rstd.reshape(-1, count)})


def head_norm_sums(make, *leading, size, first=0, more=0):
    at = place(1, size, first, more)
    x = make.normal(*leading, 1, size)
    exact = torch.tensor(x).square().sum(-1).reshape(-1)
    return make_case({"in": at.rows_with(x), "in_heads": at.numbers()}, {"sums": exact},
                     {"sums": (Bounded(x) * x).sum(-1).reshape(-1)})


def backward_operands(make, leading, count, size, ranks, weight):
    """(x, weight, dout, the rstd that is given, rstd as Bounded)"""
    x, w = norm_operands(make, leading, count, size, ranks, weight)
    dout = make.normal(*leading, count, size)
    given, rstd = in_fp32(1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6))
    return x, w, dout, given, rstd


def head_norm_backward(make, *leading, count, size, first=0, more=0, dout_first=0, dout_more=0, din_first=0, din_more=0, ranks=0,
                       weight=True, dweight=True, in_place=False):
    x, w, dout, given_rstd, rstd = backward_operands(make, leading, count, size, ranks, weight)
    x_leaf, w_leaf = (torch.tensor(t, requires_grad=True) for t in (x, w))
    torch_rms_norm(x_leaf, w_leaf, 1e-6)[0].backward(torch.tensor(dout))
    parts = max(ranks, 1)
    inputs = {}
    h, g = Bounded(x) * rstd, Bounded(dout) * w
    if ranks:
        inputs["sums"], total = shared_sums((h * g).value, ranks)
        inputs["whole"] = np.array([float(size)])
    else:
        total = (g * h).sum(-1, keepdims=True)
    part = lambda b: b.rearranged(lambda t: own_part(t, parts))
    din = (rstd * (part(g) - part(h) * mean_of(total, size))).stored(make.dtype)
    start = make.normal_fp32(size)
    own = own_part(x, parts).shape[-1]
    at, dout_at = place(count, own, first, more), place(count, own, dout_first, dout_more)
    din_at = dout_at if in_place else place(count, own, din_first, din_more)
    inputs |= {"in": at.rows_with(own_part(x, parts)), "in_heads": at.numbers(), "dout": dout_at.rows_with(own_part(dout, parts)),
               "dout_heads": dout_at.numbers(), "rstd": given_rstd.reshape(-1, count)}
    if weight:
        inputs["weight"] = own_part(w, parts)
    inputs |= {"din=dout": np.ones(1)} if in_place else {"din": din_at.empty_rows(leading)}
    inputs["din_heads"] = din_at.numbers()
    exact = {"din": din_at.rows_with(own_part(x_leaf.grad.numpy(), parts))}
    derived = {"din": din_at.bounded_rows_with(din)}
    if dweight:
        inputs["dweight"] = own_part(start, parts)
        exact["dweight"] = own_part(start + w_leaf.grad.numpy(), parts)
        derived["dweight"] = part((Bounded(dout) * h).reshape(-1, size).sum(0, onto=start))
    return make_case(inputs, exact, derived)


def head_norm_backward_sums(make, *leading, size, first=0, more=0, dout_first=0, dout_more=0, weight=True):
    x, w, dout, given_rstd, rstd = backward_operands(make, leading, 1, size, 0, weight)
    # PyTorch's gradient of rstd, where out = x rstd w, times rstd: the sum of g h.
    scale = torch.tensor(1 / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6), requires_grad=True)
    (torch.tensor(x) * scale * torch.tensor(w)).backward(torch.tensor(dout))
    at, dout_at = place(1, size, first, more), place(1, size, dout_first, dout_more)
    inputs = {"in": at.rows_with(x), "in_heads": at.numbers(), "dout": dout_at.rows_with(dout), "dout_heads": dout_at.numbers(),
              "rstd": given_rstd.reshape(-1)}
    if weight:
        inputs["weight"] = w
    derived = (Bounded(dout) * w * (Bounded(x) * rstd)).sum(-1).reshape(-1)
    return make_case(inputs, {"sums": (scale.grad * scale).detach().reshape(-1)}, {"sums": derived})
