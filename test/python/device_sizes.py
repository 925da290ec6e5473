"""What operations a device lacks. A GPU's kernels access 16 bytes at a time: their rows, heads or
whole tensors are multiples of that. (ops.h allows any size.)"""

import math

SIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8, "int32": 4}


class Case:
    """The operands of a call: which counts of elements in X are whole pieces of 16 bytes."""

    def __init__(self, case, dtype):
        self.inputs, self.results, self.dtype = case.inputs, case.expected, dtype

    def whole(self, *counts):
        return all(int(count) * SIZES[self.dtype] % 16 == 0 for count in counts)

    def rows(self, *names):
        return self.whole(*(self.inputs[name].shape[-1] for name in names if name in self.inputs))

    def bytes_of_a_row(self, name):
        return self.inputs[name].shape[-1] * SIZES[self.dtype]

    def tensor(self, name):
        return self.whole(math.prod(self.inputs[name].shape))

    def heads(self, *names):
        """Heads NAME: first, count and size in NAME_heads, in rows of any length."""
        return all(self.whole(self.inputs[name].shape[-1], *self.inputs[f"{name}_heads"][[0, 2]]) for name in names
                   if name in self.inputs)

    def attention(self):
        places = [self.inputs[f"{name}_heads"] for name in "qkv"]
        return places[0][2] % 8 == 0 and places[0][2] <= 128 and self.whole(*(first for first, _, _ in places)) and self.rows("q", "k", "v")

    def segments(self):
        """The update's kernels take four elements at a time."""
        return all(begin % 4 == 0 and end % 4 == 0 for begin, end, *_ in self.inputs["segments"])

    def has(self, name):
        return name in self.inputs


def any_size(case):
    return True


# By operation: whether a GPU computes a case.
TAKES = {
    "encoder_forward": lambda case: case.rows("wte"),
    "encoder_backward": lambda case: case.rows("dout"),
    **dict.fromkeys(("layernorm_forward", "rmsnorm_forward"), lambda case: case.rows("in")),
    "layernorm_backward": lambda case: case.rows("in") and case.bytes_of_a_row("in") <= 24 << 10,
    "rmsnorm_backward": lambda case: case.rows("in") and case.bytes_of_a_row("in") <= 32 << 10,
    **dict.fromkeys(("fused_residual_layernorm_forward", "fused_residual_rmsnorm_forward"), lambda case: case.rows("in1")),
    "matmul_forward": lambda case: "pre_gelu" not in case.results or case.whole(
        math.prod(case.inputs["in"].shape[:-1]) * case.inputs["weight"].shape[0]),
    "matmul_backward": lambda case: (not case.has("dbias") or case.rows("dout")) and (
        not case.has("pre_gelu") or "din" not in case.results or case.tensor("pre_gelu")),
    **dict.fromkeys(("gelu_forward", "gelu_backward"), lambda case: case.tensor("in")),
    "swiglu_forward": lambda case: case.whole(case.inputs["in"].shape[-1] / 2),
    "swiglu_backward": lambda case: case.rows("dout"),
    **dict.fromkeys(("attention_forward", "attention_backward", "attention_cached_forward"), Case.attention),
    "rope": lambda case: case.heads("x") and case.inputs["x_heads"][2] % 8 == 0,
    "head_norm_forward": lambda case: case.heads("in", "out"),
    "head_norm_sums": lambda case: case.heads("in"),
    "head_norm_backward": lambda case: case.heads("in", "dout", "din"),
    "head_norm_backward_sums": lambda case: case.heads("in", "dout"),
    "fused_classifier": lambda case: case.rows("logits"),
    # Gradients are kept in fp32 or bf16.
    "global_norm_squared": lambda case: case.dtype != "fp16",
    "optimizer_update": lambda case: case.segments() and not case.has("gradients:fp16") and (
        case.dtype != "fp32" or not case.has("gradients:bf16")),
    "momentum": lambda case: case.segments() and case.dtype != "fp16",
    "fill": lambda case: case.dtype != "fp64" or case.inputs["value"] == 0,
    "quantise": lambda case: False,  # its products read bytes
}


NONE, FP8_PRODUCTS = 1000, 89  # no chip computes it; the first one with products in 8 bits


def least_chip(device, op, case, dtype):
    """The least architecture (90: sm_90) that computes a case. The CPU's is 0."""
    if op in ("quantise_to_bytes", "fp8_matmul_forward", "fp8_matmul_backward") and device == "cpu":
        return NONE  # its products read bf16
    if device == "cpu" or TAKES.get(op, any_size)(Case(case, dtype)):
        return FP8_PRODUCTS if op.startswith("fp8_matmul") else 0
    return NONE
