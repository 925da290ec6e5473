"""Results of ./train_gpt for given weights without training: the loss of a whole validation, and a sample, against PyTorch in
fp64."""

import os
import re

import pytest
import torch

import model_bounds
import program
import reference_model
from greedy_text import PROMPT, TOKENS, telling_weights
from model_comparison import Experiment, save_weights
from reference_gpt2 import GPT2, SWITCHES_OFF

SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))

# ---- validation


def loss_of_windows(weights, sizes, shards, windows):
    """The mean loss over the targets of the first `windows` windows (all: None). Each window has up to T targets of one
    shard."""
    T = sizes.seq_len
    parts = [shard[first:first + T + 1] for shard in shards for first in range(0, len(shard) - 1, T)][:windows]
    losses = [reference_model.loss(weights, sizes, part[None]) * (len(part) - 1) for part in parts]
    return (sum(losses) / sum(len(part) - 1 for part in parts)).item()


TARGETS = {"7 windows": [77], "10 windows of 3 shards": [84, 1, 18], "8 whole windows": [96]}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("windows, switches", [*((name, {}) for name in TARGETS),
                                               *(("10 windows of 3 shards", switches) for switches in SWITCHES_OFF)], ids=str)
def test_validation(windows, switches, ranks, tmp_path):
    """Numbers of windows that are multiples of what the processes compute at once (2 each), and others."""
    targets = TARGETS[windows]
    sizes = GPT2(layers=2, heads=3, channels=48, seq_len=12, vocab_size=50, **switches)
    experiment = Experiment(tmp_path, sizes, batch=4, seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    shards = [torch.randint(sizes.vocab_size, (count + 1,), generator=generator) for count in targets]
    for i, shard in enumerate(shards):
        program.write_token_file(tmp_path / f"val_{i}.bin", shard.numpy())
    for batches, first in ((0, None), (1, 4)):
        expected = loss_of_windows(experiment.weights, sizes, shards, first)
        # With a learning rate of 0, the step before it changes nothing.
        run = program.train(tmp_path / str(batches), *experiment.options(1), "--lr=0", "--micro-batch-size=2",
                            f"--val-data={tmp_path}/val_*.bin", f"--val-batches={batches}", ranks=ranks)
        error = run.lines[0]["val_loss"] - expected
        print(f"SEED={SEED} {batches} batches: error of the loss {error:.2e}")
        assert abs(error) <= model_bounds.LOSS_FP32


# ---- sampling


@pytest.mark.parametrize("ranks, switches", [(1, {}), (2, {}), *((1, switches) for switches in SWITCHES_OFF)], ids=str)
def test_a_greedy_sample(ranks, switches, tmp_path):
    """Longer than the context, compared token by token."""
    sizes = GPT2(layers=2, heads=2, channels=32, seq_len=12, vocab_size=50, **switches)
    experiment = Experiment(tmp_path, sizes, batch=4, seed=SEED)
    weights, expected = telling_weights(sizes, SEED)
    save_weights(tmp_path / "init.safetensors", weights)
    text = program.run(*experiment.options(0), f"--prompt={' '.join(map(str, PROMPT))}", f"--sample-tokens={TOKENS}",
                       "--temperature=0", f"--out-dir={tmp_path}/run", ranks=ranks).stdout
    [line] = re.findall(r"sample after step 0 -+\n([\d\s]+)\n-+\n", text)
    assert [int(token) for token in line.split()] == [*PROMPT, *expected], f"SEED={SEED}"
