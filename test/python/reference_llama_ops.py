"""The required results of the operations for Llama-like models: RMS norm, activations and the cap of logits. See reference_ops.py."""

import math

import numpy as np
import torch
import torch.nn.functional as F

import bounded
from bounded import Bounded
from cases import in_fp32, make_case, to_fp32
from reference_ops import capped, leaf, torch_capped

# The numbers that fp32 has for 1e-5 and 1e-6, which are the operand.
EPS = float(np.float32(1e-5))
SMALL_EPS = float(np.float32(1e-6))


# ---- RMS norm


def torch_rmsnorm(x, weight, eps):
    """(out, rstd)"""
    rstd = ((x * x).mean(-1, keepdim=True) + eps).rsqrt()
    out = x * rstd
    return out if weight is None else out * weight, rstd.flatten()


def rmsnorm_formula(x, weight, eps):
    """(out, rstd); rstd has a last axis of 1."""
    x = Bounded(x)
    rstd = 1.0 / bounded.sqrt((x * x).mean() + eps)
    out = x * rstd
    return out if weight is None else out * weight, rstd


def rmsnorm_results(x, weight, eps, dtype):
    """PyTorch's results and the formula's, by their names."""
    exact = torch_rmsnorm(leaf(x), None if weight is None else leaf(weight), eps)
    out, rstd = rmsnorm_formula(x, weight, eps)
    return dict(zip(("out", "rstd"), exact)), {"out": out.stored(dtype), "rstd": rstd.reshape(-1)}


def rmsnorm_weight(make, C, weight):
    """The optional operand, by its name."""
    return {"weight": make.normal(C, offset=1.0)} if weight else {}


def rmsnorm_forward(make, *shape, offset=0.0, scale=1.0, weight=True, eps=EPS):
    x, given = make.normal(*shape, offset=offset, scale=scale), rmsnorm_weight(make, shape[-1], weight)
    exact, derived = rmsnorm_results(x, given.get("weight"), eps, make.dtype)
    return make_case({"in": x, "eps": np.array([eps]), **given}, exact, derived)


def fused_residual_rmsnorm_forward(make, *shape, offset=0.0, weight=True, eps=EPS):
    in1, in2 = make.normal(*shape, offset=offset), make.normal(*shape)
    given = rmsnorm_weight(make, shape[-1], weight)
    # One fp32 addition and one rounding to X: the device's residual must be exactly this, in every bit.
    residual = make.rounded(to_fp32(in1 + in2))
    exact, derived = rmsnorm_results(residual, given.get("weight"), eps, make.dtype)
    return make_case({"in1": in1, "in2": in2, "eps": np.array([eps]), **given}, {"residual": residual, **exact},
                     {"residual": residual, **derived})


def rmsnorm_backward(make, *shape, offset=0.0, weight=True, want=("din", "dweight")):
    C = shape[-1]
    x, dout, w = make.normal(*shape, offset=offset), make.normal(*shape), make.normal(C, offset=1.0)
    start = {"din": make.normal(*shape), "dweight": make.normal_fp32(C)}
    x_leaf, w_leaf = leaf(x), leaf(w if weight else np.ones(C))
    out, rstd = torch_rmsnorm(x_leaf, w_leaf, EPS)
    out.backward(torch.tensor(dout))

    given_rstd, rstd = in_fp32(rstd.detach().numpy().reshape(*shape[:-1], 1))
    h = Bounded(x) * rstd
    g = Bounded(dout) * w if weight else Bounded(dout)
    through = rstd * (g - h * (g * h).mean())
    derived = {"din": (start["din"] + through).stored(make.dtype),
               "dweight": (Bounded(dout) * h).reshape(-1, C).sum(0, onto=start["dweight"])}
    inputs = {"in": x, "dout": dout, "rstd": given_rstd.reshape(-1), **({"weight": w} if weight else {})}
    gradients = {"din": x_leaf.grad, "dweight": w_leaf.grad}
    return make_case(inputs | {name: start[name] for name in want},
                     {name: start[name] + gradients[name].numpy() for name in want}, derived)


# ---- activations

# Values of a from both tails of the logistic function, and around 0.
SWIGLU_VALUES = [0.0, -0.0, 1e-30, -1e-30, 1e-4, -1e-4, 0.5, -0.5, -1.2784645, 3.0, -3.0, 20.0, -20.0, 80.0, -80.0, 1e4]


def logistic(x):
    """(s, 1 - s) of a Bounded x, by z = e^-|x|: the parts of 1/(1 + z) and z/(1 + z)."""
    negative = x.value < 0
    z = bounded.exp(Bounded(-abs(x.value), x.error))
    large = 1.0 / (1.0 + z)
    small = z * large
    choose = lambda a, b: Bounded(np.where(negative, a.value, b.value), np.where(negative, a.error, b.error))
    return choose(small, large), choose(large, small)


def swiglu_operand(make, shape, values):
    """in: both halves of a row side by side. With `values`, these are a, and b is random."""
    if values is None:
        return make.normal(*shape[:-1], 2 * shape[-1], scale=2.0)
    a = make.rounded(np.array(values))
    return np.stack([a, make.normal(len(values))]).reshape(1, -1)


def torch_swiglu(x):
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b


def swiglu_forward(make, *shape, values=None):
    x = swiglu_operand(make, shape, values)
    a, b = np.split(x, 2, axis=-1)
    out = Bounded(a) * logistic(Bounded(a))[0] * b
    return make_case({"in": x}, {"out": torch_swiglu(leaf(x))}, {"out": out.stored(make.dtype)})


def swiglu_backward(make, *shape, values=None, in_place=False):
    x = swiglu_operand(make, shape, values)
    a, b = np.split(x, 2, axis=-1)
    dout = make.normal(*a.shape)
    x_leaf = leaf(x)
    torch_swiglu(x_leaf).backward(torch.tensor(dout))
    s, rest = logistic(Bounded(a))
    ds = Bounded(dout) * s
    da, db = ds * b * (1.0 + Bounded(a) * rest), ds * a
    derived = Bounded(np.concatenate([da.value, db.value], axis=-1), np.concatenate([da.error, db.error], axis=-1))
    inputs = {"in": x, "dout": dout, **({"din=in": np.ones(1)} if in_place else {})}
    return make_case(inputs, {"din": x_leaf.grad}, {"din": derived.stored(make.dtype)})


def relu_squared_operand(make, shape, values):
    return make.normal(*shape) if values is None else make.rounded(np.array(values))


RELU_VALUES = [0.0, -0.0, 1e-10, -1e-10, 1.0, -1.0, 1e10, -1e30, math.nan, -math.inf]


def relu_squared_forward(make, *shape, values=None):
    x = relu_squared_operand(make, shape, values)
    positive = np.maximum(x, 0.0)
    return make_case({"in": x}, {"out": torch.relu(leaf(x))**2}, {"out": (Bounded(positive) * positive).stored(make.dtype)})


def relu_squared_backward(make, *shape, values=None, in_place=False):
    x = relu_squared_operand(make, shape, values)
    dout = make.normal(*x.shape)
    x_leaf = leaf(x)
    (torch.relu(x_leaf)**2).backward(torch.tensor(dout))
    inputs = {"in": x, "dout": dout, **({"din=dout": np.ones(1)} if in_place else {})}
    derived = (Bounded(2.0 * np.maximum(x, 0.0)) * dout).stored(make.dtype)
    return make_case(inputs, {"din": x_leaf.grad}, {"din": derived})


# ---- the cap of logits


CAP_VALUES = [0.0, -0.0, 1e-30, -1e-3, 0.5, -0.5, 7.0, -15.0, 40.0, -100.0, 1e4, -1e30]


def soft_cap(make, *shape, cap, values=None, scale=20.0, in_place=False):
    x = make.normal(*shape, scale=scale) if values is None else make.rounded(np.array(values))
    inputs = {"in": x, "cap": np.array([cap]), **({"out=in": np.ones(1)} if in_place else {})}
    return make_case(inputs, {"out": torch_capped(leaf(x), cap)}, {"out": capped(Bounded(x), cap)[0].stored(make.dtype)})
