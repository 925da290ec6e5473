#!/usr/bin/env python3
"""Makes the reference files in test/reference, with PyTorch, from fixed seeds: test/make_references.py [NAME ...]

Each function of REFERENCES writes its files into a folder and returns their paths; NAME selects some of them.
"""

import pathlib
import sys

import numpy as np
import torch

TEST = pathlib.Path(__file__).resolve().parent
FOLDER = TEST / "reference"
sys.path.insert(0, str(TEST / "python"))

import model_bounds
import reference_model
import safetensors_numpy
from reference_gpt2 import GPT2
from reference_llama import Llama, Nanochat

SEED = 1


# {name: (model, batch)}: two of GPT-2, and one of each other model_type, small enough for a file of some hundred kilobytes.
MODELS = {
    "odd": (GPT2(layers=2, heads=3, channels=27, seq_len=13, vocab_size=37), 3),
    "wide": (GPT2(layers=1, heads=2, channels=16, seq_len=8, vocab_size=150), 4),
    "llama": (Llama(layers=2, heads=4, kv_heads=1, head_size=32, channels=24, mlp_size=52, seq_len=24, vocab_size=150,
                    rope_theta=5e5, rope_scaling="8,1,4,64"), 2),
    "mistral": (Llama(layers=2, heads=4, kv_heads=2, head_size=10, channels=40, mlp_size=67, seq_len=24, vocab_size=99,
                      rope_theta=1e6, window=8), 2),
    "qwen2": (Llama(layers=2, heads=4, kv_heads=2, head_size=12, channels=48, mlp_size=61, seq_len=24, vocab_size=150,
                    rope_theta=1e6, norm_eps=1e-6, qkv_bias=True, tied_head=True), 2),
    "qwen3": (Llama(layers=2, heads=4, kv_heads=2, head_size=22, channels=33, mlp_size=53, seq_len=17, vocab_size=131,
                    rope_theta=1e6, norm_eps=1e-6, qk_norm="head", tied_head=True), 2),
    "olmo2": (Llama(layers=2, heads=4, kv_heads=2, head_size=10, channels=40, mlp_size=53, seq_len=24, vocab_size=99,
                    rope_theta=5e5, norm_eps=1e-6, qk_norm="all", norms="behind"), 2),
    "nanochat": (Nanochat(layers=2, heads=4, kv_heads=2, channels=40, mlp_size=83, seq_len=24, vocab_size=131, logit_cap=2.0,
                          z_loss=1e-2), 2)}
# The numbers of AdamW's steps. It amplifies rounding in the other families: PyTorch's own losses in fp32 are up to 4e-5 from those
# in fp64 after 50 steps, and 1e-6 after 20.
MODEL_STEPS = {GPT2: 50, Llama: 20, Nanochat: 20}


def write_models(folder):
    """Writes model_NAME.weights.safetensors and model_NAME.expected.safetensors. The weights are bf16 numbers, so
    that both dtypes start from the same weights. The other file has a batch, its loss and gradients, and the losses of
    AdamW steps on it (lr 1e-3, PyTorch's defaults without decay). It also has the largest allowed error of each
    (model_bounds.py). Its metadata has the model as options of the program.
    """
    paths = []
    for name, (model, batch) in MODELS.items():
        generator = torch.Generator().manual_seed(SEED)
        weights = reference_model.random_weights(model, generator, torch.bfloat16)
        tokens = reference_model.random_tokens(model, batch, generator)
        loss, gradients = reference_model.loss_and_gradients(weights, model, tokens)
        losses, _, _ = reference_model.train(weights, model, [tokens] * MODEL_STEPS[type(model)], lr=1e-3)
        expected = {"tokens": tokens.numpy().astype(np.int32), "loss": np.array([loss]), "losses": np.array(losses)}
        for dtype in ("fp32", "bf16"):
            loss_bound, bounds = model_bounds.loss_and_gradient_bounds(dtype, weights, model, tokens)
            expected[f"bound/{dtype}/loss"] = np.array([loss_bound])
            expected |= {f"bound/{dtype}/gradient/{key}": np.array([bound]) for key, bound in bounds.items()}
        # fp32 holds a gradient with a relative error of 6e-8, a hundredth of the allowed error.
        expected |= {f"gradient/{key}": value.numpy().astype(np.float32) for key, value in gradients.items()}
        files = [folder / f"model_{name}.{kind}.safetensors" for kind in ("weights", "expected")]
        safetensors_numpy.save_bf16(files[0], weights)
        safetensors_numpy.save(files[1], expected, {"options": " ".join(model.options())})
        paths += files
    return paths


def in_fp32_if_exact(array):
    short = array.astype(np.float32)
    return short if np.array_equal(short, array, equal_nan=True) else array


REFERENCES = {"models": write_models}


def main():
    names = sys.argv[1:] or list(REFERENCES)
    unknown = set(names) - set(REFERENCES)
    if unknown:
        sys.exit(f"error: there is no reference {', '.join(sorted(unknown))}; there are {', '.join(REFERENCES)}")
    for name in names:
        for path in REFERENCES[name](FOLDER):
            print(f"{path.relative_to(TEST.parent)}  {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
