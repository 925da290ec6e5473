"""The whole model's loss and every gradient tensor against PyTorch in fp64, on fresh random models and tokens."""

import os
import subprocess

import numpy as np
import pytest
import torch

import model_bounds
import reference_model
import safetensors_numpy
from reference_model import Sizes

BUILD = os.environ.get("BUILD_DIR", "build")
SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))

# (sizes, batch, micro-batch): ordinary ones, and odd: T no multiple of 8, a head size that is no power of two, one
# head, one token, a vocabulary that is no multiple of anything or beyond 128 rows of padding.
MODELS = [
    (Sizes(layers=2, heads=4, channels=64, seq_len=32, vocab_size=256), 4, 4),
    (Sizes(layers=2, heads=3, channels=27, seq_len=13, vocab_size=37), 3, 1),
    (Sizes(layers=1, heads=1, channels=10, seq_len=1, vocab_size=2), 2, 2),
    (Sizes(layers=3, heads=5, channels=60, seq_len=65, vocab_size=301), 4, 2),
    (Sizes(layers=1, heads=2, channels=96, seq_len=100, vocab_size=129), 1, 1),
    (Sizes(layers=6, heads=6, channels=96, seq_len=24, vocab_size=256), 2, 2),
]


def run_probe(folder, weights, sizes, dtype, tokens, micro_batch):
    """(loss, squared norm of the gradient, gradients) of the program."""
    files = {name: folder / f"{name}.safetensors" for name in ("weights", "tokens", "gradients")}
    safetensors_numpy.save(files["weights"], {name: w.numpy().astype(np.float32) for name, w in weights.items()})
    safetensors_numpy.save(files["tokens"], {"tokens": tokens.numpy().astype(np.int32)})
    command = [f"{BUILD}/test/probe/model_probe", files["weights"], str(sizes.heads), dtype, str(micro_batch),
               files["tokens"], files["gradients"]]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    loss, norm_squared = map(float, result.stdout.split())
    return loss, norm_squared, safetensors_numpy.load(files["gradients"])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes,batch,micro_batch", MODELS)
def test_loss_and_every_gradient(sizes, batch, micro_batch, dtype, tmp_path):
    print(f"SEED={SEED}")
    generator = torch.Generator().manual_seed(SEED)
    held = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = reference_model.random_weights(sizes, generator, held)
    tokens = reference_model.random_tokens(sizes, batch, generator)

    expected_loss, expected = reference_model.loss_and_gradients(weights, sizes, tokens)
    loss, norm_squared, gradients = run_probe(tmp_path, weights, sizes, dtype, tokens, micro_batch)

    loss_bound, bounds = model_bounds.loss_and_gradient_bounds(dtype, weights, sizes, tokens)
    assert abs(loss - expected_loss) <= loss_bound
    assert gradients.keys() == expected.keys()
    shares = {name: np.linalg.norm(gradients[name].astype(np.float64) - gradient.numpy()) / bounds[name]
              for name, gradient in expected.items()}
    worst = max(shares, key=shares.get)
    print(f"loss {loss - expected_loss:+.2e} of {loss_bound:.2e} allowed, worst gradient {worst}, {shares[worst]:.2f} of "
          f"{bounds[worst] / expected[worst].norm():.2e} of its norm")
    assert shares[worst] <= 1, worst

    own_norm = sum((g.astype(np.float64)**2).sum() for g in gradients.values())
    # Squares summed in blocks of 1024 in fp32, then in fp64: a relative error of at most 1024 u, u = 2^-24.
    assert norm_squared == pytest.approx(own_norm, rel=1024 * 2.0**-24)
