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


# By optimizer: the hyperparameters, and whether each tensor of its state has a sign.
OPTIMIZERS = {"adamw": ({"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}, (True, False)), "lion": ({"beta1": 0.9, "beta2": 0.99}, (True,)),
              "sgd": ({"momentum": 0.9, "nesterov": 0.0}, (True,)), "muon": ({"muon-momentum": 0.95}, ())}


def optimizer_update(make, n, segments, max_grad_norm, optimizer="adamw", step=3, norm_squared=None, gradients_in_x=False, rounding=None,
                     moments="fp32", has_master=True, loss_scale=1.0, small=None, factors=None, nesterov=False, in_bf16=False):
    """`segments`: begin, end, weight decay. `factors`: of their learning rates, except in the decay. `in_bf16`: the gradients. `norm_squared` replaces the gradients' squared norm; if it
    is not finite, nothing may change. `rounding`: the seed and the first element of stochastic rounding. State in 8 bits of the segment
    number `small` is in fp32."""
    X, rounding = make.dtype, rounding if make.dtype == "bf16" else None
    has_master = has_master or not rounding
    f = lambda x: float(np.float32(x))
    covered = np.zeros(n, dtype=bool)
    for begin, end, _ in segments:
        covered[begin:end] = True
    weights = (make.normal_fp32 if has_master else make.normal)(n, scale=0.02)
    weights[:n // 4] = 0.0  # to show the update alone
    gradients = (make.normal if gradients_in_x else make.normal_fp32)(n, scale=0.1 * loss_scale)
    if in_bf16:
        gradients = to_bf16(gradients)
    if moments == "uint8":  # second moments that are positive, but nearer to 0 than to any other number of the table
        gradients[::7] *= 2.0**-14
        gradients = make.rounded(gradients) if gradients_in_x else gradients
    gradients[~covered] = 0.0
    # Padding does not change. It is small, so that it does not hide an error in the norm of the whole.
    scales = lambda scale: np.where(covered, scale if step > 1 else 0.0, 1e-4)
    numbers, signs = OPTIMIZERS[optimizer]
    state = [scales(0.1) * make.random.standard_normal(n) if has_sign else scales(0.01) * make.random.standard_normal(n)**2 for has_sign in signs]
    if optimizer in ("lion", "sgd"):  # no momentum and no gradient
        state[0][1::5] = gradients[1::5] = 0.0
    squares = np.array([(gradients**2).sum() if norm_squared is None else norm_squared])
    numbers = {"step": step, "learning_rate": f(2e-3), **{name: f(x) for name, x in numbers.items()}, "max_grad_norm": max_grad_norm,
               "loss_scale": loss_scale}
    numbers |= {"nesterov": float(nesterov)} if optimizer == "sgd" else {}
    of_formula = [numbers[name] for name in OPTIMIZERS[optimizer][0]]
    begins_small = [0 if k == small else -1 for k in range(len(segments))]
    factors = factors or len(segments) * [1.0]
    inputs = {name: np.array([float(numbers[name])]) for name in ("step", "learning_rate", "max_grad_norm", "loss_scale")}
    inputs |= {"optimizer": np.array([float(list(OPTIMIZERS).index(optimizer))]), "numbers": np.array(of_formula),
               f"gradients:{X if gradients_in_x else 'bf16' if in_bf16 else 'fp32'}": gradients, "norm_squared": squares,
               "segments": np.array([[b, e, f(decay), place, factor] for (b, e, decay), place, factor in zip(segments, begins_small, factors)])}
    if rounding:
        inputs["rounding"] = np.array(rounding, dtype=np.float64)
    if moments == "bf16":
        inputs["rounding_of_state"] = np.array([11, 256], dtype=np.float64)

    # The state before the call: what the device holds, and the numbers that these are.
    is_small = np.zeros(n, dtype=bool)
    held = {}
    if moments == "uint8":
        if small is not None:
            is_small[slice(*segments[small][:2])] = True
        for number, has_sign in enumerate(signs):
            x, table = state[number], table_of_8_bits(has_sign)
            full = make.random.standard_normal(n) * 0.1 if has_sign else make.random.standard_normal(n)**2 * 0.01
            amax = to_fp32(abs(full).reshape(-1, BLOCK).max(-1))
            entries = entry_of(full / np.repeat(amax, BLOCK), table)  # those of the small tensor count as 0
            entries[::7] = np.searchsorted(table, 0.0)
            held |= {f"state{number + 1}:uint8": entries, f"amax{number + 1}": amax}
            held |= {f"packed{number + 1}": to_fp32(x[is_small])} if small is not None else {}
            state[number] = np.where(is_small, to_fp32(x), table[entries] * np.repeat(amax, BLOCK))
    else:
        state = [(to_bf16 if moments == "bf16" else to_fp32)(x) for x in state]
        held = {f"state{number + 1}:{moments}": x for number, x in enumerate(state)}
    held |= {f"master:{'fp32' if has_master else X}": weights}
    if X == "fp32" or not has_master:
        inputs["parameters=master"] = np.ones(1)
    else:
        held["parameters"] = make.rounded(weights)
    inputs |= held
    if not np.isfinite(squares[0]):
        unchanged = {name.split(":")[0]: x for name, x in held.items()}
        return make_case(inputs, unchanged, unchanged)

    parts = [(begin, end, f(decay), factor) for (begin, end, decay), factor in zip(segments, factors)]
    # A number in 8 bits is the product of an entry and the greatest magnitude.
    rounded = lambda x: Bounded(x, bounded.UNIT * abs(x) * (moments == "uint8") * ~is_small)
    derived = update_formula(optimizer, weights, [rounded(x) for x in state], gradients, parts, numbers, Bounded(squares)[0])
    # torch has no Lion, and this is half of its Muon.
    exact = ({name: x.value for name, x in derived.items()} if optimizer in ("lion", "muon")
             else torch_update(optimizer, weights, state, gradients, parts, numbers, squares[0]))
    results, bounds = {}, {}
    # Rounding away from the nearest number doubles the error, up to the whole distance of two bf16 numbers.
    twice = lambda x: Bounded(x.value, np.where(covered, x.error + 2 * (x.stored("bf16").error - x.error), 0.0))
    results["master"], bounds["master"] = exact["master"], derived["master"] if has_master else twice(derived["master"])
    if "parameters" in held:
        results["parameters"] = np.where(covered, exact["master"], held["parameters"])
        stored = twice(derived["master"]) if rounding else derived["master"].stored(X)
        bounds["parameters"] = Bounded(results["parameters"], np.where(covered, stored.error, 0.0))
    for number, has_sign in enumerate(signs):
        name = f"state{number + 1}"
        if moments != "uint8":
            results[name], bounds[name] = exact[name], twice(derived[name]) if moments == "bf16" else derived[name]
            continue
        in_8_bits = Bounded(np.where(is_small, 0.0, exact[name]), np.where(is_small, 0.0, derived[name].error))
        of_blocks, of_entries = stored_in_8_bits(in_8_bits, table_of_8_bits(has_sign))
        results |= {name: of_entries.value, f"amax{number + 1}": of_blocks.value}
        bounds |= {name: of_entries, f"amax{number + 1}": of_blocks}
        if small is not None:
            results[f"packed{number + 1}"] = exact[name][is_small]
            bounds[f"packed{number + 1}"] = Bounded(derived[name].value[is_small], derived[name].error[is_small])
    return make_case(inputs, results, bounds)


def torch_update(optimizer, weights, state, gradients, parts, numbers, squares):
    """`parts`: begin, end, weight decay, factor of the learning rate. AdamW's decay does not have it."""
    rate = numbers["learning_rate"]
    scale, limit = numbers["loss_scale"], numbers["max_grad_norm"]
    parameters = [torch.nn.Parameter(torch.tensor(weights[begin:end])) for begin, end, *_ in parts]
    groups = [{"params": [p], "weight_decay": decay / (factor if optimizer == "adamw" else 1), "lr": rate * factor}
              for p, (_, _, decay, factor) in zip(parameters, parts)]
    if optimizer == "adamw":
        made = torch.optim.AdamW(groups, betas=(numbers["beta1"], numbers["beta2"]), eps=numbers["eps"])
    else:
        made = torch.optim.SGD(groups, lr=1.0, momentum=numbers["momentum"], nesterov=numbers["nesterov"] != 0)
    names = ("exp_avg", "exp_avg_sq") if optimizer == "adamw" else ("momentum_buffer",)
    clip = min(1.0, limit / (math.sqrt(squares) / scale + 1e-6)) if limit > 0 else 1.0
    for parameter, (begin, end, *_) in zip(parameters, parts):
        parameter.grad = torch.tensor(clip / scale * gradients[begin:end])
        made.state[parameter] = {name: torch.tensor(x[begin:end]) for name, x in zip(names, state)}
        made.state[parameter] |= {"step": torch.tensor(numbers["step"] - 1.0)} if optimizer == "adamw" else {}
    made.step()
    results = {"master": weights.copy(), **{f"state{k + 1}": x.copy() for k, x in enumerate(state)}}
    for parameter, (begin, end, *_) in zip(parameters, parts):
        results["master"][begin:end] = parameter.detach().numpy()
        for number, name in enumerate(names):
            results[f"state{number + 1}"][begin:end] = made.state[parameter][name].detach().numpy()
    return results


def update_formula(optimizer, weights, state, gradients, parts, numbers, norm_squared):
    """Those of llmc/optim. `state` is Bounded."""
    scale = numbers["loss_scale"]
    before = {"master": Bounded(weights), **{f"state{k + 1}": x for k, x in enumerate(state)}}
    values = {name: x.value.copy() for name, x in before.items()}
    errors = {name: np.where(np.zeros(len(weights), bool), 0.0, x.error) for name, x in before.items()}
    clip = 1.0
    if numbers["max_grad_norm"] > 0:
        clip = bounded.minimum(numbers["max_grad_norm"] / (bounded.sqrt(norm_squared) * (1 / scale) + constant(1e-6)), 1.0)
    formula = {"adamw": adamw, "lion": lion, "sgd": sgd, "muon": muon}[optimizer]
    for begin, end, decay, factor in parts:
        part = lambda x: Bounded(x.value[begin:end], x.error[begin:end])
        g = Bounded(gradients[begin:end]) * (clip * (1 / scale))
        updated = formula(part(before["master"]), g, [part(x) for x in before.values()][1:], decay, factor, numbers)
        for name, x in zip(before, updated):
            values[name][begin:end], errors[name][begin:end] = x.value, x.error
    return {name: Bounded(values[name], errors[name]) for name in values}


def kept(w, decay, numbers):
    return w * (1.0 - numbers["learning_rate"] * constant(decay))


def adamw(w, g, state, decay, factor, numbers):
    rate = numbers["learning_rate"] * constant(factor)
    beta1, beta2, step = (numbers[name] for name in ("beta1", "beta2", "step"))
    first = beta1 * state[0] + constant(1 - beta1) * g
    second = beta2 * state[1] + constant(1 - beta2) * (g * g)
    # The bias corrections are as accurate as fp32 allows: 1 - beta^step must be computed in fp64, because it cancels in fp32.
    b1, b2 = constant(1 - beta1**step), constant(1 - beta2**step)
    w = kept(w, decay, numbers) - rate / b1 * first / (bounded.sqrt(second) / bounded.sqrt(b2) + numbers["eps"])
    return w, first, second


def lion(w, g, state, decay, factor, numbers):
    rate = numbers["learning_rate"] * constant(factor)
    beta1, beta2 = numbers["beta1"], numbers["beta2"]
    u = beta1 * state[0] + constant(1 - beta1) * g
    # Where rounding may change the sign, it may be any. Of zeros it is zero.
    unsure = (abs(u.value) <= u.error) & ((state[0].value != 0) | (g.value != 0))
    sign = Bounded(np.sign(u.value), np.where(unsure, 1 + abs(np.sign(u.value)), 0.0))
    return kept(w, decay, numbers) - rate * sign, beta2 * state[0] + constant(1 - beta2) * g


def sgd(w, g, state, decay, factor, numbers):
    rate = numbers["learning_rate"] * constant(factor)
    g = g + constant(decay) * w
    momentum = numbers["momentum"] * state[0] + g
    return w - rate * (g + numbers["momentum"] * momentum if numbers["nesterov"] else momentum), momentum


def muon(w, g, state, decay, factor, numbers):
    """The second half: g is the direction."""
    return (kept(w, decay, numbers) - numbers["learning_rate"] * constant(factor) * g,)


def momentum(make, n, segments, max_grad_norm, step=3, norm_squared=None, gradients="fp32", state="fp32", loss_scale=1.0):
    """Muon's. `segments`: begin, end."""
    f = lambda x: float(np.float32(x))
    covered = np.zeros(n, dtype=bool)
    for begin, end in segments:
        covered[begin:end] = True
    of = {"fp32": to_fp32, "bf16": to_bf16}
    g = of[gradients](make.random.standard_normal(n) * 0.1 * loss_scale)
    m = of[state](make.random.standard_normal(n) * 0.1)
    out = make.normal(n)
    mu = f(0.95)
    squares = np.array([(g[covered]**2).sum() if norm_squared is None else norm_squared])
    inputs = {"out": out, f"state:{state}": m, f"gradients:{gradients}": g, "norm_squared": squares, "step": np.array([float(step)]),
              "segments": np.array([[b, e, 0.0, -1, 1.0] for b, e in segments]), "numbers": np.array([mu]),
              "max_grad_norm": np.array([max_grad_norm]), "loss_scale": np.array([loss_scale])}
    if state == "bf16":
        inputs["rounding_of_state"] = np.array([11, 256], dtype=np.float64)
    if not np.isfinite(squares[0]):
        return make_case(inputs, {"out": out, "state": m}, {"out": out, "state": m})
    clip = 1.0
    if max_grad_norm > 0:
        clip = bounded.minimum(max_grad_norm / (bounded.sqrt(Bounded(squares)[0]) * (1 / loss_scale) + constant(1e-6)), 1.0)
    scaled = Bounded(g) * (clip * (1 / loss_scale))
    updated = mu * Bounded(m) + constant(1 - mu) * scaled
    direction = mu * updated + constant(1 - mu) * scaled
    # torch.optim.Muon's own lines.
    exact_clip = min(1.0, max_grad_norm / (math.sqrt(squares[0]) / loss_scale + 1e-6)) if max_grad_norm > 0 else 1.0
    exact_g, exact_m = torch.tensor(exact_clip / loss_scale * g), torch.tensor(m)
    exact_m.lerp_(exact_g, 1 - mu)
    exact_u = exact_g.lerp(exact_m, mu)
    twice = lambda x: Bounded(x.value, x.error + 2 * (x.stored("bf16").error - x.error))
    where = lambda of_call, before: Bounded(np.where(covered, of_call.value, before), np.where(covered, of_call.error, 0.0))
    return make_case(inputs, {"out": np.where(covered, exact_u, out), "state": np.where(covered, exact_m, m)},
                     {"out": where(direction.stored(make.dtype), out), "state": where(twice(updated) if state == "bf16" else updated, m)})


def copy_matrix(make, rows, columns, out_more=0, in_more=0, transposed=False):
    """`out_more`, `in_more`: numbers of a row that are not of the matrix."""
    x = make.normal(rows, columns + in_more)
    out = make.normal(*((columns, rows + out_more) if transposed else (rows, columns + out_more)))
    exact = out.copy()
    matrix = x[:, :columns].T if transposed else x[:, :columns]
    exact[:, :matrix.shape[1]] = matrix
    numbers = {"rows": rows, "columns": columns, "out_stride": out.shape[1], "in_stride": x.shape[1], "transposed": transposed}
    return make_case({"in": x, "out": out, **{name: np.array([float(number)]) for name, number in numbers.items()}}, {"out": exact},
                     {"out": exact})


def combine(make, *shape, a=3.4445, b=-4.775, y=True, norm_squared=None, in_place=None):
    f = lambda number: float(np.float32(number))
    x, y = make.normal(*shape), make.normal(*shape) if y else None
    value = f(a) * Bounded(x) + (f(b) * Bounded(y) if y is not None else Bounded(np.zeros(shape)))
    exact = torch.tensor(f(a) * x + (f(b) * y if y is not None else 0.0))
    inputs = {"x": x, "a": np.array([f(a)]), "b": np.array([f(b)]), **({"y": y} if y is not None else {}),
              **({f"out={in_place}": np.ones(1)} if in_place else {})}
    if norm_squared is not None:
        inputs["norm_squared"] = np.array([norm_squared])
        divisor = max(math.sqrt(norm_squared), 1e-7)
        value, exact = value * constant(1 / divisor), exact / divisor
    return make_case(inputs, {"out": exact}, {"out": value.stored(make.dtype)})


# ---- numbers in 8 bits (device/eight_bit_state.h)

BLOCK = 256


def table_of_8_bits(has_sign):
    entries = [0.0, 1.0]
    for decade in range(7):
        parts = (1 if has_sign else 2) << decade
        middles = [10.0**(decade - 6) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
        entries += middles + ([-x for x in middles] if has_sign else [])
    table = to_fp32(sorted(entries))
    if has_sign:
        table[0] = -1.0
    return table


def entry_of(shares, table):
    """The number of the nearest entry; of two, the smaller one. A positive second moment has none that is 0."""
    middles = (table[:-1] + table[1:]) / 2
    entries = np.searchsorted(middles, shares, side="left")
    return np.maximum(entries, (shares > 0) & (table[0] == 0))


def stored_in_8_bits(x, table):
    """(the greatest magnitude of each block, the entries), as Bounded: an entry may be that of any share that a device may
    compute."""
    blocks = abs(x.value).reshape(-1, BLOCK)
    amax = Bounded(blocks.max(-1), x.error.reshape(-1, BLOCK).max(-1))
    per_element = lambda per_block: np.repeat(per_block, BLOCK)
    divided = lambda value, by: np.divide(value, by, out=np.zeros_like(value), where=by > 0)
    exact = entry_of(divided(x.value, per_element(amax.value)), table)
    # The error of a share: that of the number, that of the greatest, and the division's. Their products are below a hundredth.
    greatest = per_element(amax.value)
    error = 1.01 * divided(x.error + abs(x.value) * (divided(per_element(amax.error), greatest) + bounded.UNIT), greatest)
    share = divided(x.value, greatest)
    low, high = entry_of(share - error, table), entry_of(share + error, table)
    return amax, Bounded(exact.astype(float), np.maximum(high - exact, exact - low).astype(float))


# ---- elementwise


# Halfway between two bf16 numbers, on either side of halfway, and all special values.
CAST_VALUES = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 1 + 2**-8 - 2**-20, -1 - 2**-8, 0.0, -0.0, 2.0**-130,
               2.0**-149, 3.4e38, 3.3895e38, -3.4e38, math.inf, -math.inf, math.nan]


def cast(make, *shape, half="bf16"):
    """All results are exact: PyTorch rounds to nearest, ties to even, as ops.h requires for X. `half`: of the numbers that become fp32."""
    x = np.concatenate([make.normal_fp32(*shape).reshape(-1), to_fp32(CAST_VALUES)])
    if make.dtype == "fp32":
        x = (to_fp16 if half == "fp16" else to_bf16)(x)
    rounded = x if make.dtype == "fp32" else make.rounded(x)
    return make_case({f"in:{half if make.dtype == 'fp32' else 'fp32'}": x}, {"out": rounded}, {"out": rounded})


def copy(make, *shape):
    x = make.integers(-100, 100, *shape) if make.dtype == "int32" else make.rounded(make.normal_fp32(*shape))
    return make_case({"in": x}, {"out": x}, {"out": x})


def fill(make, *shape, value):
    filled = np.full(shape, make.rounded(value) if make.dtype in ("fp32", "bf16", "fp16") else value)
    return make_case({"out": np.ones(shape), "value": np.array([value])}, {"out": filled}, {"out": filled})


def add(make, *shape, in_place=None):
    """Exact: one fp32 addition, one rounding."""
    a, b = make.normal(*shape), make.normal(*shape)
    exact = make.rounded(to_fp32(a + b))
    inputs = {"a": a, "b": b, **({f"out={in_place}": np.ones(1)} if in_place else {})}
    return make_case(inputs, {"out": exact}, {"out": exact})


def accumulate(make, *shape, in_x=False, rounding=(7, 128, 3)):
    """One fp32 addition, and one rounding to one of the two nearest numbers. `rounding`: seed, first element, count."""
    out, more = make.normal(*shape), (make.normal if in_x else make.normal_fp32)(*shape)
    exact = to_fp32(out + more)
    # Rounding away from the nearest number doubles the error, up to the whole distance of two bf16 numbers.
    error = 2 * Bounded(exact).stored(make.dtype).error
    inputs = {"out": out, f"in:{make.dtype if in_x else 'fp32'}": more, "rounding": np.array(rounding[:2], dtype=np.float64),
              "count": np.array([float(rounding[2])])}
    return make_case(inputs, {"out": exact}, {"out": Bounded(exact, error)})


def amax(make, n, before=0.0, special=None):
    x = make.normal(n)
    if special is not None:
        x[n // 2] = special
    greatest = np.maximum(before, abs(x).max(keepdims=True))  # NaN is the greatest
    return make_case({"out": np.array([before]), "x": x}, {"out": greatest}, {"out": greatest})


def quantise(make, n, amax, e5m2=False):
    """Exact: x times a power of two, to the nearest number of 4 or 3 bits (ties to even) up to the largest, divided by it again."""
    bits, least, largest = (2, -14, 57344.0) if e5m2 else (3, -6, 448.0)
    x = make.normal(n) * 2.0 ** make.integers(-20, 2, n)
    scale = 2.0 ** np.floor(np.log2(largest / amax))
    unit = 2.0 ** (np.maximum(np.frexp(x * scale)[1] - 1, least) - bits)
    exact = np.clip(np.round(x * scale / unit) * unit, -largest, largest) / scale
    inputs = {"x": x, "amax": np.array([amax]), "format": np.array([float(e5m2)])}
    return make_case(inputs, {"out": exact}, {"out": exact})


def all_finite(make, n, special=None, place=0):
    x = make.normal(n)
    if special is not None:
        x[place] = special
    flag = torch.isfinite(torch.tensor(x)).all().to(torch.float64).reshape(1)
    return make_case({"x": x}, {"flag": flag}, {"flag": flag.numpy()})
