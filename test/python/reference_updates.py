"""The required results of the norm, the update and the elementwise operations of llmc/device/ops.h, as in reference_ops.py."""

import math

import numpy as np
import torch

import bounded
from bounded import Bounded, constant, einsum
from cases import make_case, to_bf16, to_fp16, to_fp32

NORM_BLOCK = 1024


# ---- norm and update


def global_norm_squared(make, blocks):
    x = make.normal(blocks * NORM_BLOCK)
    rows = x.reshape(blocks, NORM_BLOCK)
    return make_case({"x": x}, {"partials": torch.linalg.vector_norm(torch.tensor(rows), dim=1)**2},
                     {"partials": einsum("kn,kn->k", rows, rows)})


def sum_fp64(make, *shape):
    x, start = make.normal_fp32(*shape), make.random.standard_normal(1)
    exact = math.fsum([*x.reshape(-1), *start])
    # n additions in fp64. Each has an error of 2^-53 of a partial sum.
    magnitude = abs(x).sum() + abs(start)
    return make_case({"x": x, "out": start}, {"out": np.array([exact])},
                     {"out": Bounded(np.array([exact]), 1.01 * x.size * 2.0**-53 * magnitude)})


def adamw(make, n, segments, steps, max_grad_norm, with_norm=False, norm_squared=None, gradients_in_x=False,
          rounding=None):
    """`norm_squared` replaces the gradients' squared norm. If it is not finite, nothing may change. `rounding` is the seed and
    the first element of stochastic rounding."""
    master = make.normal_fp32(n, scale=0.02)
    gradients = (make.normal if gradients_in_x else make.normal_fp32)(steps, n, scale=0.1)
    covered = np.zeros(n, dtype=bool)
    for begin, end, _ in segments:
        covered[begin:end] = True
    master[:n // 4] = 0.0  # to show the update alone
    gradients[:, ~covered] = 0.0
    # Padding does not change. It is small, so that it does not hide an error in the norm of the whole.
    m, v = (np.where(covered, 0.0, make.normal_fp32(n, scale=1e-4)) for _ in range(2))
    f = lambda x: float(np.float32(x))
    learning_rates = [f(1e-3 * (1 + k)) for k in range(steps)]
    beta1, beta2, eps = f(0.9), f(0.95), f(1e-8)
    squares = (gradients**2).sum(-1)
    inputs = {"master": master, "m": m, "v": v, "gradients": gradients,
              "norm_squared": np.zeros(steps) if with_norm else np.full(steps, norm_squared or squares),
              "segments": np.array([[b, e, f(decay)] for b, e, decay in segments]),
              "learning_rate": np.array(learning_rates), "beta1": np.array([beta1]), "beta2": np.array([beta2]),
              "eps": np.array([eps]), "max_grad_norm": np.array([max_grad_norm])}
    if with_norm:
        inputs["with_norm"] = np.ones(1)
    if gradients_in_x:
        inputs["gradients_in_x"] = np.ones(1)
    if rounding and make.dtype == "bf16":
        inputs["rounding"] = np.array(rounding, dtype=np.float64)
    if make.dtype != "fp32":
        inputs["parameters"] = make.rounded(master)
    if norm_squared is not None:
        unchanged = {name: inputs[name] for name in ("master", "m", "v", "parameters") if name in inputs}
        return make_case(inputs, unchanged, unchanged)

    exact = torch_adamw(master, m, v, gradients, segments, learning_rates, beta1, beta2, eps, max_grad_norm)
    # A block's sum of squares has an error of up to gamma(1024), and so has the norm computed from these sums.
    norms = Bounded(squares, (bounded.gamma(NORM_BLOCK) if with_norm else 0.0) * squares)
    derived = adamw_formula(master, m, v, gradients, segments, learning_rates, beta1, beta2, eps, max_grad_norm, norms)
    if make.dtype != "fp32":
        exact["parameters"] = np.where(covered, exact["master"], inputs["parameters"])
        stored = derived["master"].stored(make.dtype)
        # Rounding away from the nearest number doubles the error, up to the whole distance of two bf16 numbers.
        error = derived["master"].error + (2 if "rounding" in inputs else 1) * (stored.error - derived["master"].error)
        derived["parameters"] = Bounded(exact["parameters"], np.where(covered, error, 0.0))
    if with_norm:
        exact["norm_squared"], derived["norm_squared"] = squares, norms
    return make_case(inputs, exact, derived)


def torch_adamw(master, m, v, gradients, segments, learning_rates, beta1, beta2, eps, max_grad_norm):
    parameters = [torch.nn.Parameter(torch.tensor(master[b:e])) for b, e, _ in segments]
    groups = [{"params": [p], "weight_decay": float(np.float32(s[2]))} for p, s in zip(parameters, segments)]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(beta1, beta2), eps=eps)
    for gradient, learning_rate in zip(gradients, learning_rates):
        for parameter, group, (begin, end, _) in zip(parameters, optimizer.param_groups, segments):
            parameter.grad = torch.tensor(gradient[begin:end])
            group["lr"] = learning_rate
        if max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
        optimizer.step()
    results = {"master": master.copy(), "m": m.copy(), "v": v.copy()}
    for parameter, (begin, end, _) in zip(parameters, segments):
        state = optimizer.state[parameter]
        for name, x in (("master", parameter), ("m", state["exp_avg"]), ("v", state["exp_avg_sq"])):
            results[name][begin:end] = x.detach().numpy()
    return results


def adamw_formula(master, m, v, gradients, segments, learning_rates, beta1, beta2, eps, max_grad_norm, norms):
    values = {"master": master.copy(), "m": m.copy(), "v": v.copy()}
    errors = {name: np.zeros_like(x) for name, x in values.items()}
    for begin, end, decay in segments:
        w, first, second = (Bounded(x[begin:end]) for x in (master, m, v))
        for k, (gradient, learning_rate) in enumerate(zip(gradients, learning_rates)):
            clip = 1.0
            if max_grad_norm > 0:
                clip = bounded.minimum(max_grad_norm / (bounded.sqrt(norms[k]) + constant(1e-6)), 1.0)
            g = Bounded(gradient[begin:end]) * clip
            first = beta1 * first + constant(1 - beta1) * g
            second = beta2 * second + constant(1 - beta2) * (g * g)
            # The bias corrections are as accurate as fp32 allows: 1 - beta^step must be computed in fp64, because it cancels in
            # fp32.
            b1, b2 = constant(1 - beta1**(k + 1)), constant(1 - beta2**(k + 1))
            step_size = learning_rate / b1
            w = (w * (1.0 - learning_rate * constant(float(np.float32(decay))))
                 - step_size * first / (bounded.sqrt(second) / bounded.sqrt(b2) + eps))
        for name, x in (("master", w), ("m", first), ("v", second)):
            values[name][begin:end], errors[name][begin:end] = x.value, x.error
    return {name: Bounded(values[name], errors[name]) for name in values}


# ---- elementwise


# Halfway between two bf16 numbers, on either side of halfway, and all special values.
CAST_VALUES = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-8 - 2**-20, -1 - 2**-8, 0.0, -0.0, 2.0**-130,
               2.0**-149, 3.4e38, 3.3895e38, -3.4e38, math.inf, -math.inf, math.nan]


def cast(make, *shape):
    """All results are exact: PyTorch rounds to nearest, ties to even, as ops.h requires for X."""
    x = np.concatenate([make.normal_fp32(*shape).reshape(-1), to_fp32(CAST_VALUES)])
    if make.dtype == "fp32":
        x = to_bf16(x)
    rounded = to_fp16(x) if make.dtype == "fp16" else to_bf16(x)
    return make_case({"in": x}, {"out": rounded}, {"out": rounded})


def copy(make, *shape):
    x = make.integers(-100, 100, *shape) if make.dtype == "int32" else make.rounded(make.normal_fp32(*shape))
    return make_case({"in": x}, {"out": x}, {"out": x})


def fill(make, *shape, value):
    filled = np.full(shape, make.rounded(value) if make.dtype in ("fp32", "bf16", "fp16") else value)
    return make_case({"out": np.ones(shape), "value": np.array([value])}, {"out": filled}, {"out": filled})


def add(make, *shape, in_place=0):
    """Exact: one fp32 addition, one rounding."""
    a, b = make.normal(*shape), make.normal(*shape)
    exact = make.rounded(to_fp32(a + b))
    inputs = {"a": a, "b": b, **({"in_place": np.array([in_place])} if in_place else {})}
    name = ("out", "a", "b")[in_place]
    return make_case(inputs, {name: exact}, {name: exact})


def accumulate(make, *shape, in_x=False, rounding=(7, 128, 3)):
    """One fp32 addition, and one rounding to one of the two nearest numbers. `rounding`: seed, first element, count."""
    out, more = make.normal(*shape), (make.normal if in_x else make.normal_fp32)(*shape)
    exact = to_fp32(out + more)
    # Rounding away from the nearest number doubles the error, up to the whole distance of two bf16 numbers.
    error = 2 * Bounded(exact).stored(make.dtype).error
    inputs = {"out": out, "in": more, "rounding": np.array(rounding, dtype=np.float64), **({"in_x": np.ones(1)} if in_x else {})}
    return make_case(inputs, {"out": exact}, {"out": Bounded(exact, error)})


def amax(make, n, before=0.0, special=None):
    x = make.normal(n)
    if special is not None:
        x[n // 2] = special
    greatest = np.array([max(before, abs(x).max())])
    return make_case({"out": np.array([before]), "x": x}, {"out": greatest}, {"out": greatest})


def quantise(make, n, amax, e5m2=False):
    """Exact: x times a power of two, to the nearest number of 4 or 3 bits (ties to even) up to the largest, divided by it again."""
    bits, least, largest = (2, -14, 57344.0) if e5m2 else (3, -6, 448.0)
    x = make.normal(n) * 2.0 ** make.integers(-20, 2, n)
    scale = 2.0 ** np.floor(np.log2(largest / amax))
    unit = 2.0 ** (np.maximum(np.frexp(x * scale)[1] - 1, least) - bits)
    exact = np.clip(np.round(x * scale / unit) * unit, -largest, largest) / scale
    inputs = {"x": x, "amax": np.array([amax]), **({"e5m2": np.array([1.0])} if e5m2 else {})}
    return make_case(inputs, {"out": exact}, {"out": exact})


def all_finite(make, n, special=None, place=0):
    x = make.normal(n)
    if special is not None:
        x[place] = special
    flag = torch.isfinite(torch.tensor(x)).all().to(torch.float64).reshape(1)
    return make_case({"x": x}, {"flag": flag}, {"flag": flag.numpy()})
