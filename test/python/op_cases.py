"""The table of the tested cases: ordinary and odd sizes of every operation of llmc/device/ops.h.

If a result has very few elements, its operands are chosen so that it does not cancel to nearly 0. The error is compared
with its norm, in addition to the bound on each element.
"""

import dataclasses
import math
import zlib

import numpy as np

from cases import Maker
from reference_llama_ops import (
    CAP_VALUES, RELU_VALUES, SMALL_EPS, SWIGLU_VALUES, fused_residual_rmsnorm_forward, relu_squared_backward,
    relu_squared_forward, rmsnorm_backward, rmsnorm_forward, soft_cap, swiglu_backward, swiglu_forward)
from reference_attention import attention_backward, attention_cached_forward, attention_forward
from reference_ops import (
    GELU_HUGE_VALUES, GELU_VALUES, classifier_from_statistics,
    classifier_statistics, encoder_backward, encoder_forward, fused_classifier, fused_residual_layernorm_forward, gelu_backward, gelu_forward, layernorm_backward,
    layernorm_forward, dequantise_nf4, matmul_add, matmul_backward, matmul_forward)
from reference_fp8 import fp8_matmul_backward, fp8_matmul_forward, quantise_to_bytes
from reference_heads import head_norm_backward, head_norm_backward_sums, head_norm_forward, head_norm_sums, rope
from reference_updates import (accumulate, add, all_finite, amax, cast, combine, copy, copy_matrix, fill, global_norm_squared, momentum,
                               optimizer_update, quantise, sum_fp64)


@dataclasses.dataclass
class Operation:
    make: callable
    small: list
    more: list
    dtypes: tuple = ("fp32", "bf16")


def of(*sizes, **options):
    """The arguments of one case."""
    return sizes, options


# One key head, two, and as many as query heads; windows of one key, of an odd number, across blocks of keys, and longer than
# the sequence.
ATTENTION_WITH_GROUPS = [
    of(2, 37, 4, 16, K=1), of(1, 65, 4, 24, K=2, apart=True), of(2, 13, 6, 8, K=2, window=1), of(1, 70, 2, 40, window=17),
    of(1, 300, 2, 8, K=1, window=131, apart=True), of(1, 33, 4, 32, K=2, window=100), of(2, 40, 3, 16, window=39, apart=True),
    of(1, 130, 2, 128), of(1, 70, 2, 128, K=1, window=17, apart=True), of(2, 37, 4, 96, K=2)]

# A GPU's block has pieces of 16 bytes of a row. In the backward passes of the norms, its threads (384 or 512) have one, two or
# four each; more are refused.
LONG_ROWS = (3080, 6152, 12280, 16384)
# Each of a multiprocessor's 1536 threads has so many pieces of 16 bytes that loops over 2 and over 4 at a time leave two and more.
MANY = 119_811
LARGEST_FP16 = 65504
OPERATIONS = {
    "encoder_forward": Operation(
        encoder_forward, [of(2, 3, 5, 7), of(1, 1, 8, 3, longer=2)],
        [of(2, 8, 16, 32), of(3, 13, 10, 37), of(1, 1, 5, 1), of(4, 64, 128, 256, longer=7),
         of(3, 13, 10, 37, rows=(0, 13)), of(3, 13, 40, 37, rows=(0, 13)), of(3, 13, 40, 37, rows=(13, 37), with_wpe=False),
         of(2, 8, 16, 32, rows=(40, 48)), of(2, 8, 16, 32, rows=(40, 48), with_wpe=False)]),
    "encoder_backward": Operation(
        encoder_backward, [of(2, 3, 5, 4), of(1, 1, 8, 3, longer=2)],
        [of(2, 8, 16, 32), of(3, 13, 10, 37), of(1, 1, 5, 1), of(4, 64, 128, 256, longer=7), of(2, 40, 17, 2), of(3, 13, 264, 37),
         of(2, 1040, 16, 1), of(3, 13, 40, 37, rows=(0, 13)), of(2, 40, 40, 17, rows=(3, 5)), of(3, 13, 40, 37, with_dwpe=False),
         of(3, 13, 40, 37, rows=(13, 37), with_dwpe=False),
         of(3, 13, 10, 37, rows=(0, 13)), of(2, 40, 17, 5, rows=(3, 5)), of(2, 8, 16, 32, rows=(40, 48)),
         of(3, 13, 10, 37, with_dwpe=False), of(3, 13, 10, 37, rows=(13, 37), with_dwpe=False)]),
    "layernorm_forward": Operation(
        layernorm_forward, [of(1, 5, offset=4.0), of(3, 13, offset=-4.0)],
        [of(2, 8, 16), of(3, 13, 20, offset=1.0), of(2, 5, 65), of(4, 64, 128), of(1, 1, 384, offset=4.0),
         of(3, 13, 20, offset=1.0, beta=False), of(4, 64, 128, beta=False), of(3, 1600), of(3, 24576)]),
    "layernorm_backward": Operation(
        layernorm_backward, [of(1, 5, offset=4.0), of(3, 13, offset=-4.0)],
        [of(2, 8, 16), of(3, 13, 20, offset=1.0), of(2, 5, 65), of(4, 64, 128), of(1, 1, 384, offset=4.0),
         of(3, 13, 20, want=("din",)), of(3, 13, 20, want=("dgamma", "dbeta")), of(3, 13, 20, want=("dgamma",)),
         of(4, 64, 128, want=("din", "dgamma")), of(3, 1600), of(700, 40), of(2500, 8),
         *(of(2, C) for C in LONG_ROWS), of(2, 6144, want=("dgamma",))]),
    "fused_residual_layernorm_forward": Operation(
        fused_residual_layernorm_forward, [of(1, 5, offset=4.0), of(3, 13, offset=-4.0)],
        [of(2, 8, 16), of(3, 13, 20, offset=1.0), of(2, 5, 65), of(4, 64, 128), of(1, 1, 384, offset=4.0),
         of(3, 13, 20, offset=1.0, beta=False), of(4, 64, 128, beta=False)]),
    "rmsnorm_forward": Operation(
        rmsnorm_forward, [of(1, 5, offset=4.0), of(3, 13, weight=False)],
        [of(2, 8, 16), of(3, 13, 20, offset=1.0, eps=SMALL_EPS), of(2, 5, 65), of(4, 64, 128), of(1, 1, 384, offset=4.0),
         of(3, 13, 20, weight=False), of(4, 24, scale=1e-3, eps=SMALL_EPS), of(5, 4096), of(3, 24576)]),
    "rmsnorm_backward": Operation(
        rmsnorm_backward, [of(1, 5, offset=4.0), of(3, 13, weight=False)],
        [of(2, 8, 16), of(3, 13, 20, offset=1.0), of(2, 5, 65), of(4, 64, 128), of(1, 1, 384, offset=4.0),
         of(3, 13, 20, want=("din",)), of(3, 13, 20, want=("dweight",)), of(4, 64, 128, weight=False),
         of(3, 13, 20, weight=False, want=("din",)), of(5, 4096), of(700, 40), of(2500, 8),
         *(of(2, C) for C in LONG_ROWS), of(2, 6144, want=("dweight",))]),
    "fused_residual_rmsnorm_forward": Operation(
        fused_residual_rmsnorm_forward, [of(1, 5, offset=4.0), of(3, 13, weight=False)],
        [of(2, 8, 16), of(3, 13, 20, offset=1.0, eps=SMALL_EPS), of(2, 5, 65), of(4, 64, 128), of(1, 1, 384, offset=4.0),
         of(3, 13, 20, weight=False), of(4, 64, 128, weight=False)]),
    "matmul_forward": Operation(
        matmul_forward, [of(3, 5, OC=7), of(1, 9, OC=4, bias=False), of(2, 3, 5, OC=6, gelu=True)],
        [of(16, 16, OC=48), of(1, 5, OC=37), of(13, 20, OC=7, bias=False), of(3, 13, 10, OC=65, gelu=True),
         of(13, 37, OC=37, bias=False, gelu=True), of(1, 2, OC=3), of(4, 64, 128, OC=512, gelu=True),
         of(4, 64, 128, OC=256, bias=False)]),
    "matmul_add": Operation(
        matmul_add, [of(3, 4, 5, out=(1, 2)), of(2, 3, 4, a=(3, 1), b=(0, 2), scale=0.5, a_transposed=True),
                     of(1, 6, 3, b_transposed=True, b=(2, 0), to_sums=True, scale=2.0)],
        [of(70, 16, 200, out=(8, 24), a=(16, 16), b_transposed=True, scale=2.0),
         of(37, 200, 16, out=(32, 8), a=(8, 8), scale=2.0),
         of(200, 70, 16, a=(8, 48), b=(16, 0), scale=0.75, a_transposed=True, to_sums=True),
         of(90, 64, 8, a=(4, 12), b_transposed=True), of(65, 8, 64, out=(4, 4), scale=1.5)]),
    "dequantise_nf4": Operation(dequantise_nf4, [of(1), of(3)], [of(70), of(5)]),
    "matmul_backward": Operation(
        matmul_backward, [of(3, 5, OC=7), of(1, 9, OC=4, want=("din", "dweight")), of(2, 3, 5, OC=6, gelu=True)],
        [of(16, 16, OC=48), of(1, 5, OC=37), of(13, 20, OC=7, want=("din",)), of(13, 20, OC=7, want=("dweight",)),
         of(13, 20, OC=7, want=("dbias",)), of(13, 20, OC=9, want=("dweight", "dbias")),
         of(3, 13, 10, OC=65, gelu=True), of(13, 37, OC=37, gelu=True, want=("din", "dweight")),
         of(4, 64, 512, OC=128, gelu=True), of(4, 64, 128, OC=256), of(1, 2, OC=3), of(1100, 8, OC=40),
         of(13, 20, OC=8, want=("dbias",)), of(13, 20, OC=8, want=("dweight", "dbias"))]),
    "gelu_forward": Operation(
        gelu_forward, [of(3, 7), of(values=GELU_VALUES)],
        [of(values=[0.7]), of(2, 8, 16), of(3, 13, 37), of(4, 64, 128), of(values=GELU_HUGE_VALUES)]),
    "gelu_backward": Operation(
        gelu_backward, [of(3, 7), of(values=GELU_VALUES), of(2, 5, in_place=True)],
        [of(values=[0.7]), of(2, 8, 16), of(3, 13, 37, in_place=True), of(2, 8, 16, in_place=True), of(4, 64, 128),
         of(values=GELU_HUGE_VALUES)]),
    # Rows and F.
    "swiglu_forward": Operation(
        swiglu_forward, [of(3, 7), of(values=SWIGLU_VALUES)],
        [of(1, 1), of(2, 8, 16), of(3, 13, 37), of(4, 64, 128), of(2, 11008)]),
    "swiglu_backward": Operation(
        swiglu_backward, [of(3, 7), of(values=SWIGLU_VALUES), of(2, 5, in_place=True)],
        [of(1, 1), of(2, 8, 16), of(3, 13, 37, in_place=True), of(4, 64, 128), of(2, 11008, in_place=True)]),
    "relu_squared_forward": Operation(
        relu_squared_forward, [of(3, 7), of(values=RELU_VALUES)], [of(values=[0.7]), of(3, 13, 37), of(4, 64, 128)]),
    "relu_squared_backward": Operation(
        relu_squared_backward, [of(3, 7), of(values=RELU_VALUES), of(2, 5, in_place=True)],
        [of(values=[0.7]), of(3, 13, 37, in_place=True), of(4, 64, 128)]),
    # Sequences, their rows, query heads and their size; K key heads.
    "attention_forward": Operation(
        attention_forward, [of(1, 1, 1, 5, offset=3.0), of(2, 5, 2, 3), of(1, 9, 1, 4, integers=12),
                            of(1, 7, 4, 3, K=2, window=3, apart=True)],
        [of(2, 8, 4, 16), of(1, 1, 3, 8), of(2, 13, 1, 5), of(1, 37, 3, 20), of(2, 64, 4, 32), of(1, 65, 1, 8),
         of(1, 130, 2, 64), of(2, 33, 2, 16, integers=12), of(3, 1, 2, 1), *ATTENTION_WITH_GROUPS,
         of(1, 150, 2, 16, window=40, integers=12)]),
    "attention_backward": Operation(
        attention_backward, [of(1, 1, 1, 5), of(2, 5, 2, 3), of(1, 9, 1, 4, integers=6),
                             of(1, 7, 4, 3, K=2, window=3, apart=True)],
        [of(2, 8, 4, 16), of(1, 1, 3, 8), of(2, 13, 1, 5), of(1, 37, 3, 20), of(2, 64, 4, 32), of(1, 65, 1, 8),
         of(1, 130, 2, 64), of(2, 33, 2, 16, integers=6), of(3, 1, 2, 1), *ATTENTION_WITH_GROUPS]),
    # Rows, rows of the cache, rows in it before the call, heads.
    "attention_cached_forward": Operation(
        attention_cached_forward, [of(1, 1, 0, 1, 5, offset=3.0), of(1, 7, 4, 2, 3), of(3, 9, 5, 1, 4, integers=12),
                                   of(2, 7, 4, 4, 3, K=2, window=3, apart=True)],
        [of(1, 40, 39, 3, 16), of(5, 5, 0, 2, 8), of(1, 70, 66, 2, 20), of(13, 64, 30, 4, 32), of(1, 200, 131, 2, 64),
         of(2, 40, 31, 1, 16, integers=12), of(2, 3, 1, 3, 1), of(3, 40, 31, 4, 16, K=1), of(5, 64, 30, 4, 24, K=2, apart=True),
         of(3, 70, 40, 2, 128, K=1), of(3, 40, 20, 2, 8, window=1), of(4, 64, 30, 6, 8, K=3, window=17), of(2, 40, 30, 2, 8, K=1, window=100, apart=True)]),
    "rope": Operation(
        rope, [of(1, 3, count=1, size=2), of(2, 3, count=2, size=6, first=3, more=1, position=4), of(5, count=1, size=4, inverse=True)],
        [of(2, 8, count=4, size=16, more=32), of(2, 13, count=3, size=24, first=8, position=100, longer=5, inverse=True),
         of(1, 1, count=2, size=128, first=128, position=37), of(3, 5, count=8, size=64, inverse=True), of(7, count=5, size=10, first=1),
         of(9, 13, count=9, size=64, more=8), of(9, 13, count=9, size=24, first=8, more=16)]),
    "head_norm_forward": Operation(
        head_norm_forward,
        [of(3, count=1, size=5), of(2, 3, count=2, size=6, first=3, more=1, out_first=1, out_more=2, eps=0.25),
         of(4, count=1, size=7, ranks=2, eps=0.25, weight=False)],
        [of(2, 8, count=4, size=16, more=16), of(1, 13, count=3, size=24, out_first=8, weight=False), of(37, count=8, size=128, first=256),
         of(9, count=1, size=2048, eps=0.5), of(90, count=1, size=64, ranks=1), of(9, count=1, size=200, ranks=4, first=8, out_more=3),
         of(9, count=1, size=64, ranks=2, weight=False), of(9, count=1, size=200, ranks=4, first=8, out_more=8)]),
    "head_norm_sums": Operation(
        head_norm_sums, [of(3, size=5), of(2, 2, size=9, first=1, more=2)], [of(13, size=37), of(5, size=4096, first=8), of(2, 70, size=128)]),
    "head_norm_backward": Operation(
        head_norm_backward,
        [of(3, count=1, size=5), of(2, 3, count=2, size=6, first=3, more=1, dout_first=1, din_more=2),
         of(4, count=1, size=7, ranks=2, weight=False, in_place=True)],
        [of(2, 8, count=4, size=16, more=16, in_place=True), of(1, 13, count=3, size=24, din_first=8, weight=False, dweight=False),
         of(37, count=8, size=128, first=256, dout_more=8), of(9, count=1, size=4096), of(90, count=1, size=64, ranks=1, in_place=True),
         of(70, count=1, size=200, ranks=4, first=8, dout_first=3), of(9, count=1, size=64, ranks=2, weight=False),
         of(70, count=1, size=200, ranks=4, first=8, dout_first=8), of(2500, count=1, size=16), of(5, count=2, size=33, dweight=False, in_place=True)]),
    "head_norm_backward_sums": Operation(
        head_norm_backward_sums, [of(3, size=5), of(2, 2, size=9, first=1, more=2, weight=False)],
        [of(13, size=37, dout_first=3), of(5, size=4096, first=8), of(2, 70, size=128, weight=False)]),
    "fused_classifier": Operation(
        fused_classifier, [of(3, 7, 9, ignored=1), of(4, 11, 11, write_dlogits=False), of(5, 8, 10, large=True),
         of(3, 7, 9, ignored=1, cap=5.0, z_loss=0.125), of(2, 7, 9, z_loss=0.125)],
        [of(16, 32, 32), of(3, 13, 16, ignored=1, cap=5.0, z_loss=0.125), of(9, 37, 64, large=True, cap=30.0), of(64, 256, 256, cap=15.0, z_loss=2.0**-13),
         of(13, 50, 128, ignored=5, z_loss=2.0**-7), of(5, 1000, 1024, spread=20.0, cap=15.0, write_dlogits=False),
         of(1, 37, 128, spread=1.0), of(13, 50, 128, ignored=5),
         of(13, 37, 40, ignored=1, write_dlogits=False), of(9, 37, 64, large=True), of(64, 256, 256),
         of(2, 5, 8, ignored=2), of(5, 1000, 1024), of(2, 50257, 50304)]),
    # The columns of each rank, and the rank.
    "classifier_statistics": Operation(
        classifier_statistics, [of(3, (4, 3), 1, 8, ignored=1), of(3, (5, 0), 1, 8), of(5, (3, 8, 2), 1, 8, large=True),
                                of(3, (4, 3), 1, 8, ignored=1, cap=5.0)],
        [of(16, (32, 32), 0, 32), of(9, (1, 36), 1, 40, large=True, cap=30.0), of(5, (400, 400, 200), 2, 256, cap=15.0),
         of(1, (128,), 0, 128, spread=1.0), of(13, (30, 20), 1, 128, ignored=5),
         of(9, (1, 36), 0, 8, large=True), of(64, (128, 128), 1, 128), of(5, (400, 400, 200), 2, 256, ignored=5), of(3, (9000, 8999), 1, 9088, ignored=1)]),
    "classifier_from_statistics": Operation(
        classifier_from_statistics,
        [of(3, (4, 3), 1, 8, ignored=1), of(3, (5, 0), 1, 8), of(4, (6, 5), 0, 8, write_dlogits=False),
         of(5, (3, 5, 2), 1, 8, large=True), of(3, (4, 3), 1, 8, ignored=1, cap=5.0, z_loss=0.125)],
        [of(16, (32, 32), 0, 32), of(9, (1, 36), 1, 40, large=True, cap=30.0), of(13, (30, 20), 1, 128, z_loss=2.0**-7),
         of(5, (400, 0, 200), 2, 256, cap=15.0, z_loss=2.0**-13), of(4, (6, 5), 1, 8, cap=15.0, write_dlogits=False),
         of(1, (128,), 0, 128, spread=1.0), of(13, (30, 20), 1, 128, ignored=5),
         of(13, (30, 20), 0, 32, ignored=1, write_dlogits=False), of(9, (1, 36), 0, 8, large=True),
         of(64, (128, 128), 1, 128), of(2, (3, 2), 0, 8, ignored=2), of(5, (400, 400, 200), 2, 256), of(3, (9000, 8999), 1, 9088, ignored=1)]),
    "soft_cap": Operation(
        soft_cap, [of(3, 7, cap=15.0), of(values=CAP_VALUES, cap=15.0), of(2, 5, cap=0.75, in_place=True)],
        [of(values=[0.7], cap=1.0), of(3, 13, 37, cap=30.0), of(4, 64, 128, cap=15.0, in_place=True)]),
    "global_norm_squared": Operation(global_norm_squared, [of(1)], [of(2), of(13)]),
    "sum": Operation(sum_fp64, [of(1), of(3, 5)], [of(1025), of(13, 37), of(100_000), of(262_145)], dtypes=("fp32",)),
    "optimizer_update": Operation(
        optimizer_update,
        [of(12, [(0, 5, 0.1), (5, 9, 0.0)], max_grad_norm=0.05), of(8, [(1, 8, 0.1)], max_grad_norm=1.0, norm_squared=math.inf),
         of(12, [(0, 5, 0.1), (5, 9, 0.0)], max_grad_norm=0.05, gradients_in_x=True, rounding=(7, 128))],
        [of(12, [(0, 5, 0.1), (5, 9, 0.0)], max_grad_norm=0.0, step=1), of(37, [(0, 37, 0.01)], max_grad_norm=100.0, step=10),
         of(8209, [(0, 4098, 0.1), (4099, 8209, 0.0)], max_grad_norm=1.0, rounding=(2**40, 2**50)),
         of(8, [(0, 8, 0.1)], max_grad_norm=1.0, norm_squared=math.nan),
         # Segments of whole quads, which GPUs take.
         of(8, [(0, 8, 0.1)], max_grad_norm=1.0, norm_squared=math.inf),
         of(12, [(0, 4, 0.1), (8, 12, 0.0)], max_grad_norm=0.05, step=1),
         of(5120, [(4, 5116, 0.1)], max_grad_norm=1.0, gradients_in_x=True),
         of(8208, [(0, 4100, 0.1), (4100, 8208, 0.0)], max_grad_norm=1.0, rounding=(2**40, 2**50)),
         *(of(2560, [(0, 300, 0.1), (512, 2500, 0.0)], max_grad_norm=limit, loss_scale=scale, moments=moments, rounding=rounding,
              has_master=has_master, gradients_in_x=in_x)
           for moments in ("fp32", "bf16", "uint8") for has_master in (True, False) for in_x in (False, True)
           for limit, scale, rounding in ((1.0, 2.0**10, None), (0.0, 1.0, (7, 128))) if has_master or rounding),
         *(of(20480, [(0, 300, 0.1), (512, 20000, 0.0)], max_grad_norm=1.0, moments=moments) for moments in ("fp32", "uint8")),
         *(of(1024, [(0, 300, 0.1), (512, 1000, 0.0)], max_grad_norm=limit, loss_scale=2.0**-3, moments="uint8", small=0, rounding=rounding)
           for limit, rounding in ((1.0, None), (0.0, (7, 128)))),
         of(512, [(0, 512, 0.1)], max_grad_norm=1.0, norm_squared=math.inf, moments="uint8"),
         of(512, [(0, 512, 0.1)], max_grad_norm=1.0, norm_squared=math.inf, moments="bf16"),
         of(2560, [(0, 300, 0.1), (512, 2500, 0.0)], max_grad_norm=1.0, factors=[0.5, 3.0]),
         *(of(2304, [(0, 300, 0.1), (512, 2300, 0.0)], max_grad_norm=1.0, optimizer=optimizer, moments=moments, factors=[0.5, 1.0],
              rounding=rounding, has_master=has_master, gradients_in_x=in_x, small=0 if moments == "uint8" else None, step=step)
           for optimizer in ("lion", "sgd") for moments in ("fp32", "bf16", "uint8") for has_master in (True, False) for in_x in (False, True)
           for rounding, step in ((None, 1), ((7, 128), 3)) if has_master or rounding),
         *(of(8208, [(0, 4100, 0.1), (4100, 8208, 0.0)], max_grad_norm=0.05, optimizer=optimizer, loss_scale=2.0**10)
           for optimizer in ("lion", "sgd")),
         *(of(2304, [(0, 300, 0.1), (512, 2300, 0.0)], max_grad_norm=0.0, optimizer="muon", factors=[12.5, 1.0], in_bf16=in_bf16,
              has_master=has_master, rounding=rounding)
           for in_bf16 in (False, True) for has_master in (True, False) for rounding in (None, (7, 128)) if has_master or rounding),
         *(of(37, [(0, 5, 0.1), (5, 37, 0.0)], max_grad_norm=0.0, optimizer="sgd", nesterov=True, step=step) for step in (1, 3)),
         of(1024, [(0, 1024, 0.1)], max_grad_norm=1.0, optimizer="sgd", nesterov=True)]),
    "momentum": Operation(
        momentum,
        [of(12, [(0, 5), (5, 9)], max_grad_norm=0.05), of(8, [(1, 8)], max_grad_norm=1.0, norm_squared=math.inf)],
        [of(37, [(0, 37)], max_grad_norm=0.0, step=1), of(8, [(0, 8)], max_grad_norm=1.0, norm_squared=math.nan),
         *(of(8208, [(0, 4100), (4104, 8208)], max_grad_norm=1.0, gradients=gradients, state=state, loss_scale=2.0**10)
           for gradients in ("fp32", "bf16") for state in ("fp32", "bf16")),
         of(20480, [(4, 300), (512, 20000)], max_grad_norm=0.0)]),
    "copy_matrix": Operation(
        copy_matrix,
        [of(3, 5), of(3, 5, transposed=True), of(2, 7, out_more=3, in_more=1)],
        [of(1, 1), of(70, 33, out_more=8), of(33, 70, in_more=5, transposed=True), of(64, 96, transposed=True),
         of(37, 129, out_more=7, in_more=3, transposed=True), of(200, 8, in_more=56)]),
    "combine": Operation(
        combine,
        [of(3, 5), of(7, y=False, norm_squared=2.0), of(7, in_place="x"), of(7, a=2.0**-30, b=2.0**-28, in_place="y", norm_squared=0.0)],
        [of(1), of(13, 37), of(5000), of(5000, y=False, norm_squared=7.5, in_place="x"), of(64, 64, a=1.0, b=2.0315, in_place="y"), of(MANY)]),
    "cast": Operation(cast, [of(5)], [of(3, 37), of(5000), of(5000, half="fp16"), of(MANY)]),
    "copy": Operation(copy, [of(5)], [of(3, 37), of(1), of(1000), of(4, 64, 128)],
                      dtypes=("fp32", "bf16", "fp64", "int32")),
    "fill": Operation(fill, [of(5, value=-3.0)], [of(13, value=7.0), of(1, value=0.0), of(4, 1250, value=2.0), of(MANY, value=-3.0)],
                      dtypes=("fp32", "bf16", "fp64", "int32")),
    "add": Operation(
        add, [of(3, 5), of(7, in_place="a"), of(7, in_place="b")], [of(2, 13, 37), of(1), of(5000), of(1000, in_place="a"), of(MANY)]),
    "accumulate": Operation(
        accumulate, [of(3, 5), of(3, 5, in_x=True)],
        [of(2, 13, 37), of(1), of(5000), of(5000, in_x=True, rounding=(2**40, 2**50, 2**52)), of(MANY)], dtypes=("bf16",)),
    "amax": Operation(amax, [of(5), of(3, before=9.0)], [of(1), of(1000), of(4099, special=-7.5), of(64, special=-math.inf), of(64, special=math.nan, before=9.0), of(4099, special=math.nan), of(MANY)], dtypes=("bf16",)),
    "quantise": Operation(
        quantise, [of(7, 3.0), of(7, 3.0, e5m2=True)],
        [of(1, 1.0), of(4099, 6.5), of(1000, 0.25), of(1000, 448.0), of(4099, 6.5, e5m2=True), of(1000, 2.0**-20, e5m2=True)],
        dtypes=("bf16",)),
    # Rows and columns.
    "quantise_to_bytes": Operation(
        quantise_to_bytes, [], [of(16, 16, 3.0), of(48, 112, 6.5), of(80, 64, 0.25, e5m2=True), of(128, 256, 448.0),
                                of(16, 48, 2.0**-20, e5m2=True, transposed=False), of(64, 32, 2.0, plain=False),
                                of(96, 160, 450.0, every=True), of(96, 160, 3.0, e5m2=True, every=True),
                                *(of(16, 32, amax, e5m2=e5m2) for amax in (0.0, 2.0**-110, 1.5 * 2.0**120, math.inf, math.nan) for e5m2 in (False, True))],
        dtypes=("bf16",)),
    # Rows, inputs, outputs.
    "fp8_matmul_forward": Operation(
        fp8_matmul_forward, [], [of(16, 16, 16), of(48, 80, 112), of(32, 400, 64, bias=False), of(48, 144, 32, gelu=True),
                                 of(16, 128, 48, bias=False, gelu=True)], dtypes=("bf16",)),
    "fp8_matmul_backward": Operation(
        fp8_matmul_backward, [], [of(16, 16, 16), of(48, 80, 112), of(400, 64, 272), of(48, 144, 32, gelu=True),
                                  of(32, 48, 16, want=("din",)), of(32, 48, 16, gelu=True, want=("din",)),
                                  of(144, 48, 16, want=("dweight",))], dtypes=("bf16",)),
    "all_finite": Operation(
        all_finite,
        [of(5), of(5, special=math.nan, place=4), of(3, special=-math.inf), of(70, special=math.inf, place=69)],
        [of(1), of(5000), of(5000, special=math.inf, place=2500), of(5000, special=math.nan, place=4999), of(MANY, special=math.inf, place=MANY - 1), of(37, special=math.nan),
         of(37, special=math.inf, place=36)]),
}


def dtypes_of(op):
    dtypes = OPERATIONS[op].dtypes
    return (*dtypes, "fp16") if "fp32" in dtypes and op != "sum" else dtypes


def make_cases(op, dtype, seed, device="cpu"):
    """The cases of an operation in a dtype, determined by the seed, with the bounds of a device, "cpu" or "cuda"."""
    operation = OPERATIONS[op]
    # numpy promises to keep this generator's numbers the same.
    random = np.random.RandomState([seed, zlib.crc32(op.encode()), zlib.crc32(dtype.encode())])
    cases = []
    for sizes, options in operation.small + operation.more:
        if dtype == "fp16" and max(map(abs, options.get("values", [0]))) > LARGEST_FP16:
            continue
        case = operation.make(Maker(random, dtype, device), *sizes, **options)
        case.name = ", ".join([str(size) for size in sizes] + [f"{name}={value}" for name, value in options.items()])
        cases.append(case)
    return cases


# A GPU's kernels take their operands at any element; flat buffers' pieces begin anywhere. (The CPU's take all.)
AT_ANY_ADDRESS = ("accumulate", "add", "all_finite", "amax", "cast", "combine", "copy", "copy_matrix", "fill", "relu_squared_forward", "relu_squared_backward",
                  "soft_cap", "sum")
