"""The model and data of the trainings on simulated GPUs (simulated.py): a tiny model on one batch. Also the results that two
runs must share, and their calls to the runtime."""

import collections
import functools
import json

import numpy as np
import reference_model
import safetensors_numpy
import torch
from program import PROGRAM, ROOT, write_token_file
from reference_gpt2 import GPT2
from simulated import at_once, train

torch.set_num_threads(1)  # leaves cores to the programs

CPU = str((ROOT / PROGRAM).resolve())  # the program whose CPU device is the reference
SIZES = GPT2(layers=2, heads=2, channels=16, seq_len=16, vocab_size=64)
SEQUENCES, STEPS = 4, 20
BF16 = ["--dtype=bf16"]
STOCHASTIC = [*BF16, "--stochastic-rounding"]
ROUNDED = [*BF16, "--gradient-dtype=bf16", "--micro-batch-size=1"]


class Experiment:
    """Random weights and one batch, which every step repeats, in files."""

    def __init__(self, folder, seed, sizes=SIZES):
        generator = torch.Generator().manual_seed(seed)
        self.sizes = sizes
        self.weights = reference_model.random_weights(sizes, generator)
        T = sizes.seq_len
        # One sequence of tokens, cut into windows that share their end tokens.
        run = torch.randint(sizes.vocab_size, (SEQUENCES * T + 1,), generator=generator)
        self.tokens = torch.stack([run[i * T:(i + 1) * T + 1] for i in range(SEQUENCES)])
        self.data, self.init = folder / "train.bin", folder / "init.safetensors"
        self.validation = folder / "val.bin"  # the same tokens
        for file in (self.data, self.validation):
            write_token_file(file, run.numpy())
        safetensors_numpy.save(self.init, {name: w.numpy().astype(np.float32) for name, w in self.weights.items()})

    def options(self, *more, steps=STEPS):
        return ["--init", self.init, "--train-data", self.data, f"--global-batch-tokens={SEQUENCES * self.sizes.seq_len}",
                *self.sizes.options(), f"--steps={steps}", "--lr=1e-3", "--lr-schedule=constant", "--warmup-steps=0",
                "--weight-decay=0.1", "--grad-clip=0.5", *more]


def results(run):
    """The results that must have the same bits."""
    return run.losses, run.column("grad_norm"), [line.get("val_loss") for line in run.lines]


def cached(folder):
    """The environment of a run with its own cache."""
    return {"XDG_CACHE_HOME": str(folder / "cache")}


def counted(folder, *options, ranks=1, variables=None):
    """A run, and the counts of each process's runtime (test/simt/runtime/counts.h)."""
    run = train(folder, *options, ranks=ranks, variables={"SIMT_COUNT": str(folder / "count"), **(variables or {})})
    counts = [json.loads(path.read_text()) for path in folder.glob("count.*")]
    assert len(counts) == ranks
    return run, counts


def in_four_steps(folder, *options, ranks=1):
    """The counts of all processes together in four steps: {kind: Counter}."""
    runs = at_once(*(functools.partial(counted, folder / str(steps), *options, f"--steps={steps}", ranks=ranks) for steps in (2, 6)))

    def total(kind, counts):
        return sum((collections.Counter(count.get(kind, {})) for count in counts), collections.Counter())

    few, more = (counts for _, counts in runs)
    return {kind: total(kind, more) - total(kind, few) for kind in ("waits", "uploads", "launches", "NCCL", "products", "descriptions")}
