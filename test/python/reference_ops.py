"""The required results of the model's operations (llmc/device/ops.h). One function for each operation makes a case of any size.

The exact results are PyTorch's in fp64, with derivatives by autograd. The bounds are derived (bounded.py) from the formula
in ops.h and the roundings that ops.h states. The formula's value is also computed, and must equal PyTorch's. The names of
operands and results are those of fields() (llmc/device/op_fields.h).
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

import bounded
from bounded import Bounded, constant, einsum
from cases import in_fp32, make_case, to_fp32
from reference_heads import place

IGNORED = -1


def leaf(x):
    return torch.tensor(x, dtype=torch.float64, requires_grad=True)


def index(x):
    return torch.tensor(x, dtype=torch.int64)


# ---- embedding


def table_part(tokens, rows):
    """For the part (first, end) of a table, or the whole if `rows` is None: (tokens as rows of the part, which of them are in
    it, the operation's operand)."""
    if rows is None:
        return tokens.astype(int), np.ones(tokens.shape, dtype=bool), {}
    first, end = rows
    here = (tokens >= first) & (tokens < end)
    return np.where(here, tokens - first, 0).astype(int), here, {"first_row": np.array([float(first)])}


def encoder_forward(make, B, T, C, V, longer=0, rows=None, with_wpe=True):
    """With `rows` = (first, end), only these rows of the table; the others count as 0."""
    tokens = make.integers(0, V, B, T)
    wte, wpe = make.normal(V, C), make.normal(T + longer, C)
    own, here, part = table_part(tokens, rows)
    wte = wte[:rows[1] - rows[0]] if rows else wte
    exact = torch.where(torch.tensor(here)[..., None], F.embedding(index(own), leaf(wte)), torch.zeros(()).double())
    out = Bounded(np.where(here[..., None], wte[own], 0.0))
    inputs = {"tokens": tokens, "wte": wte, **part}
    if with_wpe:
        inputs["wpe"] = wpe
        exact, out = exact + leaf(wpe)[:T], out + wpe[:T]
    return make_case(inputs, {"out": exact}, {"out": out.stored(make.dtype)})


def encoder_backward(make, B, T, C, V, longer=0, rows=None, with_dwpe=True):
    """With `rows` = (first, end), only these rows of the table."""
    tokens = make.integers(0, V, B, T)
    dout = make.normal(B, T, C)
    dwte, dwpe = make.normal_fp32(V, C), make.normal_fp32(T + longer, C)
    own, here, part = table_part(tokens, rows)
    dwte = dwte[:rows[1] - rows[0]] if rows else dwte
    wte, wpe = leaf(dwte), leaf(dwpe)  # the derivative does not depend on their values
    (F.embedding(index(own), wte) * torch.tensor(here)[..., None] + wpe[:T]).backward(torch.tensor(dout))

    dwte_bounded, dwpe_bounded = Bounded(dwte), Bounded(dwpe)
    dwte_error, dwpe_error = np.array(dwte_bounded.error), np.array(dwpe_bounded.error)
    dwte_value, dwpe_value = dwte.copy(), dwpe.copy()
    for row in range(len(dwte)):
        total = Bounded(dout[here & (own == row)]).sum(0, onto=dwte[row])
        dwte_value[row], dwte_error[row] = total.value, total.error
    total = Bounded(dout).sum(0, onto=dwpe[:T])
    dwpe_value[:T], dwpe_error[:T] = total.value, total.error
    inputs, exact = {"tokens": tokens, "dout": dout, "dwte": dwte, **part}, {"dwte": dwte + wte.grad.numpy()}
    bounded = {"dwte": Bounded(dwte_value, dwte_error)}
    if with_dwpe:
        inputs["dwpe"], exact["dwpe"] = dwpe, dwpe + wpe.grad.numpy()
        bounded["dwpe"] = Bounded(dwpe_value, dwpe_error)
    return make_case(inputs, exact, bounded)


# ---- layernorm


def layernorm_formula(x, gamma, beta):
    """(out, mean, rstd); mean and rstd have a last axis of 1. `beta` may be None."""
    x = Bounded(x)
    mean = x.mean()
    deviation = x - mean
    rstd = 1.0 / bounded.sqrt((deviation * deviation).mean() + constant(1e-5))
    scaled = deviation * rstd * gamma
    return scaled if beta is None else scaled + beta, mean, rstd


def torch_layernorm(x, gamma, beta):
    mean = x.mean(-1)
    rstd = (x.var(-1, unbiased=False) + 1e-5).rsqrt()
    return F.layer_norm(x, x.shape[-1:], gamma, beta), mean.flatten(), rstd.flatten()


def layernorm_results(x, gamma, beta=None):
    """PyTorch's (out, mean, rstd), and the formula's."""
    exact = torch_layernorm(leaf(x), leaf(gamma), None if beta is None else leaf(beta))
    return exact, layernorm_formula(x, gamma, beta)


def layernorm_parameters(make, C, with_beta):
    """gamma, and beta if requested, by their names."""
    parameters = {"gamma": make.normal(C, offset=1.0)}
    return parameters | ({"beta": make.normal(C)} if with_beta else {})


def layernorm_forward(make, *shape, offset=0.0, beta=True):
    x = make.normal(*shape, offset=offset)
    parameters = layernorm_parameters(make, shape[-1], beta)
    exact, (out, mean, rstd) = layernorm_results(x, **parameters)
    derived = {"out": out.stored(make.dtype), "mean": mean.reshape(-1), "rstd": rstd.reshape(-1)}
    return make_case({"in": x, **parameters}, dict(zip(("out", "mean", "rstd"), exact)), derived)


def fused_residual_layernorm_forward(make, *shape, offset=0.0, beta=True):
    in1, in2 = make.normal(*shape, offset=offset), make.normal(*shape)
    parameters = layernorm_parameters(make, shape[-1], beta)
    # One fp32 addition and one rounding to X: the device's residual must be exactly this, in every bit.
    residual = make.rounded(to_fp32(in1 + in2))
    exact, (out, mean, rstd) = layernorm_results(residual, **parameters)
    derived = {"residual": residual, "out": out.stored(make.dtype), "mean": mean.reshape(-1),
               "rstd": rstd.reshape(-1)}
    return make_case({"in1": in1, "in2": in2, **parameters},
                     {"residual": residual, **dict(zip(("out", "mean", "rstd"), exact))}, derived)


def layernorm_backward(make, *shape, offset=0.0, want=("din", "dgamma", "dbeta")):
    C = shape[-1]
    x, gamma, dout = make.normal(*shape, offset=offset), make.normal(C, offset=1.0), make.normal(*shape)
    din, dgamma, dbeta = make.normal(*shape), make.normal_fp32(C), make.normal_fp32(C)

    x_leaf, gamma_leaf, beta_leaf = leaf(x), leaf(gamma), leaf(np.zeros(C))
    exact, mean, rstd = torch_layernorm(x_leaf, gamma_leaf, beta_leaf)
    exact.backward(torch.tensor(dout))

    column = lambda t: t.detach().numpy().reshape(*shape[:-1], 1)
    given_mean, mean = in_fp32(column(mean))
    given_rstd, rstd = in_fp32(column(rstd))
    h = (Bounded(x) - mean) * rstd
    g = Bounded(dout) * gamma
    through = rstd * (g - g.mean() - h * (g * h).mean())
    derived = {"din": (din + through).stored(make.dtype),
               "dgamma": (Bounded(dout) * h).reshape(-1, C).sum(0, onto=dgamma),
               "dbeta": Bounded(dout).reshape(-1, C).sum(0, onto=dbeta)}
    start = {"din": din, "dgamma": dgamma, "dbeta": dbeta}
    inputs = {"in": x, "gamma": gamma, "dout": dout, "mean": given_mean.reshape(-1), "rstd": given_rstd.reshape(-1)}
    inputs |= {name: start[name] for name in want}
    gradients = {"din": x_leaf.grad, "dgamma": gamma_leaf.grad, "dbeta": beta_leaf.grad}
    return make_case(inputs, {name: start[name] + gradients[name].numpy() for name in want}, derived)


# ---- GELU and matrix products


def gelu_inner(x):
    """(sqrt(2/pi) (x + 0.044715 x^3), its derivative)"""
    square = x * x
    root = constant(math.sqrt(2 / math.pi))
    return root * (x + constant(0.044715) * square * x), root * (1.0 + constant(3 * 0.044715) * square)


def gelu_formula(x):
    return 0.5 * x * (1.0 + bounded.tanh(gelu_inner(x)[0]))


def gelu_derivative(x):
    inner, slope = gelu_inner(x)
    t = bounded.tanh(inner)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope


def torch_gelu(x):
    return F.gelu(x, approximate="tanh")


def gelu_operand(make, shape, values):
    return make.normal(*shape, scale=2.0) if values is None else make.rounded(np.array(values))


# From values with a GELU of 0 to values for which it is the identity. Then values whose x^3 is beyond fp32.
GELU_VALUES = [0.0, -0.0, 1e-30, -1e-30, 1e-4, -1e-4, 0.5, -0.5, 3.0, -3.0, 5.5, -5.5, 9.0, -9.0, 20.0, -20.0]
GELU_HUGE_VALUES = [1e4, -1e4, 1e13, -1e13, 1e30, -1e30]


def gelu_forward(make, *shape, values=None):
    x = gelu_operand(make, shape, values)
    return make_case({"in": x}, {"out": torch_gelu(leaf(x))}, {"out": gelu_formula(Bounded(x)).stored(make.dtype)})


def gelu_backward(make, *shape, values=None, in_place=False):
    x = gelu_operand(make, shape, values)
    dout = make.normal(*x.shape)
    x_leaf = leaf(x)
    torch_gelu(x_leaf).backward(torch.tensor(dout))
    inputs = {"in": x, "dout": dout, **({"din=dout": np.ones(1)} if in_place else {})}
    derived = (Bounded(dout) * gelu_derivative(Bounded(x))).stored(make.dtype)
    return make_case(inputs, {"din": x_leaf.grad}, {"din": derived})


def matmul_forward(make, *shape, OC, bias=True, gelu=False):
    IC = shape[-1]
    x, weight = make.normal(*shape), make.normal(OC, IC, scale=IC**-0.5)
    inputs = {"in": x, "weight": weight}
    if bias:
        inputs["bias"] = make.normal(OC)
    exact = F.linear(leaf(x), leaf(weight), leaf(inputs["bias"]) if bias else None)
    formula = einsum("ni,oi->no", x.reshape(-1, IC), weight, onto=inputs.get("bias", 0.0)).reshape(*shape[:-1], OC)
    return make_case(inputs, *matmul_results(exact, formula, gelu, make.dtype))


def matmul_results(exact, formula, gelu, dtype):
    stored = formula.stored(dtype)
    if not gelu:
        return {"out": exact}, {"out": stored}
    # The bound of out includes the rounding of pre_gelu to X, because out is computed from the rounded number.
    out = gelu_formula(stored).stored(dtype)
    return {"pre_gelu": exact, "out": torch_gelu(exact)}, {"pre_gelu": stored, "out": out}


def matmul_backward(make, *shape, OC, gelu=False, want=("din", "dweight", "dbias")):
    IC = shape[-1]
    dout, weight = make.normal(*shape[:-1], OC), make.normal(OC, IC, scale=OC**-0.5)
    pre_gelu = make.normal(*shape)
    x = make.rounded(torch_gelu(torch.tensor(pre_gelu)).numpy()) if gelu else pre_gelu
    inputs = {"dout": dout, "in": x, "weight": weight}
    if gelu:
        inputs["pre_gelu"] = pre_gelu
    start = {"dweight": make.normal_fp32(OC, IC), "dbias": make.normal_fp32(OC)}
    inputs |= {name: start[name] for name in start if name in want}

    # dweight gets `in` rounded to X. din goes back through the GELU of pre_gelu, whatever its value.
    x_leaf, weight_leaf, bias_leaf, pre_leaf = leaf(x), leaf(weight), leaf(np.zeros(OC)), leaf(pre_gelu)
    F.linear(x_leaf, weight_leaf, bias_leaf).backward(torch.tensor(dout))
    F.linear(torch_gelu(pre_leaf) if gelu else pre_leaf, torch.tensor(weight)).backward(torch.tensor(dout))
    exact = {"din": pre_leaf.grad, "dweight": start["dweight"] + weight_leaf.grad.numpy(),
             "dbias": start["dbias"] + bias_leaf.grad.numpy()}

    rows = dout.reshape(-1, OC)
    din = einsum("no,oi->ni", rows, weight).reshape(*shape)
    if gelu:
        # A GPU's product is stored before it is multiplied.
        din = (din if make.device == "cpu" else din.stored(make.dtype)) * gelu_derivative(Bounded(pre_gelu))
    derived = {"din": din.stored(make.dtype), "dbias": Bounded(rows).sum(0, onto=start["dbias"]),
               "dweight": einsum("no,ni->oi", rows, x.reshape(-1, IC), onto=start["dweight"])}
    return make_case(inputs, {name: exact[name] for name in want}, derived)


def matmul_add(make, rows, inner, columns, out=(0, 0), a=(0, 0), b=(0, 0), scale=1.0, a_transposed=False, b_transposed=False,
               to_sums=False):
    """`out`, `a` and `b`: (columns before the operand, columns behind it)."""
    x, y = make.normal(rows, inner), make.normal(inner, columns, scale=inner**-0.5)
    start = (make.normal_fp32 if to_sums else make.normal)(rows, columns)
    exact = torch.tensor(start) + scale * (torch.tensor(x) @ torch.tensor(y))
    derived = scale * einsum("nk,km->nm", x, y) + start
    places = {name: place(1, matrix.shape[-1], *more)
              for name, matrix, more in (("out", start, out), ("a", x.T if a_transposed else x, a), ("b", y.T if b_transposed else y, b))}
    at = lambda name, matrix: places[name].rows_with(matrix[:, None, :])
    inputs = {"out:fp32" if to_sums else "out": at("out", start), "a": at("a", x.T if a_transposed else x),
              "b": at("b", y.T if b_transposed else y), "scale": np.array([scale]),
              "a_transposed": np.array([float(a_transposed)]), "b_transposed": np.array([float(b_transposed)])}
    inputs |= {f"{name}_heads": of.numbers() for name, of in places.items()}
    derived = derived if to_sums else derived.stored(make.dtype)
    return make_case(inputs, {"out": at("out", exact.numpy())},
                     {"out": places["out"].bounded_rows_with(derived.rearranged(lambda t: t[:, None, :]))})


# As bitsandbytes has them; long_adapters.py compares.
NF4_LEVELS = np.array([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])


def dequantise_nf4(make, blocks):
    """Blocks of 64 numbers: 32 bytes of pairs of indices, the first of a pair in the high half, and the greatest magnitude in fp32."""
    indices = make.random.randint(0, 16, (blocks, 64))
    most = np.abs(make.normal_fp32(blocks))
    most[-1] = 0.0 if blocks > 1 else most[-1]
    pairs = (indices[:, 0::2] << 4 | indices[:, 1::2]).astype(np.uint8)
    stored = np.concatenate([pairs, most.astype("<f4").view(np.uint8).reshape(blocks, 4)], axis=1).reshape(-1)
    exact = (NF4_LEVELS[indices] * most[:, None]).reshape(-1)
    return make_case({"in": stored.astype(np.float64)}, {"out": exact},
                     {"out": (Bounded(NF4_LEVELS[indices]) * most[:, None]).stored(make.dtype).rearranged(lambda t: t.reshape(-1))})


# ---- classifier


def capped(x, cap):
    """(y, dy/dx) of Bounded logits: y = cap tanh(x/cap), by t = e^(-2|x|/cap), or x itself if cap is 0."""
    if not cap:
        return x, 1.0
    exponent = Bounded(-abs(x.value), x.error) * constant(2 / cap)
    far = exponent.value < -200.0  # both e^-200 and all below are lost in fp32
    t = bounded.exp(Bounded(np.where(far, -200.0, exponent.value), np.where(far, 0.0, exponent.error)))
    reciprocal = 1.0 / (1.0 + t)
    return cap * ((1.0 - t) * reciprocal) * np.sign(x.value), 4.0 * t * reciprocal * reciprocal


def exponentials(make, y, greatest):
    """exp(y - greatest). A GPU computes powers of two: 2^(log2(e) y - log2(e) greatest), of which each term is rounded."""
    if make.device == "cpu":
        return bounded.exp(y - greatest)
    log2_e = constant(math.log2(math.e))
    exponent = y * log2_e - bounded.bounded(greatest) * log2_e
    return bounded.exp(exponent.rearranged(lambda x: x * math.log(2)))


def torch_capped(x, cap):
    return cap * torch.tanh(x / cap) if cap else x


def terms_given(cap, z_loss):
    """The operands of ClassifierTerms that are not 0."""
    return {name: np.array([value]) for name, value in (("cap", cap), ("z_loss", z_loss)) if value}


def torch_classifier(logits, targets, scale, z_loss):
    """The losses of (capped) logits; their derivatives are those of scale sum(loss + z lse^2)."""
    losses = F.cross_entropy(logits, index(targets), ignore_index=IGNORED, reduction="none")
    of_z = (logits.logsumexp(-1)**2 * torch.tensor(targets != IGNORED)).sum() * z_loss
    ((losses.sum() + of_z) * scale).backward()
    return losses


def term_factor(total, greatest, z_loss):
    """1/sum, and with a z-loss also 1 + 2 z lse."""
    reciprocal = 1.0 / total
    return reciprocal * (1.0 + 2.0 * z_loss * (bounded.log(total) + greatest)) if z_loss else reciprocal


def fused_classifier(make, N, V, Vp, ignored=0, write_dlogits=True, large=False, spread=3.0, cap=0.0, z_loss=0.0):
    """With `large`, multiples of 1/8 up to 100: the differences are exact, and far beyond the range of exp."""
    logits = make.integers(-800, 801, N, Vp) / 8 if large else make.normal(N, Vp, scale=spread)
    logits = make.rounded(logits)
    logits[:, V:] = 120.0  # must not matter
    targets = make.integers(0, V, N)
    targets[:ignored] = IGNORED
    scale = float(np.float32(1 / (3 * N)))

    logits_leaf = leaf(logits)
    losses = torch_classifier(torch_capped(logits_leaf[:, :V], cap), targets, scale, z_loss)

    kept = targets != IGNORED
    row, slope = capped(Bounded(logits[:, :V]), cap)
    greatest = row.value.max(-1, keepdims=True)
    terms = exponentials(make, row, greatest)
    total = terms.sum(-1, keepdims=True)
    picked = np.eye(V)[np.where(kept, targets, 0).astype(int)]
    target_logit = row[np.arange(N), np.where(kept, targets, 0).astype(int)].reshape(-1, 1)
    # The three terms may be added in any order.
    loss = bounded.stack([bounded.log(total), Bounded(greatest), Bounded(-target_logit.value, target_logit.error)],
                         axis=0).sum(0)[:, 0]
    dlogits = (terms * term_factor(total, greatest, z_loss) - picked) * scale
    dlogits = (dlogits * slope if cap else dlogits).stored(make.dtype).where(kept[:, None])
    padded = dlogits.rearranged(lambda x: np.pad(x, ((0, 0), (0, Vp - V))))
    derived = {"losses": loss.where(kept), "logits": padded if write_dlogits else logits}
    inputs = {"logits": logits, "targets": targets, "vocabulary": np.array([V]), "scale": np.array([scale]),
              "write_dlogits": np.array([float(write_dlogits)]), **terms_given(cap, z_loss)}
    return make_case(inputs, {"losses": losses, "logits": logits_leaf.grad if write_dlogits else logits}, derived)


def rank_columns(parts, rank):
    """(first, columns) of a rank; `parts` are the columns of each rank."""
    return sum(parts[:rank]), parts[rank]


def row_statistics(make, logits, kept, targets, first, columns, cap=0.0):
    """Bounded (N,3) for these columns of the capped logits: maximum, sum of exponentials, the target's logit."""
    y = capped(Bounded(logits[:, first:first + columns]), cap)[0]
    part = torch_capped(torch.tensor(y.value if not cap else logits[:, first:first + columns]), cap).numpy()
    if columns == 0:
        nothing = np.tile([-math.inf, 0.0, 0.0], (len(logits), 1))
        return Bounded(nothing), nothing
    greatest = part.max(-1, keepdims=True)
    # The greatest is that of the device, with the error of a capped logit.
    greatest_error = y.error.max(-1, keepdims=True)
    total = exponentials(make, y, Bounded(greatest, greatest_error)).sum(-1)
    picked = np.where((targets >= first) & (targets < first + columns), targets - first, -1).astype(int)
    logit = np.where(picked >= 0, part[np.arange(len(part)), picked], 0.0)
    shifted = torch.tensor(part - greatest)
    exact = np.stack([greatest[:, 0], shifted.logsumexp(-1).exp().numpy(), logit], axis=1)
    value = np.stack([greatest[:, 0], total.value, logit], axis=1)
    logit_error = np.where(picked >= 0, y.error[np.arange(len(part)), picked], 0.0)
    error = np.stack([greatest_error[:, 0], total.error, logit_error], axis=1)
    nothing = [-math.inf, 0.0, 0.0]
    value[~kept], exact[~kept], error[~kept] = nothing, nothing, 0.0
    return Bounded(value, error), exact


def classifier_operands(make, N, V, ignored, large, spread):
    logits = make.rounded(make.integers(-800, 801, N, V) / 8 if large else make.normal(N, V, scale=spread))
    targets = make.integers(0, V, N)
    targets[:ignored] = IGNORED
    return logits, targets


def own_logits(make, logits, first, columns, Vp):
    own = np.full((len(logits), Vp), 120.0)  # padding must not matter
    own[:, :columns] = logits[:, first:first + columns]
    return make.rounded(own)


def classifier_statistics(make, N, parts, rank, Vp, ignored=0, large=False, spread=3.0, cap=0.0):
    """`parts` are the columns of each rank."""
    logits, targets = classifier_operands(make, N, sum(parts), ignored, large, spread)
    first, columns = rank_columns(parts, rank)
    derived, exact = row_statistics(make, logits, targets != IGNORED, targets, first, columns, cap)
    inputs = {"logits": own_logits(make, logits, first, columns, Vp), "targets": targets,
              "columns": np.array([float(columns)]), "first_column": np.array([float(first)]), **terms_given(cap, 0.0)}
    return make_case(inputs, {"statistics": exact}, {"statistics": derived})


def classifier_from_statistics(make, N, parts, rank, Vp, ignored=0, write_dlogits=True, large=False, spread=3.0, cap=0.0,
                               z_loss=0.0):
    """From statistics that are as exact as fp32 allows."""
    V = sum(parts)
    logits, targets = classifier_operands(make, N, V, ignored, large, spread)
    first, columns = rank_columns(parts, rank)
    scale = float(np.float32(1 / (3 * N)))
    logits_leaf = leaf(logits)
    losses = torch_classifier(torch_capped(logits_leaf, cap), targets, scale, z_loss)

    kept = targets != IGNORED
    given, maxima, sums, target_logits = [], [], [], []
    for r in range(len(parts)):
        statistics = row_statistics(make, logits, kept, targets, *rank_columns(parts, r), cap)[1]
        stored, bounded_statistics = in_fp32(np.where(np.isfinite(statistics), statistics, 0.0))
        given.append(np.where(np.isfinite(statistics), stored, statistics))
        maxima.append(bounded_statistics[:, 0])
        target_logits.append(bounded_statistics[:, 2])
        sums.append(bounded_statistics[:, 1])
    # A rank without columns adds exactly nothing, and so does one so far below that its exp is 0.
    M = np.where(kept, np.max([m.value for m, columns_of_rank in zip(maxima, parts) if columns_of_rank], axis=0), 0.0)
    rescaled = [s * exponentials(make, Bounded(np.maximum(m.value, -1e4), m.error), M) if parts[r] else s * 0.0
                for r, (m, s) in enumerate(zip(maxima, sums))]
    S = bounded.stack(rescaled, axis=0).sum(0)
    S = Bounded(np.where(kept, S.value, 1.0), np.where(kept, S.error, 0.0))
    picked = np.eye(V)[np.where(kept, targets, 0).astype(int)]
    target_logit = Bounded(sum(t.value for t in target_logits), sum(t.error for t in target_logits))
    loss = bounded.stack([bounded.log(S), Bounded(M), Bounded(-target_logit.value, target_logit.error)], axis=0).sum(0)
    y, slope = capped(Bounded(logits), cap)
    terms = exponentials(make, y, M[:, None])
    dlogits = (terms * term_factor(S, Bounded(M), z_loss)[:, None] - picked) * scale
    dlogits = (dlogits * slope if cap else dlogits).stored(make.dtype).where(kept[:, None])
    own = lambda x: np.pad(x[:, first:first + columns], ((0, 0), (0, Vp - columns)))
    unchanged = own_logits(make, logits, first, columns, Vp)
    inputs = {"logits": unchanged, "targets": targets, "all_statistics": np.stack(given),
              "columns": np.array([float(columns)]), "first_column": np.array([float(first)]),
              "scale": np.array([scale]), "write_dlogits": np.array([float(write_dlogits)]), **terms_given(cap, z_loss)}
    exact = own(logits_leaf.grad.numpy()) if write_dlogits else unchanged
    return make_case(inputs, {"losses": losses, "logits": exact},
                     {"losses": loss.where(kept), "logits": dlogits.rearranged(own) if write_dlogits else unchanged})
