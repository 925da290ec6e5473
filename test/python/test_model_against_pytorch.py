"""The whole model's loss and every gradient tensor against PyTorch in fp64, on fresh random models and tokens."""

import os

import pytest

import model_comparison

BUILD = os.environ.get("BUILD_DIR", "build")
SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes,batch,micro_batch", model_comparison.MODELS)
def test_loss_and_every_gradient(sizes, batch, micro_batch, dtype, tmp_path):
    print(f"SEED={SEED}")
    probe = f"{BUILD}/test/probe/model_probe"
    print(model_comparison.loss_and_gradients(probe, tmp_path, sizes, batch, micro_batch, dtype, SEED))
