"""HellaSwag scores of given weights on several meshes, against PyTorch in fp64 with a separate tokenization."""

import dataclasses
import json
import os
import re

import numpy as np
import pytest
import torch

import gpt2_bpe
import probed_tokenizers
import program
import reference_gpt2
import reference_model
import simulated
from model_comparison import save_weights
from reference_gpt2 import GPT2

SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))
SIZES = GPT2(layers=2, heads=2, channels=32, seq_len=24, vocab_size=256)
WORDS = "a the man dog runs sits eats café of to and then quickly 3 — slowly, looks up!".split()
EXAMPLES = 40


def some_text(random, least, most):
    return " ".join(random.choice(WORDS, random.integers(least, most + 1)))


def row_losses(weights, sizes, context, ending):
    """The loss of each target of the ending, in the last T+1 tokens."""
    tokens = [*context, *ending][-sizes.seq_len - 1:]
    logits = sizes.logits(weights, torch.tensor([tokens[:-1]]))[0]
    scored = min(len(ending), sizes.seq_len)
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return losses[-scored:].numpy()


def make_examples(weights, sizes, encode):
    """(lines, right). In each example one ending leads clearly by sum and one by mean; the label is one of them, or any.
    `right` says for each example whether each of the two is right."""
    random = np.random.default_rng(SEED)
    lines, right = [], []
    while len(lines) < EXAMPLES:
        context, endings = some_text(random, 1, 9), [some_text(random, 1, 7) for _ in range(4)]
        losses = [row_losses(weights, sizes, encode(context), encode(" " + ending)) for ending in endings]
        choices = []
        for values in ([row.sum() for row in losses], [row.mean() for row in losses]):
            first, second = sorted(values)[:2]
            if second - first > 1e-3 * second:
                choices.append(int(np.argmin(values)))
        # Examples in which the two differ are more useful: a few others are enough.
        if len(choices) < 2 or (choices[0] == choices[1] and random.random() < 0.8):
            continue
        label = [choices[0], choices[1], int(random.integers(4))][len(lines) % 3]
        lines.append(json.dumps({"ind": len(lines), "ctx_a": "", "ctx": context, "endings": endings, "label": label}, ensure_ascii=False))
        right.append([label == choice for choice in choices])
    return lines, np.array(right)


class Experiment:
    def __init__(self, folder, sizes, encode):
        self.folder, self.sizes = folder, sizes
        weights = reference_model.random_weights(sizes, torch.Generator().manual_seed(SEED))
        save_weights(folder / "init.safetensors", weights)
        lines, self.right = make_examples(weights, sizes, encode)
        (folder / "examples.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def scores(self, examples=EXAMPLES):
        """The required hellaswag_acc and hellaswag_acc_norm."""
        return self.right[:examples].mean(axis=0)

    def options(self, *more):
        return [*self.sizes.options(), f"--init={self.folder}/init.safetensors", f"--eval-hellaswag={self.folder}/examples.jsonl",
                "--micro-batch-size=3", f"--global-batch-tokens={12 * self.sizes.seq_len}", "--dtype=fp32", *more]

    def train(self, name, *more, ranks=1):
        # With a learning rate of 0, the step before the scores changes nothing.
        return program.train(self.folder / name, *self.options("--steps=1", "--lr=0", *more), ranks=ranks)


def assert_scores(line, scores):
    assert [line["hellaswag_acc"], line["hellaswag_acc_norm"]] == pytest.approx(scores, abs=1e-6), f"SEED={SEED}"


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    return Experiment(tmp_path_factory.mktemp("bytes"), SIZES, lambda text: list(text.encode()))


MESHES = [(1, []), (4, []), (4, ["--pipeline-parallel=2", "--tensor-parallel=2", "--sequence-parallel"]),
          (4, ["--pipeline-parallel=2", "--zero-stage=3", "--pipeline-schedule=1f1b"])]


@pytest.mark.parametrize("ranks, mesh", MESHES, ids=["1", "data", "pipeline and tensor", "pipeline and data"])
def test_scores_are_pytorchs(of_bytes, ranks, mesh):
    run = of_bytes.train(f"{ranks}{'-'.join(mesh)}", *mesh, ranks=ranks)
    assert_scores(run.lines[-1], of_bytes.scores())


def test_scores_on_simulated_gpus(of_bytes, tmp_path):
    if not os.path.exists(simulated.PLAIN):
        pytest.skip(f"{simulated.PLAIN} was not built")
    options = of_bytes.options("--steps=1", "--lr=0", "--eval-examples=4", "--pipeline-parallel=2", f"--global-batch-tokens={3 * SIZES.seq_len}")
    run = simulated.train(tmp_path, *options, ranks=2, seed=SEED % 1000)
    assert_scores(run.lines[-1], of_bytes.scores(4))


def test_scores_with_gpt2s_tokens(tmp_path):
    folder = gpt2_bpe.require_files()
    sizes = GPT2(layers=1, heads=2, channels=16, seq_len=24, vocab_size=50257)
    # No token crosses a space that is not its first character.
    pieces = [space + part for space in ("", " ") for words in WORDS for part in words.split()]
    ids = {piece: ids for piece, (ids, _) in zip(pieces, probed_tokenizers.encoded(folder, [(piece.encode(), False) for piece in pieces]))}
    experiment = Experiment(tmp_path, sizes, lambda text: [id for piece in re.findall(" ?[^ ]+", text) for id in ids[piece]])
    program.write_token_file(tmp_path / "train.bin", np.arange(500) % 50257)
    run = experiment.train("run", f"--tokenizer={folder}", f"--train-data={tmp_path}/train.bin")
    assert_scores(run.lines[-1], experiment.scores())


def test_evaluation_alone(of_bytes):
    """With given weights and without training; also with a part of the examples."""
    out_dir = of_bytes.folder / "alone"
    text = program.run(*of_bytes.options("--steps=0", "--sample-tokens=0", "--eval-examples=7"), f"--out-dir={out_dir}").stdout
    acc, norm = 100 * of_bytes.scores(7)
    assert f"-- HellaSwag after step 0: {norm:.2f}% right by mean loss per token, {acc:.2f}% by summed loss, of 7 examples\n" in text, f"SEED={SEED}"
    (line,) = program.Run(out_dir).lines
    assert line["step"] == 0 and "loss" not in line and "val_loss" in line
    assert_scores(line, of_bytes.scores(7))


def test_evaluation_without_biases_and_with_a_head_of_its_own(tmp_path):
    sizes = dataclasses.replace(SIZES, **reference_gpt2.SWITCHES_OFF[2])
    experiment = Experiment(tmp_path, sizes, lambda text: list(text.encode()))
    for name, ranks, mesh in (("one", 1, []), ("stages", 2, ["--pipeline-parallel=2"])):
        program.run(*experiment.options("--steps=0", "--sample-tokens=0", *mesh), f"--out-dir={tmp_path}/{name}", ranks=ranks)
        (line,) = program.Run(tmp_path / name).lines
        assert_scores(line, experiment.scores())


def test_scores_while_training_and_after_a_resume(of_bytes):
    options = of_bytes.options("--lr=1e-3", "--eval-every=2", "--checkpoint-every=3")
    run = program.train(of_bytes.folder / "whole", *options, "--steps=5")
    scored = [line["step"] for line in run.lines if "hellaswag_acc_norm" in line]
    assert scored == [2, 4, 5]
    program.run(*options, f"--out-dir={of_bytes.folder}/whole", "--sample-tokens=0", "--steps=5", f"--resume={of_bytes.folder}/whole/checkpoint-00000003")
    again = program.Run(of_bytes.folder / "whole")
    assert [line.get("hellaswag_acc") for line in again.lines] == [line.get("hellaswag_acc") for line in run.lines]
