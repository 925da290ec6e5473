"""What ./train_gpt makes of given weights without training: the loss of a whole validation, and a sample, against PyTorch in fp64."""

import os
import re

import numpy as np
import pytest
import torch

import model_bounds
import program
import reference_model
from model_comparison import Experiment, save_weights
from reference_model import Sizes

SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))

# ---- validation


def loss_of_windows(weights, sizes, shards, windows):
    """Of the first so many windows (all: None), each of up to T targets of one shard, the mean over their targets."""
    T = sizes.seq_len
    parts = [shard[first:first + T + 1] for shard in shards for first in range(0, len(shard) - 1, T)][:windows]
    losses = [reference_model.loss(weights, sizes, part[None]) * (len(part) - 1) for part in parts]
    return (sum(losses) / sum(len(part) - 1 for part in parts)).item()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("targets", [[77], [84, 1, 18], [96]], ids=["7 windows", "10 windows of 3 shards", "8 whole windows"])
def test_validation(targets, ranks, tmp_path):
    """Windows that are no multiple of what the processes compute at once, 2 each, and ones that are."""
    sizes = Sizes(layers=2, heads=3, channels=48, seq_len=12, vocab_size=50)
    experiment = Experiment(tmp_path, sizes, batch=4, seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    shards = [torch.randint(sizes.vocab_size, (count + 1,), generator=generator) for count in targets]
    for i, shard in enumerate(shards):
        program.write_token_file(tmp_path / f"val_{i}.bin", shard.numpy())
    for batches, windows in ((0, None), (1, 4)):
        expected = loss_of_windows(experiment.weights, sizes, shards, windows)
        # Without a learning rate the step before it changes nothing.
        run = program.train(tmp_path / str(batches), *experiment.options(1), "--lr=0", "--micro-batch-size=2",
                            f"--val-data={tmp_path}/val_*.bin", f"--val-batches={batches}", ranks=ranks)
        error = run.lines[0]["val_loss"] - expected
        print(f"SEED={SEED} {batches} batches: error of the loss {error:.2e}")
        assert abs(error) <= model_bounds.LOSS_FP32


# ---- sampling

PROMPT = [3, 17, 4]
TOKENS = 40


def contexts(prompt, count, T):
    """Where the context begins for each of so many tokens: when it is full it goes on with its later half."""
    begin = max(len(prompt) - T, 0)
    for length in range(len(prompt), len(prompt) + count):
        if length - begin > T:
            begin = length - max(T // 2, 1)
        yield begin


def most_likely(weights, sizes, choose):
    """(tokens after PROMPT, the smallest lead of one over the second): `choose` gives a context's inputs, and the row of
    their logits to look at."""
    text, lead = list(PROMPT), np.inf
    for begin in contexts(PROMPT, TOKENS, sizes.seq_len):
        inputs, row = choose(text[begin:])
        logits = reference_model.logits(weights, sizes, torch.tensor([inputs]))[0, row]
        first, second = logits.topk(2).values
        # The project promises losses, so differences of logits, within 1e-5 for logits of about 1.
        lead = min(lead, ((first - second) / logits.abs().max()).item())
        text.append(logits.argmax().item())
    return text[len(PROMPT):], lead


def telling_weights(sizes, seed):
    """Weights with which the next token hangs on the whole context, and one of them always leads clearly."""
    generator = torch.Generator().manual_seed(seed)
    T = sizes.seq_len
    while True:
        weights = {name: 4 * weight if weight.dim() == 2 and name.startswith("h.") else weight
                   for name, weight in reference_model.random_weights(sizes, generator).items()}
        expected, lead = most_likely(weights, sizes, lambda context: (context, -1))
        others = [most_likely(weights, sizes, choose)[0] for choose in (
            lambda context: (context, len(context) // 2),  # not the last row
            lambda context: (context[-T // 2:], -1),  # less of it
            lambda context: (context[:-1] or context, -1))]  # not the last token
        if lead > 1e-3 and expected not in others and len(set(expected[T:])) > 3:
            return weights, expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_greedy_sample(ranks, tmp_path):
    """Longer than the context, token for token."""
    sizes = Sizes(layers=2, heads=2, channels=32, seq_len=12, vocab_size=50)
    experiment = Experiment(tmp_path, sizes, batch=4, seed=SEED)
    weights, expected = telling_weights(sizes, SEED)
    save_weights(tmp_path / "init.safetensors", weights)
    text = program.run(*experiment.options(0), f"--prompt={' '.join(map(str, PROMPT))}", f"--sample-tokens={TOKENS}",
                       "--temperature=0", f"--out-dir={tmp_path}/run", ranks=ranks).stdout
    [line] = re.findall(r"sample after step 0 -+\n([\d\s]+)\n-+\n", text)
    assert [int(token) for token in line.split()] == [*PROMPT, *expected], f"SEED={SEED}"
