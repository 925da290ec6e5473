"""The same run on any number of processes, and the same bits when it is repeated."""

import math

import numpy as np
import pytest

import program
import safetensors_numpy
from program import digest

# 24 sequences a step: a multiple of each number of processes below.
MODEL = [*program.SMALL, "--lr=1e-3"]
STEPS = 50
TOLERANCE = 1e-5  # absolute, of the loss in fp32, as the project promises


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return program.train(tmp_path_factory.mktemp("single"), *MODEL, f"--steps={STEPS}")


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8])
def test_any_number_of_processes_trains_the_same_run(single, ranks, tmp_path):
    run = program.train(tmp_path, *MODEL, f"--steps={STEPS}", ranks=ranks)
    assert run.record["mesh"]["data"] == ranks
    difference = np.abs(np.array(run.losses) - single.losses).max()
    print(f"{ranks} processes: largest difference of the loss {difference:.2e}")
    assert difference <= TOLERANCE
    # Norms at the same weights: a sum over fixed blocks of gradients that differ by rounding, at most by 1e-5 of their norm.
    # The weights' differences affect later norms more than the losses, and these norms are not promised.
    assert run.column("grad_norm")[0] == pytest.approx(single.column("grad_norm")[0], rel=1e-5)
    assert run.lines[-1]["val_loss"] == pytest.approx(single.lines[-1]["val_loss"], abs=TOLERANCE)
    assert run.column("tokens") == [384 * step for step in range(1, STEPS + 1)]


# ---- gradients in bf16 and stochastic rounding

BF16 = ["--dtype=bf16", "--gradient-dtype=bf16", "--stochastic-rounding"]
# One micro-batch size and one number of threads: a micro-batch's gradient has the same bits on every mesh.
ALIKE = ["--micro-batch-size=6", "--lr-schedule=constant", "--weight-decay=0", "--grad-clip=0"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
U = 2.0**-8  # bf16's unit roundoff


@pytest.fixture(scope="module")
def micro_batch_norms(tmp_path_factory):
    """The gradient norms of the first step's four micro-batches. With a learning rate of 0, each is a step's norm."""
    run = program.train(tmp_path_factory.mktemp("parts"), *MODEL, *BF16[:1], *ALIKE, "--global-batch-tokens=96", "--lr=0",
                        "--steps=4", env=ONE_THREAD)
    return np.array(run.column("grad_norm")) / 4


def rounding_bound(norms, ranks):
    """How far, in the norm, a step's gradient in bf16 may be from the sum of its micro-batches' gradients.

    A rank rounds once a micro-batch, each time to U of the sum so far. Over ranks, sums of two are rounded, in as many levels
    as a tree of pairs has. A sum's norm is at most the sum of the norms. The factor 1.05 covers products of errors, (1 + U)^8,
    and sums in fp32.
    """
    partial = [own[:k].sum() for own in np.split(norms, ranks) for k in range(1, len(own) + 1)]
    return 1.05 * U * (sum(partial) + math.ceil(math.log2(ranks)) * norms.sum())


def train_in_bf16(folder, *options, ranks=1):
    """The run, and all its final weights in one vector."""
    run = program.train(folder, *MODEL, *BF16, *ALIKE, "--eps=1", "--lr=5e-3", "--warmup-steps=0", "--steps=20", *options,
                        "--export", folder / "w.safetensors", ranks=ranks, env=ONE_THREAD)
    weights = safetensors_numpy.load(folder / "w.safetensors")
    return run, np.concatenate([weights[name].reshape(-1).astype(np.float64) for name in sorted(weights)])


@pytest.fixture(scope="module")
def single_bf16(tmp_path_factory):
    return train_in_bf16(tmp_path_factory.mktemp("bf16"))


@pytest.mark.parametrize("ranks", [2, 4])
def test_gradients_in_bf16_train_the_same_run_up_to_rounding(single_bf16, micro_batch_norms, ranks, tmp_path):
    single, single_weights = single_bf16
    run, weights = train_in_bf16(tmp_path / "run", ranks=ranks)
    # The first step's losses are the same sum of the same numbers in fp64.
    assert run.losses[0] == pytest.approx(single.losses[0], rel=1e-8)
    # Both gradients are near the same sum. (Squares are added in fp32.)
    D = sum(rounding_bound(micro_batch_norms, n) for n in (1, ranks))
    norms = [each.column("grad_norm")[0] for each in (single, run)]
    print(f"{ranks} processes: norms {norms}, bound of their difference {D:.3f}")
    assert abs(norms[0] - norms[1]) <= D + 1e-5 * norms[0]

    # With eps = 1 an update is lr m / (sqrt(v) + 1). m is a mean of gradients and sqrt(v) a root mean square of their sizes. If
    # gradients differ by D in the norm and have a norm of at most G, updates differ by at most lr (1 + G) D. Gradients of later
    # micro-batches may be 1.5 times as long as those of the first. The weights' differences change D only in second order. So
    # after t steps the weights differ by at most W = lr t (1 + G) 1.5 D in the norm.
    G = max(single.column("grad_norm"))
    W = 5e-3 * np.arange(21) * (1 + G) * 1.5 * D
    _, initial_weights = train_in_bf16(tmp_path / "initial", "--steps=0")
    apart, moved = np.linalg.norm(weights - single_weights), np.linalg.norm(single_weights - initial_weights)
    print(f"weights {apart:.2e} apart, {W[-1]:.2e} is allowed; moved by {moved:.2e}")
    assert apart <= W[-1] < moved / 4
    # Stochastic rounding uses the same random bits for both. A parameter differs by an ulp (at most 2^-7, for weights of about
    # 1) with the probability |difference of weights| / ulp. On average that is W, which changes the loss by G W. The standard
    # deviation for independent draws is at most G sqrt(ulp W); the bound has six of them.
    allowed = G * (W + 6 * np.sqrt(2.0**-7 * W))[:-1] + 1e-8
    difference = np.abs(np.array(run.losses) - single.losses)
    print(f"largest difference of the loss {difference.max():.2e}, {allowed.max():.2e} is allowed")
    assert (difference <= allowed).all()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_stochastic_rounding_is_the_same_on_any_number_of_processes(ranks, tmp_path):
    """With a learning rate of 0, only the rounding of the parameters changes from step to step, and with it the loss.

    On each batch the loss is the same sum of the same numbers. Another random number for a single parameter shows in the sixth
    digit."""
    options = [*MODEL, "--dtype=bf16", "--stochastic-rounding", "--lr=0", "--micro-batch-size=2", "--steps=6",
               "--checkpoint-every=3"]
    runs = [program.train(tmp_path / str(n), *options, ranks=n, env=ONE_THREAD) for n in (1, ranks)]
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-8)
    assert runs[0].lines[-1]["val_loss"] == pytest.approx(runs[1].lines[-1]["val_loss"], rel=1e-8)
    other = program.train(tmp_path / "nearest", *options[:-3], "--lr=0", "--micro-batch-size=2", "--steps=6",
                          "--stochastic-rounding=false", env=ONE_THREAD)
    assert other.losses[0] == runs[0].losses[0]  # initial weights are rounded to nearest
    assert (np.abs(np.array(other.losses) - runs[0].losses)[1:] > 1e-6).all()
    # Resumed on another number of processes.
    resumed = program.train(tmp_path / "resumed", *options, "--resume", tmp_path / "1/checkpoint-00000003", ranks=ranks,
                            env=ONE_THREAD)
    assert resumed.losses == pytest.approx(runs[0].losses[3:], rel=1e-8)


@pytest.mark.parametrize("dtypes", [["--dtype=fp32"], ["--dtype=bf16"], BF16], ids=" ".join)
@pytest.mark.parametrize("ranks", [1, 3])
def test_two_runs_are_bit_identical(ranks, dtypes, tmp_path):
    runs = []
    for name in ("a", "b"):
        runs.append(program.train(tmp_path / name, *MODEL, "--steps=12", *dtypes, "--micro-batch-size=4",
                                  "--export", tmp_path / f"{name}.safetensors", ranks=ranks))
    assert runs[0].losses == runs[1].losses
    assert runs[0].column("grad_norm") == runs[1].column("grad_norm")
    assert digest(tmp_path / "a.safetensors") == digest(tmp_path / "b.safetensors")


def test_another_seed_is_another_run(tmp_path):
    runs = [program.train(tmp_path / seed, *MODEL, "--steps=2", f"--seed={seed}") for seed in ("1", "2")]
    assert runs[0].losses != runs[1].losses
