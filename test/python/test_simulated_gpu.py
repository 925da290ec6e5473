"""Trainings by the CUDA device's own host code and kernels, without a GPU (simulated.py).

They follow the CPU device. They wait and allocate only if necessary.
"""

import dataclasses
import functools

import model_bounds
import numpy as np
import pytest
import reference_gpt2
import simulated
import torch
from greedy_text import PROMPT, telling_weights
from model_comparison import save_weights
from simulated import at_once, train
from simulated_experiment import CPU, ROUNDED, SEQUENCES, SIZES, STEPS, STOCHASTIC, Experiment, counted, in_four_steps

simulated.require()

GREATEST = "priority -5"  # the highest priority of the simulated GPU's streams
BOTH_OFF = dataclasses.replace(SIZES, **reference_gpt2.SWITCHES_OFF[2])
CONNECTING_BYTES = 8 << 20  # to connect NCCL's ranks (llmc/train/devices.cpp)


@pytest.fixture(scope="module")
def bounds(experiment, seed):
    """A function that gives the allowed |difference| of any step's loss from the CPU device's."""
    return functools.cache(functools.partial(bound_of, experiment, seed))


def bound_of(experiment, seed, dtype, ranks, micro_batches, rounds_gradients):
    if dtype == "fp32":
        return model_bounds.LOSS_FP32
    return model_bounds.gpu_training_bound_bf16(
        experiment.weights, experiment.sizes, [experiment.tokens] * STEPS, (micro_batches,) * ranks, rounds_gradients, draws=6,
        generator=torch.Generator().manual_seed(seed), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), grad_clip=0.5)


# ---- against the CPU device


def follow(folder, experiment, bound, options, ranks):
    """Trains on both devices and compares the losses; returns both runs."""
    calls = [functools.partial(train, folder / "cpu", *experiment.options(*options, "--device=cpu"), executable=CPU)]
    calls += [functools.partial(train, folder / str(n), *experiment.options(*options), ranks=n, seed=n) for n in ranks]
    cpu, *gpus = at_once(*calls)
    # The loss falls far more than the bound, so the bound does not allow everything.
    assert cpu.losses[0] - cpu.losses[-1] > 20 * bound
    for n, gpu in zip(ranks, gpus):
        assert gpu.record["configuration"]["device"] == "cuda" and gpu.record["mesh"]["data"] == n
        difference = np.abs(np.array(gpu.losses) - cpu.losses).max()
        print(f"{n} processes, {' '.join(map(str, options))}: largest difference of the loss {difference:.2e}, {bound:.2e} allowed")
        assert difference <= bound
        if bound == model_bounds.LOSS_FP32:  # for the same weights, the gradients are equally near
            assert gpu.column("grad_norm")[0] == pytest.approx(cpu.column("grad_norm")[0], rel=model_bounds.GRADIENT_FP32)
        assert gpu.column("tokens") == cpu.column("tokens") and gpu.column("lr") == cpu.column("lr")
    return cpu, gpus


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_follows_the_cpu_on_any_number_of_processes(dtype, experiment, bounds, tmp_path):
    follow(tmp_path, experiment, bounds(dtype, 1, 1, False), [f"--dtype={dtype}"], (1, 2, 4))


def test_follows_the_cpu_with_gradients_in_bf16(experiment, bounds, tmp_path):
    follow(tmp_path, experiment, bounds("bf16", 2, 2, True), ROUNDED, (2,))


def test_follows_the_cpu_in_fp16(experiment, bounds, tmp_path):
    """The errors are those of bf16 with a unit roundoff of 2^-11 in place of 2^-8. No gradient that matters lies below
    2^-14: the scale is 2^16. From 2^60, gradients overflow until the scale is small enough, on both devices at the same steps."""
    bound = bounds("bf16", 1, 1, False) / 8 + model_bounds.LOSS_FP32
    follow(tmp_path / "follow", experiment, bound, ["--dtype=fp16"], (1, 2))
    options = experiment.options("--dtype=fp16", "--initial-loss-scale=1152921504606846976", steps=50)
    cpu, gpu = at_once(functools.partial(train, tmp_path / "cpu", *options, "--device=cpu", executable=CPU),
                       functools.partial(train, tmp_path / "gpu", *options, ranks=2, seed=2))
    assert gpu.column("loss_scale") == cpu.column("loss_scale") and gpu.column("skipped_steps") == cpu.column("skipped_steps")
    assert 10 < gpu.column("skipped_steps")[-1] < 50
    # Each skipped step has the loss of the weights of the start.
    assert abs(gpu.losses[-1] - cpu.losses[-1]) <= bound


@pytest.mark.parametrize("options", [["--dtype=bf16", "--moments-dtype=bf16"], ["--dtype=bf16", "--master-dtype=none"],
                                     ["--dtype=bf16", "--moments-dtype=bf16", "--master-dtype=none", "--gradient-dtype=bf16"]],
                         ids=["moments", "no master", "both"])
def test_follows_the_cpu_with_small_state(options, experiment, bounds, tmp_path):
    """Both devices round state with the same random bits, so its roundings add nothing to the difference of their losses."""
    follow(tmp_path, experiment, bounds("bf16", 2, 2, True), options, (2,))


@pytest.mark.parametrize("optimizer", [["lion", "--lr=3e-4", "--moments-dtype=bf16"], ["sgd", "--lr=0.1", "--nesterov"], ["muon"]], ids=["lion", "sgd", "muon"])
def test_follows_the_cpu_with_other_optimizers(optimizer, experiment, bounds, tmp_path):
    follow(tmp_path, experiment, bounds("fp32", 1, 1, False), ["--dtype=fp32", f"--optimizer={optimizer[0]}", *optimizer[1:]], (1, 2))


def test_follows_the_cpu_with_moments_in_8_bits(seed, tmp_path):
    """Of a model with matrices that are large enough. Where the devices' moments differ by a share d, one of e/d numbers lies
    so near the middle of two entries, which are e apart, that it becomes another entry. Updates then differ by about sqrt(d e) at
    random: with d = 2^-17 and e = 1/15 by a thousandth of themselves, which the loss, whose fall is 20 times the bound, allows."""
    own = Experiment(tmp_path, seed, dataclasses.replace(SIZES, channels=32, vocab_size=256))
    follow(tmp_path, own, 20 * model_bounds.LOSS_FP32, ["--dtype=fp32", "--moments-dtype=8bit"], (1, 2))


def test_follows_the_cpu_with_stochastic_rounding(experiment, bounds, tmp_path):
    """Both devices use the same random bits. With a learning rate of 0, only the weights' rounding changes the loss; with other
    random bits, the changes would have nothing in common. Two ranks round one share each."""
    _, (gpu,) = follow(tmp_path, experiment, bounds("bf16", 1, 1, False), STOCHASTIC, (2,))
    options = experiment.options(*STOCHASTIC, "--lr=0", steps=6)
    still, on_cpu = (np.array(run.losses) for run in at_once(
        functools.partial(train, tmp_path / "still", *options, "--zero-stage=1", ranks=2, seed=2),
        functools.partial(train, tmp_path / "on the CPU", *options, "--device=cpu", executable=CPU)))
    # The first step's loss uses the weights before they are rounded at random.
    assert still[0] == gpu.losses[0]
    changes, differences = np.median(np.abs(still - still[0])[1:]), np.median(np.abs(still - on_cpu))
    print(f"rounding changes the loss by {changes:.2e}, the devices' losses differ by {differences:.2e}")
    assert changes > 1e-5 and differences < 0.01 * changes


def test_follows_the_cpu_in_micro_batches_validation_and_samples(experiment, bounds, tmp_path):
    options = ["--dtype=fp32", "--micro-batch-size=1", "--val-data", experiment.validation, "--val-every=7", "--sample-tokens=12",
               "--sample-every=15", "--prompt=5 6 7", "--temperature=0"]
    cpu, (gpu,) = follow(tmp_path, experiment, bounds("fp32", 1, 1, False), options, (1,))
    validations = [[(line["step"], line["val_loss"]) for line in run.lines if "val_loss" in line] for run in (cpu, gpu)]
    assert [step for step, _ in validations[0]] == [7, 14, 20] == [step for step, _ in validations[1]]
    for (_, one), (_, other) in zip(*validations):
        assert abs(one - other) <= model_bounds.LOSS_FP32
    texts = [[line for line in run.output.splitlines() if "5 6 7" in line] for run in (cpu, gpu)]
    assert len(texts[0]) == 2 and texts[0] == texts[1]


@pytest.mark.parametrize("switches", reference_gpt2.SWITCHES_OFF, ids=str)
def test_follows_the_cpu_without_biases_and_with_a_head_of_its_own(switches, seed, tmp_path):
    own = Experiment(tmp_path, seed, dataclasses.replace(SIZES, **switches))
    follow(tmp_path, own, model_bounds.LOSS_FP32, ["--dtype=fp32", "--micro-batch-size=1"], (1, 2))


def test_follows_the_cpu_without_biases_and_with_a_head_of_its_own_in_bf16(seed, tmp_path):
    own = Experiment(tmp_path, seed, BOTH_OFF)
    follow(tmp_path, own, bound_of(own, seed, "bf16", 1, 1, False), ["--dtype=bf16"], (1, 2))


@pytest.mark.parametrize("sizes", [SIZES, BOTH_OFF], ids=["all switches on", "no biases, a head of its own"])
def test_generates_the_likeliest_text(sizes, seed, tmp_path):
    """--generate: a prompt, rows one by one, a full context, and the collectives of tensor-parallel and sharded ranks."""
    weights, expected = telling_weights(sizes, seed)
    save_weights(tmp_path / "init.safetensors", weights)
    count = sizes.seq_len + 5
    options = ["--generate", "--init", tmp_path / "init.safetensors", *sizes.options(), "--dtype=fp32", "--temperature=0",
               f"--prompt={' '.join(map(str, PROMPT))}", f"--sample-tokens={count}"]
    meshes = [(1, []), (2, ["--tensor-parallel=2"]), (2, ["--zero-stage=3"]), (2, ["--pipeline-parallel=2"])]
    runs = at_once(*[functools.partial(simulated.run, [*options, *mesh], tmp_path / str(i), ranks=ranks, seed=i)
                     for i, (ranks, mesh) in enumerate(meshes)])
    for run, mesh in zip(runs, meshes):
        assert run.returncode == 0, f"{mesh}\n{run.stderr}"
        assert [int(token) for token in run.stdout.split()] == [*PROMPT, *expected[:count]], mesh


# ---- memory and waits


@pytest.mark.parametrize("ranks, options", [(1, ["--dtype=fp32"]), (2, [*STOCHASTIC, *ROUNDED])],
                         ids=["fp32", "2 processes, bf16 throughout"])
def test_an_arena_is_one_allocation_and_nothing_else_is(ranks, options, experiment, tmp_path):
    run, counts = counted(tmp_path, *experiment.options(*options, steps=1), ranks=ranks)
    arenas = [size for size in run.record["memory"].values() if size > 0]
    connecting = [CONNECTING_BYTES] if ranks > 1 else []  # released before the run
    for count in counts:
        assert sorted(count["cudaMalloc"]) == sorted(arenas + connecting)


@pytest.mark.parametrize("ranks, text", [(1, "CUDA's context and other processes 286.1 MiB"),
                                         (2, "CUDA's context and other processes 286.1 MiB, NCCL 76.3 MiB")])
def test_memory_beside_the_arenas_is_told_apart(ranks, text, experiment, tmp_path):
    taken = {"SIMT_CONTEXT_BYTES": "300000000", "SIMT_NCCL_BYTES": "80000000"}
    run = train(tmp_path, *experiment.options(steps=1), ranks=ranks, variables=taken)
    assert f"  beside it   {text}\n" in run.output


@pytest.mark.parametrize("ranks, micro_batches, stage", [(1, 1, 0), (2, 1, 0), (1, 4, 0), (2, 2, 3)])
def test_a_step_waits_for_nothing_but_its_loss(ranks, micro_batches, stage, experiment, tmp_path):
    """It waits once by polling, so that the watchdog stays alive, and once for the copy."""
    options = [*experiment.options(), f"--micro-batch-size={SEQUENCES // ranks // micro_batches}", f"--zero-stage={stage}"]
    counts = in_four_steps(tmp_path, *options, ranks=ranks)
    polls = counts["waits"].pop("cudaEventQuery")
    assert counts["waits"] == {"cudaMemcpyAsync": 4 * ranks, "cudaStreamSynchronize": 4 * ranks}
    allowed = 4 * ranks
    # With other processes, work also continues while the host is elsewhere, and may be done when the host asks.
    assert polls == allowed or (ranks > 1 and 0 < polls <= allowed)
    assert counts["products"] and not counts["descriptions"]  # the first step's descriptions serve for all steps
    check_streams(counts, ranks, micro_batches)


def check_streams(counts, ranks, micro_batches):
    """Tokens come from pinned memory, in a stream separate from the kernels'. NCCL's work goes before other work."""
    print(counts)
    # Inputs and targets.
    (place, number), = counts["uploads"].items()
    memory, stream = place.split(", ")
    assert (memory, number) == ("pinned", 2 * 4 * ranks * micro_batches)
    assert counts["launches"] and stream not in counts["launches"]
    assert set(counts["NCCL"]) == ({GREATEST} if ranks > 1 else set())
