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
        """AdamW's kernels take four elements at a time."""
        return all(begin % 4 == 0 and end % 4 == 0 for begin, end, *_ in self.inputs["segments"])

    def has(self, name):
        return name in self.inputs


def any_size(case):
    return True


# By operation: whether a GPU computes a case.
TAKES = {
    "encoder_forward": lambda case: case.rows("wte"),
    "encoder_backward": lambda case: case.rows("dout"),
    **dict.fromkeys(("layernorm_forward", "layernorm_backward", "rmsnorm_forward", "rmsnorm_backward"), lambda case: case.rows("in")),
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
    "adamw": lambda case: case.segments() and not case.has("gradients:fp16"),
    "fill": lambda case: case.dtype != "fp64" or case.inputs["value"] == 0,
    "quantise": lambda case: False,  # its products read bytes
}


OF_BYTES = {"quantise_to_bytes", "fp8_matmul_forward", "fp8_matmul_backward"}  # the CPU's products read bf16


def takes(device, chip, op, case, dtype):
    """Whether a device, "cpu" or "gpu", computes a case. `chip` is 90 for sm_90."""
    if op in OF_BYTES and (device == "cpu" or op != "quantise_to_bytes" and chip < 89):
        return False
    return device == "cpu" or bool(TAKES.get(op, any_size)(Case(case, dtype)))
