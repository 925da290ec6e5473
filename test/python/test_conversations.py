"""Training on rows of conversations: the loss is the mean over the counted targets of the whole step, as PyTorch in fp64 has it,
on every mesh."""

import itertools
import os

import numpy as np
import pytest
import torch
from torch.nn import functional

import program
import reference_model
import safetensors_numpy
from model_comparison import save_weights
from reference_gpt2 import GPT2

SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))
SIZES = GPT2(layers=4, heads=2, channels=32, seq_len=112, vocab_size=50, bias=False)
# The counted targets of each row. The sum of any four is that of no other four, so that a step's sum tells its rows.
COUNTS = [1, 2, 4, 14, 54, 73, 95, 100]
AT_ONCE, STEPS = 4, 6
LR = 1e-3
TOLERANCE = 1e-5  # of the loss in fp32, as the project promises
IGNORED = -1


def drawn_rows(counts, generator):
    """Rows with so many counted targets, at drawn places among others."""
    rows = []
    for count in counts:
        length = count + 2 + int(torch.randint(10, (1,), generator=generator))
        counted = np.zeros(length, bool)
        counted[1 + torch.randperm(length - 1, generator=generator)[:count].numpy()] = True
        rows.append((torch.randint(SIZES.vocab_size, (length,), generator=generator).numpy(), counted))
    return rows


def loss_and_gradients(weights, rows):
    """The mean over the counted targets of some rows, each of which is computed alone and without padding."""
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    loss, count = 0, 0
    for tokens, counted in rows:
        targets = torch.from_numpy(np.where(counted, tokens, IGNORED)[1:])
        logits = SIZES.logits(leaves, torch.from_numpy(tokens[None, :-1]))[0]
        loss = loss + functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
        count += counted.sum()
    gradients = torch.autograd.grad(loss / count, list(leaves.values()))
    return loss.item() / count, dict(zip(leaves, gradients))


class Rows:
    """Weights and rows in files, and the losses and weights that PyTorch has for the steps of `single`, a run of one process."""

    def __init__(self, folder):
        generator = torch.Generator().manual_seed(SEED)
        self.folder = folder
        self.rows, self.validation = (drawn_rows(counts, generator) for counts in (COUNTS, [3, 1, 100, 17, 40]))
        self.weights = reference_model.random_weights(SIZES, generator)
        # In two files: the rows of all files are one source.
        program.write_rows(folder / "train_000001.bin", self.rows[:3])
        program.write_rows(folder / "train_000002.bin", self.rows[3:])
        program.write_rows(folder / "val_000000.bin", self.validation)
        save_weights(folder / "init.safetensors", self.weights)
        self.single = self.train("single", "--micro-batch-size=1")
        self.order = [self.rows_with(targets) for targets in self.single.column("targets")]
        self.losses, _, self.last_weights = reference_model.train(
            self.weights, SIZES, self.order, LR, grad_clip=1.0, gradients_of=loss_and_gradients)

    def rows_with(self, targets):
        [chosen] = [chosen for chosen in itertools.combinations(range(len(COUNTS)), AT_ONCE) if sum(COUNTS[i] for i in chosen) == targets]
        return [self.rows[i] for i in chosen]

    def options(self, *more):
        return ["--init", self.folder / "init.safetensors", "--train-data", self.folder / "train_*.bin", "--val-data",
                self.folder / "val_*.bin", "--val-batches=0", f"--global-batch-tokens={AT_ONCE * SIZES.seq_len}", f"--steps={STEPS}",
                *SIZES.options(), f"--lr={LR}", "--lr-schedule=constant", "--warmup-steps=0", "--beta2=0.999", "--weight-decay=0",
                "--grad-clip=1", "--dtype=fp32", *more]

    def train(self, name, *options, ranks=1):
        return program.train(self.folder / name, *self.options("--export", self.folder / f"{name}.safetensors", *options), ranks=ranks,
                             env={"OMP_NUM_THREADS": "1"})

    def compare(self, run):
        """The losses, the last validation and the exported weights with PyTorch's."""
        errors = np.abs(np.array(run.losses) - self.losses)
        expected = loss_and_gradients(self.last_weights, self.validation)[0]
        off = abs(run.lines[-1]["val_loss"] - expected)
        print(f"SEED={SEED} {run.out_dir.name}: largest error of the loss {errors.max():.2e}, of the validation's {off:.2e}")
        assert errors.max() <= TOLERANCE and off <= TOLERANCE
        weights = safetensors_numpy.load(self.folder / f"{run.out_dir.name}.safetensors")
        assert weights.keys() == self.last_weights.keys()
        # A hundredth of the way, as in test_training_against_pytorch.py.
        for name, reference in self.last_weights.items():
            assert np.abs(weights[name] - reference.numpy()).mean() <= 1e-2 * LR * STEPS, name
        assert run.column("targets") == self.single.column("targets")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return Rows(tmp_path_factory.mktemp("rows"))


def test_one_process(rows):
    rows.compare(rows.single)
    # An epoch has each row once.
    for first in range(0, STEPS, 2):
        assert sum(rows.single.column("targets")[first:first + 2]) == sum(COUNTS)
    assert rows.single.column("tokens") == [AT_ONCE * SIZES.seq_len * (step + 1) for step in range(STEPS)]
    rows.compare(rows.train("together", "--micro-batch-size=4"))


PIPELINE, TENSOR = "--pipeline-parallel=2", "--tensor-parallel=2"
MESHES = {
    "2 processes": (2, ["--micro-batch-size=2"]),
    "4 processes": (4, []),
    "a pipeline": (2, [PIPELINE, "--micro-batch-size=1"]),
    "tensor and sequence parallel": (2, [TENSOR, "--sequence-parallel"]),
    "all of it": (4, [PIPELINE, TENSOR, "--sequence-parallel", "--recompute=block", "--micro-batch-size=2"]),
    "stages and shards": (4, [PIPELINE, "--zero-stage=3", "--micro-batch-size=1", "--reduce-every=micro-batch"]),
}


@pytest.mark.parametrize("name", MESHES)
def test_meshes(rows, name):
    ranks, options = MESHES[name]
    rows.compare(rows.train(name, *options, ranks=ranks))


def test_every_stage_of_zero_has_the_same_bits(rows):
    runs = [rows.train(f"zero {stage}", f"--zero-stage={stage}", "--micro-batch-size=1", "--reduce-every=step", ranks=2) for stage in range(4)]
    rows.compare(runs[0])
    for run in runs[1:]:
        assert run.losses == runs[0].losses and run.lines[-1]["val_loss"] == runs[0].lines[-1]["val_loss"]


def test_every_schedule_has_the_same_bits(rows):
    losses = []
    for schedule in ("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1"):
        virtual = ["--virtual-stages=2"] * (schedule in ("interleaved", "breadth-first"))
        losses.append(rows.train(schedule, PIPELINE, "--micro-batch-size=1", f"--pipeline-schedule={schedule}", *virtual, ranks=2).losses)
    assert losses.count(losses[0]) == len(losses)
    assert losses[0] == pytest.approx(rows.single.losses, rel=0, abs=TOLERANCE)


def test_a_resumed_run_has_the_same_bits(rows, tmp_path):
    """In the middle of an epoch, on one process and on two."""
    for ranks in (1, 2):
        whole = rows.train(f"whole {ranks}", "--micro-batch-size=1", "--checkpoint-every=3", ranks=ranks)
        resumed = rows.train(f"resumed {ranks}", "--micro-batch-size=1", "--resume", whole.out_dir / "checkpoint-00000003", ranks=ranks)
        for name in ("loss", "targets"):
            assert resumed.column(name) == whole.column(name)[3:]


def test_metrics_of_other_data_have_no_targets(tmp_path):
    assert "targets" not in program.train(tmp_path, *program.SMALL, "--steps=1").lines[0]
