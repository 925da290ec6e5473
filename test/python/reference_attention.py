"""The required results of attention (llmc/device/ops.h), like reference_ops.py those of the other operations."""

import math

import numpy as np
import torch

import bounded
from bounded import Bounded, constant, einsum
from cases import in_fp32, make_case
from reference_ops import leaf


class Attention:
    """The operands of attention: q (B,T,H,D), k and v (B,T,K,D), and where they lie.

    If `apart`, q, k and v are in tensors of their own, between elements that do not belong to them. Otherwise they are one after
    the other in rows of one tensor. With `integers`, they are whole numbers up to this size: the scores are then exact, as D is
    a power of 4. With sizes up to 12, scores lie far outside the range of exp. The backward pass uses smaller ones, because lse
    in fp32 has an error of u |lse|. With `window` W, a query sees the last W keys up to its own.
    """

    BESIDE = 77.0  # the elements beside the heads, which must neither matter nor change

    def __init__(self, make, B, T, H, D, K=None, window=0, apart=False, integers=0, offset=0.0):
        K = K or H
        self.rows, self.heads, self.window, self.apart = (B, T), (H, K, D), window, apart
        draw = lambda *shape: (make.integers(-integers, integers + 1, *shape) if integers
                               else make.normal(*shape, offset=offset))
        self.q, self.k, self.v = draw(B, T, H, D), draw(B, T, K, D), draw(B, T, K, D)
        # Each kernel reads 16 bytes at a time.
        self.firsts = (16, 0, 8) if apart else (0, H * D, (H + K) * D)
        age = np.arange(T)[:, None] - np.arange(T)
        self.seen = (age >= 0) & (age < (window or T))

    def tensors(self, q, k, v, prefix="", beside=BESIDE):
        """The tensors in which the operation finds, or leaves, arrays like q, k and v."""
        flat = [x.reshape(*x.shape[:-2], -1) for x in (q, k, v)]
        if not self.apart:
            return {prefix + "q": np.concatenate(flat, -1)}
        others = lambda x, columns: np.full((*x.shape[:-1], columns), beside)
        return {prefix + name: np.concatenate([others(x, first), x, others(x, 24 - first)], -1)
                for name, x, first in zip("qkv", flat, self.firsts)}

    def inputs(self, rows=slice(None)):
        parts = (x[:, rows] for x in (self.q, self.k, self.v))
        return self.tensors(*parts) | self.places() | ({"window": np.array([float(self.window)])} if self.window else {})

    def places(self, prefix=""):
        """Where q, k and v lie in their rows; k and v in the rows of q if they have none of their own."""
        H, K, D = self.heads
        heads = {f"{prefix}{name}_heads": np.array([first, count, D], dtype=float)
                 for name, first, count in zip("qkv", self.firsts, (H, K, K))}
        return heads if self.apart else heads | {f"{prefix}{name}={prefix}q": np.ones(1) for name in "kv"}

    def of_queries(self, x):
        """k or v with a head for each query head, repeated."""
        return x[:, :, np.arange(self.heads[0]) * self.heads[1] // self.heads[0]]

    def sums_over_queries(self, weights, x):
        """sum_t weights_tj x_t, Bounded (B,T,K,D), also over the query heads of each key head. weights (B,H,T,T), x (B,T,H,D)"""
        (B, T), (H, K, D) = self.rows, self.heads
        return einsum("bkgtj,btkgd->bjkd", weights.reshape(B, K, H // K, T, T), bounded.bounded(x).reshape(B, T, K, H // K, D))


def torch_attention(a, q, k, v):
    """(out, lse)"""
    shared = torch.arange(a.heads[0]) * a.heads[1] // a.heads[0]
    scores = torch.einsum("bthd,bjhd->bhtj", q, k[:, :, shared]) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~torch.tensor(a.seen), -math.inf)
    return torch.einsum("bhtj,bjhd->bthd", scores.softmax(-1), v[:, :, shared]), scores.logsumexp(-1)


def scaled(x):
    """q or k / sqrt(D): scaling these gives a greater bound than scaling their product."""
    return Bounded(x) * constant(x.shape[-1]**-0.5)


def scores_formula(a):
    return einsum("bthd,bjhd->bhtj", scaled(a.q), a.of_queries(a.k))


def attention_formula(a, dtype):
    """(out, lse). In bf16 a device may round the terms of the softmax before it multiplies them by v, but not their sum."""
    scores, seen = scores_formula(a), a.seen
    # The subtracted number cancels in out and is added in lse, so it contributes no error. If a running maximum is subtracted,
    # each rise multiplies the terms so far by exp(old - new). This happens at most MAXIMA times, each with the error of an exp
    # of a number up to the rise. The rises add up to the range of the scores.
    MAXIMA = 8
    greatest = np.where(seen, scores.value, -np.inf).max(-1, keepdims=True)
    least = np.where(seen, scores.value, np.inf).min(-1, keepdims=True)
    terms = bounded.exp((scores - greatest).where(seen)).where(seen)
    rescaling = bounded.UNIT * (MAXIMA * (bounded.FUNCTION_UNITS + 1) + greatest - least)
    terms = Bounded(terms.value, terms.error + rescaling * terms.largest)
    total = terms.sum(-1, keepdims=True)
    out = (einsum("bhtj,bjhd->bthd", terms.stored(dtype), a.of_queries(a.v)) *
           (1.0 / total).rearranged(lambda x: np.moveaxis(x, 1, 2)))
    return out, (greatest + bounded.log(total))[..., 0]


def attention_forward(make, B, T, H, D, **options):
    a = Attention(make, B, T, H, D, **options)
    exact_out, exact_lse = torch_attention(a, leaf(a.q), leaf(a.k), leaf(a.v))
    out, lse = attention_formula(a, make.dtype)
    return make_case(a.inputs(), {"out": exact_out, "lse": exact_lse}, {"out": out.stored(make.dtype), "lse": lse})


def attention_backward(make, B, T, H, D, **options):
    a, dout = Attention(make, B, T, H, D, **options), make.normal(B, T, H, D)
    leaves = leaf(a.q), leaf(a.k), leaf(a.v)
    exact_out, exact_lse = torch_attention(a, *leaves)
    exact_out.backward(torch.tensor(dout))

    # Saved by the forward pass: out rounded to X, lse rounded to fp32.
    given_out = make.rounded(exact_out.detach().numpy())
    out = Bounded(exact_out.detach().numpy(), abs(given_out - exact_out.detach().numpy()))
    given_lse, lse = in_fp32(exact_lse.detach().numpy())

    scores, seen = scores_formula(a), a.seen
    p = bounded.exp((scores - lse[..., None]).where(seen)).where(seen)
    D_t = (Bounded(dout) * out).sum(-1).rearranged(lambda x: np.moveaxis(x, 2, 1)[..., None])
    ds = (p * (einsum("bthd,bjhd->bhtj", dout, a.of_queries(a.v)) - D_t)).where(seen)
    # A device may round both before they are multiplied.
    p, ds = p.stored(make.dtype), ds.stored(make.dtype)
    derived = [einsum("bhtj,bjhd->bthd", ds, scaled(a.of_queries(a.k))),
               a.sums_over_queries(ds, scaled(a.q)), a.sums_over_queries(p, dout)]
    # Numbers that are not to be added to.
    before = a.tensors(*(make.normal(*x.shape) for x in (a.q, a.k, a.v)), prefix="d") | a.places("d")
    exact = a.tensors(*(x.grad.numpy() for x in leaves), prefix="d")
    derived = [x.stored(make.dtype) for x in derived]
    # Nothing is rounded beside the heads.
    values, errors = a.tensors(*(x.value for x in derived), prefix="d"), a.tensors(*(x.error for x in derived), prefix="d", beside=0.0)
    return make_case(a.inputs() | before | {"dout": dout, "out": given_out, "lse": given_lse}, exact,
                     {name: Bounded(values[name], errors[name]) for name in exact})


def attention_cached_forward(make, n, T, position, H, D, **options):
    """The last n rows of attention over position + n rows. The rows of the cache after these must not matter or change."""
    keys = position + n
    a = Attention(make, 1, keys, H, D, **options)
    exact, _ = torch_attention(a, leaf(a.q), leaf(a.k), leaf(a.v))
    out, _ = attention_formula(a, make.dtype)
    cache = make.rounded(np.full((T, 2, *a.k.shape[2:]), 77.0))
    filled = cache.copy()
    filled[:keys] = np.stack([a.k[0], a.v[0]], axis=1)
    cache[:position] = filled[:position]
    new = {name: array[0] if name in "qkv" else array for name, array in a.inputs(slice(position, keys)).items()}
    return make_case(new | {"cache": cache, "position": np.array([float(position)])},
                     {"out": exact[0, position:], "cache": filled},
                     {"out": out[0, position:].stored(make.dtype), "cache": Bounded(filled)})
