"""The first step of each precision against an emulation of its roundings, and the table of docs/precision.md."""

import json
import math
import re

import numpy as np
import pytest
import reference_model
import safetensors_numpy
import torch
from reference_gpt2 import GPT2
from torch.nn import functional

import program

torch.set_num_threads(1)
SIZES = GPT2(layers=1, heads=2, channels=32, seq_len=16, vocab_size=64)
SEQUENCES, SEEDS = 4, (1, 2, 3)
TOKENS = SEQUENCES * SIZES.seq_len
LONGEST_SUM = 4 * SIZES.channels
# Where the processor multiplies bf16, attention rounds its probabilities too, which the emulation does not.
WIDENED = {"ONEDNN_MAX_CPU_ISA": "AVX2"}


def rounded(x, dtype):
    return x.float().to(dtype).double()


class Stored(torch.autograd.Function):
    """A tensor, and its gradient if that is stored too, rounded to nearest."""

    @staticmethod
    def forward(ctx, x, dtype, is_gradient_stored):
        ctx.dtype = dtype if is_gradient_stored else None
        return rounded(x, dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient if ctx.dtype is None else rounded(gradient, ctx.dtype), None, None


def in_8_bits(x, bits, least, largest, scale):
    """x times a power of two, rounded to `bits` stored bits of significand, normal from 2^least; then divided by it again."""
    if scale is None:
        scale = 2.0**math.floor(math.log2(largest / x.abs().max().item()))
    magnitude = (x * scale).abs()
    exponent = torch.frexp(magnitude)[1] - 1
    unit = torch.ldexp(torch.ones_like(x), exponent.clamp(min=least) - bits)
    return torch.sign(x) * (torch.round(magnitude / unit) * unit).clamp(max=largest) / scale


def e4m3(x, scale=None):
    return in_8_bits(x, 3, -6, 448.0, scale)


def e5m2(x, scale=None):
    return in_8_bits(x, 2, -14, 57344.0, scale)


class Product(torch.autograd.Function):
    """x W of 8-bit operands. Without a history, delayed scaling takes 1 for inputs, and for gradients a power of two."""

    @staticmethod
    def forward(ctx, x, weight, is_delayed):
        x, weight = e4m3(x, 1.0 if is_delayed else None), e4m3(weight)
        ctx.save_for_backward(x, weight)
        ctx.scale = 2.0**math.ceil(math.log2(TOKENS)) if is_delayed else None
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        gradient = e5m2(gradient, ctx.scale)
        return gradient @ weight.T, x.flatten(0, 1).T @ gradient.flatten(0, 1), None


class Experiment:
    """Random weights and one batch, in files."""

    def __init__(self, folder, seed):
        generator = torch.Generator().manual_seed(seed)
        self.folder = folder
        self.weights = reference_model.random_weights(SIZES, generator)
        run = torch.randint(SIZES.vocab_size, (TOKENS + 1,), generator=generator)
        self.inputs, self.targets = run[:-1].view(SEQUENCES, -1), run[1:].view(SEQUENCES, -1)
        program.write_token_file(folder / "tokens.bin", run.numpy())
        safetensors_numpy.save(folder / "init.safetensors", {name: w.numpy().astype(np.float32) for name, w in self.weights.items()})

    def emulated(self, dtype, product=torch.matmul, loss_scale=1.0):
        """The loss of the first step and the norm of its gradient."""
        leaves = {name: rounded(weight, dtype).requires_grad_() for name, weight in self.weights.items()}
        logits = SIZES.logits(leaves, self.inputs, product=product, store=lambda x: Stored.apply(x, dtype, True),
                              store_gelu=lambda x: Stored.apply(x, dtype, False))
        loss = functional.cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        gradients = torch.autograd.grad(loss * loss_scale, list(leaves.values()))
        return np.array([loss.item(), math.sqrt(sum((gradient / loss_scale).square().sum().item() for gradient in gradients))])

    def trained(self, *options):
        run = program.train(self.folder / "run", *SIZES.options(), f"--init={self.folder}/init.safetensors",
                            f"--train-data={self.folder}/tokens.bin", f"--global-batch-tokens={TOKENS}", f"--micro-batch-size={SEQUENCES}",
                            "--steps=1", "--val-every=0", "--device=cpu", "--overwrite", *options, env=WIDENED)
        return np.array([run.losses[0], run.column("grad_norm")[0]])


RECIPES = {
    "fp16": (["--precision=fp16"], {"dtype": torch.float16, "loss_scale": 65536.0}),
    "bf16": (["--precision=bf16"], {"dtype": torch.bfloat16}),
    "bf16-stochastic": (["--precision=bf16-stochastic", "--moments-dtype=bf16"], {"dtype": torch.bfloat16}),
    "te-fp8": (["--precision=te-fp8"], {"dtype": torch.bfloat16, "product": lambda x, w: Product.apply(x, w, True)}),
    "fp8 current": (["--dtype=bf16", "--fp8=current"], {"dtype": torch.bfloat16, "product": lambda x, w: Product.apply(x, w, False)}),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_step_is_that_of_an_emulation(recipe, tmp_path):
    """The emulation sums in fp64, the program in fp32, with errors of up to K 2^-24 for K terms. A number is then rounded to the
    other side once in 2^(24-p)/K times, with p bits of significand. All roundings together change the loss by E (the root mean
    square over the seeds); a share of 1/n of them, each of which moves a number by twice as much, by 2 E / sqrt(n). Four times
    that is allowed."""
    options, how = RECIPES[recipe]
    errors, effects, of_storage = [], [], []
    for seed in SEEDS:
        (tmp_path / str(seed)).mkdir()
        experiment = Experiment(tmp_path / str(seed), seed)
        exact, wanted = experiment.emulated(torch.float32), experiment.emulated(**how)
        errors.append(experiment.trained(*options) - wanted)
        effects.append(wanted - exact)
        of_storage.append(experiment.emulated(how["dtype"], loss_scale=how.get("loss_scale", 1.0)) - exact)
    bits = 11 if recipe == "fp16" else 8
    bound = 8 * math.sqrt(LONGEST_SUM / 2**(24 - bits)) * np.sqrt(np.mean(np.square(of_storage), axis=0))
    print(f"{recipe}: differences {np.abs(errors).max(axis=0)}, {bound} allowed; effect {np.abs(effects).max(axis=0)}")
    assert (np.abs(errors) <= bound).all()
    if "fp8" in recipe:  # the bound does not allow another rounding
        assert (np.abs(effects).max(axis=0) > 5 * bound).all()


def rows_of_table():
    page = (program.ROOT / "docs/precision.md").read_text()
    return re.findall(r"^\| `--precision ([\w-]+)` \|(?:[^|\n]*\|){4} ([\d.]+) \|", page, re.MULTILINE)


def test_the_table_has_the_bytes_of_plans():
    """Of GPT-2, whose padding is less than a thousandth."""
    rows = rows_of_table()
    assert [level for level, _ in rows] == ["fp32", "tf32", "bf16", "fp16", "te-fp8", "bf16-stochastic"]
    for level, bytes_of_parameter in rows:
        machine = ["--gpu=H100"] if level == "tf32" else ["--device=cpu"]
        plan = json.loads(program.run("plan", "--model=gpt2", f"--precision={level}", *machine, "--json").stdout)
        arenas = plan["memory"]["arenas"]
        held = sum(arenas.get(name, 0) for name in ("parameters", "gradients", "master", "moments"))
        assert held / plan["model"]["parameters"] == pytest.approx(float(bytes_of_parameter), rel=1e-3), level
