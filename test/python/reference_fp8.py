"""The required results of products in 8 bits (llmc/device/ops.h), as in reference_ops.py. Operands are the bytes of e4m3 or e5m2
as numbers from 0 to 255."""

import numpy as np
import torch

from bounded import Bounded, einsum
from cases import make_case
from reference_ops import gelu_derivative, matmul_results, torch_gelu

# Mantissa bits, the exponent of the least normal number, and the largest number.
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
# Tensor cores keep some 14 bits of each sum of 128 products (DeepSeek-V3, section 3.3.2).
RUN, LOST = 128, 2.0**-13


def scale_of(amax, e5m2):
    """1 if amax is 0 or not finite; between 2^-100 and 2^100."""
    if amax == 0 or not np.isfinite(amax):
        return 1.0
    return 2.0 ** np.clip(np.floor(np.log2((E5M2 if e5m2 else E4M3)[2] / amax)), -100, 100)


def rounded(x, e5m2):
    """To the nearest number of the format (ties to even), up to the largest."""
    bits, least, largest = E5M2 if e5m2 else E4M3
    unit = 2.0 ** (np.maximum(np.frexp(x)[1] - 1, least) - bits)
    return np.clip(np.round(x / unit) * unit, -largest, largest)


def bytes_of(x, e5m2):
    """The bytes of numbers of the format: a sign, an exponent, which is 0 below the least normal number, and a mantissa."""
    bits, least, _ = E5M2 if e5m2 else E4M3
    exponent = np.where(x == 0, least, np.maximum(np.frexp(x)[1] - 1, least))
    in_units = abs(x) / 2.0 ** (exponent - bits)  # 2^bits and more for a normal number
    return (exponent - least) * 2.0**bits + in_units + 128.0 * np.signbit(x)


def quantise_to_bytes(make, N, C, amax, e5m2=False, plain=True, transposed=True, every=False):
    """`every`: x has any bits that a bf16 may have. Infinity and NaN become NaN."""
    x = make.normal(N, C) * 2.0 ** make.integers(-20, 2, N, C)
    if every:
        x = torch.tensor(make.random.randint(-2**15, 2**15, (N, C)).astype(np.int16)).view(torch.bfloat16).to(torch.float64).numpy()
    scale = scale_of(amax, e5m2)
    exact = np.where(np.isfinite(x), bytes_of(rounded(np.where(np.isfinite(x), x, 0) * scale, e5m2), e5m2), 0x7f)
    results = {"inverse": np.array([1 / scale])}
    results |= ({"plain": exact} if plain else {}) | ({"transposed": exact.T} if transposed else {})
    return make_case({"x": x, "amax": np.array([amax]), "format": np.array([float(e5m2)])}, results, results)


def operand(make, rows, columns, scale, e5m2=False):
    """(numbers, their bytes, 1/scale)"""
    x = make.normal(rows, columns, scale=scale)
    times = scale_of(4 * scale, e5m2)
    of_format = rounded(x * times, e5m2)
    return of_format / times, bytes_of(of_format, e5m2), np.array([1 / times])


def product(a, b, onto=0.0):
    """a (n,k) times b (m,k), transposed."""
    exact = einsum("nk,mk->nm", a, b, onto=onto)
    lost = sum(LOST * abs(a[:, k:k + RUN] @ b[:, k:k + RUN].T) for k in range(0, a.shape[1], RUN))
    return Bounded(exact.value, exact.error + 1.001 * lost)


def fp8_matmul_forward(make, N, IC, OC, bias=True, gelu=False):
    x, x_bytes, x_inverse = operand(make, N, IC, 1.0)
    weight, weight_bytes, weight_inverse = operand(make, OC, IC, IC**-0.5)
    inputs = {"in": x_bytes, "in_inverse": x_inverse, "weight": weight_bytes, "weight_inverse": weight_inverse}
    if bias:
        inputs["bias"] = make.normal(OC)
    onto = inputs.get("bias", 0.0)
    return make_case(inputs, *matmul_results(torch.tensor(x @ weight.T + onto), product(x, weight, onto), gelu, "bf16"))


def fp8_matmul_backward(make, N, IC, OC, gelu=False, want=("din", "dweight")):
    dout, dout_bytes, dout_inverse = operand(make, N, OC, 1e-3, e5m2=True)
    x, x_bytes, x_inverse = operand(make, N, IC, 1.0)
    weight, weight_bytes, weight_inverse = operand(make, OC, IC, OC**-0.5)
    pre_gelu, start = make.normal(N, IC), make.normal_fp32(OC, IC, scale=1e-2)
    inputs = {"dout_inverse": dout_inverse}
    if "din" in want:
        inputs |= {"dout": dout_bytes, "weight_transposed": weight_bytes.T, "weight_inverse": weight_inverse}
        inputs |= {"pre_gelu": pre_gelu} if gelu else {}
    if "dweight" in want:
        inputs |= {"dout_transposed": dout_bytes.T, "in_transposed": x_bytes.T, "in_inverse": x_inverse, "dweight": start}
    leaf = torch.tensor(pre_gelu, requires_grad=True)
    (torch_gelu(leaf) if gelu else leaf).backward(torch.tensor(dout @ weight))
    din = product(dout, weight.T).stored("bf16")
    if gelu:
        din = (din * gelu_derivative(Bounded(pre_gelu))).stored("bf16")
    exact = {"din": leaf.grad, "dweight": start + dout.T @ x}
    return make_case(inputs, {name: exact[name] for name in want}, {"din": din, "dweight": product(dout.T, x.T, start)})
