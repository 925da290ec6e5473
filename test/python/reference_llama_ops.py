"""The required results of the operations for Llama-like models: RMS norm. See reference_ops.py."""

import numpy as np
import torch

import bounded
from bounded import Bounded
from cases import in_fp32, make_case, to_fp32
from reference_ops import leaf

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

