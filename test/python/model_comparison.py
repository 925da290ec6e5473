"""The program's whole model against PyTorch's: gradients by the probe (test/probe/model_probe.cpp), steps of AdamW by the
trainer.

The tests compare the CPU device in this way, and dev/gpu/part_model.py a GPU. The latter runs without pytest, and without
numpy, which PyTorch does not install.
"""

import array
import dataclasses
import subprocess

import torch

import model_bounds
import program
import reference_llama
import reference_model
import safetensors_file
from reference_gpt2 import GPT2, SWITCHES_OFF

# (sizes, batch, micro-batch): ordinary sizes and odd ones. The odd ones have a T that is no multiple of 8, a head size that is
# no power of two, one head, or one token. Their vocabularies are no multiple of anything, or exceed 128 rows, the unit of
# padding.
MODELS = [
    (GPT2(layers=2, heads=4, channels=64, seq_len=32, vocab_size=256), 4, 4),
    (GPT2(layers=2, heads=3, channels=27, seq_len=13, vocab_size=37), 3, 1),
    # One sequence, since the gradients of two almost cancel for some seeds, beyond what fp32 can tell.
    (GPT2(layers=1, heads=1, channels=10, seq_len=1, vocab_size=2), 1, 1),
    (GPT2(layers=3, heads=5, channels=60, seq_len=65, vocab_size=301), 4, 2),
    (GPT2(layers=1, heads=2, channels=96, seq_len=100, vocab_size=129), 1, 1),
    (GPT2(layers=6, heads=6, channels=96, seq_len=24, vocab_size=256), 2, 2),
]


# Without biases, and with a separate head. An ordinary model has each alone. Odd ones have both: two with an accumulated batch,
# and one with the smallest sizes.
MODELS += [(dataclasses.replace(MODELS[i][0], **switches), *MODELS[i][1:])
           for i, switches in [(0, SWITCHES_OFF[0]), (0, SWITCHES_OFF[1]), *((i, SWITCHES_OFF[2]) for i in (1, 2, 3))]]
# The other families: an accumulated batch each.
MODELS += [(model, 3, 1) for model in reference_llama.MODELS.values()]


def bytes_of(tensor, type_code):
    """The elements for array.array: "f" is float32, "i" is int32."""
    return array.array(type_code, tensor.flatten().tolist()).tobytes()


def save_weights(path, weights):
    safetensors_file.save(path, {name: ("F32", weight.shape, bytes_of(weight, "f")) for name, weight in weights.items()})


def load_gradients(path):
    """{name: tensor in fp64}."""
    tensors = safetensors_file.load(path)
    assert {dtype for dtype, _, _ in tensors.values()} == {"F32"}
    return {name: torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape).double()
            for name, (_, shape, data) in tensors.items()}


def run_probe(probe, folder, weights, sizes, dtype, tokens, micro_batch, device="cpu", environment=None):
    """(loss, squared norm of the gradient, gradients) of the program."""
    files = {name: folder / f"{name}.safetensors" for name in ("weights", "tokens", "gradients")}
    save_weights(files["weights"], weights)
    safetensors_file.save(files["tokens"], {"tokens": ("I32", tokens.shape, bytes_of(tokens, "i"))})
    command = [probe, *files.values(), f"--device={device}", f"--dtype={dtype}", f"--micro-batch-size={micro_batch}",
               *sizes.options()]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    loss, norm_squared = map(float, result.stdout.split())
    return loss, norm_squared, load_gradients(files["gradients"])


def loss_and_gradients(probe, folder, sizes, batch, micro_batch, dtype, seed, **device):
    """Asserts that the loss and every gradient of a random model are within their bounds. Returns how near they came."""
    generator = torch.Generator().manual_seed(seed)
    held = torch.bfloat16 if dtype == "bf16" else torch.float32
    weights = reference_model.random_weights(sizes, generator, held)
    tokens = reference_model.random_tokens(sizes, batch, generator)

    expected_loss, expected = reference_model.loss_and_gradients(weights, sizes, tokens)
    loss, norm_squared, gradients = run_probe(probe, folder, weights, sizes, dtype, tokens, micro_batch, **device)

    loss_bound, bounds = model_bounds.loss_and_gradient_bounds(dtype, weights, sizes, tokens)
    shares = {name: (gradients[name] - gradient).norm().item() / bounds[name]
              for name, gradient in expected.items()}
    worst = max(shares, key=shares.get)
    found = (f"loss {loss - expected_loss:+.2e} of {loss_bound:.2e} allowed, worst gradient {worst}, {shares[worst]:.2f} of "
             f"{bounds[worst] / expected[worst].norm():.2e} of its norm")
    assert abs(loss - expected_loss) <= loss_bound, found
    assert gradients.keys() == expected.keys()
    assert shares[worst] <= 1, found

    own_norm = sum((g**2).sum().item() for g in gradients.values())
    # Squares are summed in blocks of 1024 in fp32, then in fp64: a relative error of at most 1024 u, u = 2^-24.
    assert abs(norm_squared - own_norm) <= 1024 * 2.0**-24 * own_norm, f"the norm is {norm_squared}, not {own_norm}"
    return found


class Experiment:
    """Random weights and one batch in files, for training."""

    def __init__(self, folder, sizes, batch, seed):
        generator = torch.Generator().manual_seed(seed)
        self.sizes, self.batch, self.folder = sizes, batch, folder
        self.weights = reference_model.random_weights(sizes, generator)
        # One sequence of global-batch-tokens + 1 tokens, cut into windows that share their end tokens.
        run = torch.randint(sizes.vocab_size, (batch * sizes.seq_len + 1,), generator=generator)
        self.tokens = torch.stack([run[i * sizes.seq_len:(i + 1) * sizes.seq_len + 1] for i in range(batch)])
        program.write_token_file(folder / "train.bin", run.tolist())
        save_weights(folder / "init.safetensors", self.weights)

    def options(self, steps, *more):
        return ["--init", self.folder / "init.safetensors", "--train-data", self.folder / "train.bin",
                f"--global-batch-tokens={self.batch * self.sizes.seq_len}", f"--steps={steps}", *self.sizes.options(), *more]
