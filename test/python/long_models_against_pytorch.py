"""Random models of Llama's kin and of nanochat against PyTorch in fp64: choices that no published model combines, and any sizes."""

import os
import random

import pytest

import model_comparison
from reference_llama import Llama, Nanochat

PROBE = f"{os.environ.get('BUILD_DIR', 'build')}/test/probe/model_probe"
SEEDS = random.Random(os.environ.get("SEED")).sample(range(2**31), 60)


def random_model(draw):
    # With one token, or a window of one, queries and keys have no gradient. A norm over very few elements amplifies rounding
    # beyond the tolerance, in PyTorch's fp32 too.
    kv_heads, seq_len, half = draw.randint(1, 3), draw.randint(2, 70), draw.randint(4, 24)
    common = {"layers": draw.randint(1, 3), "heads": kv_heads * draw.randint(1, 4), "kv_heads": kv_heads, "seq_len": seq_len,
              "mlp_size": draw.randint(1, 200), "vocab_size": draw.randint(2, 300), "rope_theta": draw.choice([100.0, 1e4, 5e5]),
              "norm_eps": draw.choice([1e-6, 1e-5, 1e-3]), "z_loss": draw.choice([0.0, 1e-2])}
    if draw.random() < 0.25:
        return Nanochat(**common, channels=2 * half * common["heads"], logit_cap=draw.choice([0.5, 15.0]))
    return Llama(**common, channels=draw.randint(16, 100), head_size=2 * half, window=draw.choice([0, draw.randint(2, seq_len + 1)]),
                 rope_scaling=draw.choice(["none", "8,1,4,64", "3,0.5,9,200"]), qk_norm=draw.choice(["none", "head", "all"]),
                 norms=draw.choice(["before", "behind"]), qkv_bias=draw.random() < 0.5, tied_head=draw.random() < 0.5)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_model(seed, dtype, tmp_path):
    draw = random.Random(seed)
    model, micro_batch = random_model(draw), draw.randint(1, 2)
    print(seed, model)
    batch = micro_batch * draw.randint(1, 3)
    print(model_comparison.loss_and_gradients(PROBE, tmp_path, model, batch, micro_batch, dtype, seed))
