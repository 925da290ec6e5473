"""Meshes on simulated GPUs (simulated.py). A run has the same bits for every ZeRO stage, pipeline and kind of recompute, and
for every order of the streams' work. Tensor-parallel ranks follow the CPU device."""

import dataclasses
import functools

import model_bounds
import numpy as np
import pytest
import simulated
from program import digest, write_token_file
from reference_gpt2 import SWITCHES_OFF
from simulated import at_once, train
from simulated_experiment import CPU, SIZES, Experiment, cached, counted, results

simulated.require()

HYBRID = ["--zero-stage=3", "--zero-shard-size=2"]
# For each number of processes: (dtype, micro-batches in a step, when gradients are reduced), and the options that train the
# same run as stage 0.
SHARDED = {
    2: {("bf16", 2, "micro-batch"): [["--zero-stage=1"], ["--zero-stage=2"], ["--zero-stage=3"]],
        ("fp32", 2, "step"): [["--zero-stage=1"], ["--zero-stage=2", "--overlap-grad-reduce=false"]]},
    4: {("bf16", 2, "step"): [["--zero-stage=2"], ["--zero-stage=3"]],
        ("fp32", 1, "step"): [["--zero-stage=1"], ["--zero-stage=3", "--prefetch-units=2"], HYBRID]},
}


@pytest.mark.parametrize("ranks", SHARDED)
def test_every_stage_of_zero_gives_the_same_bits(ranks, experiment, seed, tmp_path):
    """5 steps. The streams' work has another order in each run."""
    tokens = 2 * ranks * SIZES.seq_len
    write_token_file(tmp_path / "train.bin", np.random.default_rng(seed).integers(SIZES.vocab_size, size=tokens + 1))
    options = [*experiment.options(steps=5), "--train-data", tmp_path / "train.bin", f"--global-batch-tokens={tokens}"]

    def trained(setting, stage, seed):
        dtype, micro_batches, reduce_every = setting
        folder = tmp_path / str(seed)
        run = train(folder, *options, f"--dtype={dtype}", f"--micro-batch-size={2 // micro_batches}", f"--reduce-every={reduce_every}",
                    *stage, "--export", folder / "w.safetensors", ranks=ranks, seed=seed, variables=cached(tmp_path / dtype))
        assert run.record["micro_batches"] == micro_batches
        return results(run), digest(folder / "w.safetensors")

    def all_of(runs, first_seed):
        return at_once(*(functools.partial(trained, *run, seed=seed) for seed, run in enumerate(runs, first_seed)))

    settings = SHARDED[ranks]
    # These run first, because the others use their algorithms.
    whole = dict(zip(settings, all_of([(setting, []) for setting in settings], 0)))
    runs = [(setting, stage) for setting, stages in settings.items() for stage in stages]
    for (setting, stage), own in zip(runs, all_of(runs, len(settings))):
        if stage == HYBRID:  # NCCL adds in an order of its own
            assert own[0][0] == pytest.approx(whole[setting][0][0], rel=1e-5)
        else:
            assert own == whole[setting], (setting, stage)


@pytest.mark.parametrize("ranks, options", [(1, ["--dtype=fp32"]), (1, ["--dtype=bf16", "--micro-batch-size=2"]),
                                            (2, ["--dtype=bf16", "--micro-batch-size=1", "--zero-stage=3"])],
                         ids=["fp32", "bf16", "2 processes, bf16, ZeRO-3"])
def test_recompute_gives_the_same_bits(ranks, options, experiment, tmp_path):
    """Recompute repeats operations of the forward pass with the same inputs. The embedding and the head do not recompute."""
    def trained(recompute, seed):
        folder = tmp_path / recompute
        run = train(folder, *experiment.options(*options, steps=5), f"--recompute={recompute}", "--export", folder / "w.safetensors",
                    ranks=ranks, seed=seed, variables=cached(tmp_path))
        return results(run), digest(folder / "w.safetensors")

    whole = trained("none", seed=0)
    assert at_once(functools.partial(trained, "selective", 1), functools.partial(trained, "block", 2)) == [whole, whole]


# Stages, ranks, options. 4 ranks with 2 stages are 2 data ranks.
PIPELINES = [(2, 2, ["--pipeline-schedule=1f1b", "--recompute=selective"]), (2, 2, ["--pipeline-schedule=interleaved"]),
             (2, 2, ["--pipeline-schedule=zb-h1", "--recompute=block"]), (4, 4, ["--pipeline-schedule=1f1b"])]
PIPELINES_OF_PAIRS = [(2, 4, ["--zero-stage=0", "--pipeline-schedule=gpipe"]),
                      (2, 4, ["--zero-stage=1", "--pipeline-schedule=1f1b", "--overlap-grad-reduce=false"]),
                      (2, 4, ["--zero-stage=3", "--pipeline-schedule=interleaved", "--recompute=block"])]


@pytest.mark.parametrize("dtype, pipelines", [("bf16", PIPELINES), ("fp32", PIPELINES_OF_PAIRS)], ids=["bf16", "fp32, two data ranks"])
def test_every_pipeline_gives_the_same_bits(dtype, pipelines, experiment, tmp_path):
    """In fp32, it also follows the CPU device. The streams' work has another order in each run."""
    options = [*experiment.options("--layers=4", "--micro-batch-size=1", "--reduce-every=micro-batch", steps=6)]
    options = [option for option in options if option not in ("--init", experiment.init) and not str(option).startswith("--layers=2")]

    def trained(folder, stages, ranks, more, seed):
        run = train(folder, *options, f"--dtype={dtype}", f"--pipeline-parallel={stages}", *more, "--export",
                    folder / "w.safetensors", ranks=ranks, seed=seed, variables=cached(tmp_path))
        return results(run), digest(folder / "w.safetensors")

    first, *others = [trained(tmp_path / str(number), *pipeline, seed=number) for number, pipeline in enumerate(pipelines)]
    for own, pipeline in zip(others, pipelines[1:]):
        assert own == first, pipeline
    if dtype == "fp32":
        cpu = train(tmp_path / "cpu", *options, "--dtype=fp32", "--device=cpu", executable=CPU)
        assert np.abs(np.array(first[0][0]) - cpu.losses).max() <= model_bounds.LOSS_FP32


@pytest.mark.parametrize("tokens", [[], ["--sequence-parallel"]], ids=["whole tokens", "divided tokens"])
def test_ranks_that_share_layers_follow_the_cpu_device(tokens, experiment, tmp_path):
    """The bits are the same for every schedule of the stages, with recompute, and for every order of the streams' work."""
    options = [*experiment.options("--dtype=fp32", "--micro-batch-size=1", steps=6), "--tensor-parallel=2", *tokens]

    def trained(name, seed, *more):
        run = train(tmp_path / name, *options, "--pipeline-parallel=2", *more, "--export", tmp_path / name / "w.safetensors",
                    ranks=4, seed=seed, variables=cached(tmp_path))
        return results(run), digest(tmp_path / name / "w.safetensors")

    first = trained("1f1b", 0)
    assert trained("zb-h1", 1, "--pipeline-schedule=zb-h1", "--recompute=selective") == first
    cpu = train(tmp_path / "cpu", *experiment.options("--dtype=fp32", steps=6), "--device=cpu", executable=CPU)
    assert np.abs(np.array(first[0][0]) - cpu.losses).max() <= model_bounds.LOSS_FP32


def test_a_mesh_without_biases_and_with_a_head_of_its_own_follows_the_cpu_device(seed, tmp_path):
    experiment = Experiment(tmp_path, seed, dataclasses.replace(SIZES, **SWITCHES_OFF[2]))
    options = experiment.options("--dtype=fp32", "--micro-batch-size=1", steps=6)
    meshes = [(2, ["--pipeline-parallel=2", "--pipeline-schedule=zb-h1", "--recompute=selective"]),
              (2, ["--zero-stage=3", "--recompute=block"]), (2, ["--tensor-parallel=2"]),
              (4, ["--pipeline-parallel=2", "--tensor-parallel=2", "--sequence-parallel"])]
    cpu, *runs = at_once(functools.partial(train, tmp_path / "cpu", *options, "--device=cpu", executable=CPU),
                         *(functools.partial(train, tmp_path / str(i), *options, *mesh, ranks=ranks, seed=i)
                           for i, (ranks, mesh) in enumerate(meshes)))
    for run, mesh in zip(runs, meshes):
        assert np.abs(np.array(run.losses) - cpu.losses).max() <= model_bounds.LOSS_FP32, mesh


@pytest.mark.parametrize("ranks, options", [
    (2, ["--dtype=bf16", "--zero-stage=2", "--micro-batch-size=1", "--reduce-every=micro-batch"]),
    (2, ["--dtype=bf16", "--pipeline-parallel=2", "--pipeline-schedule=zb-h1", "--micro-batch-size=1"]),
    (4, ["--dtype=bf16", "--pipeline-parallel=2", "--tensor-parallel=2", "--zero-stage=1"]),
    (2, ["--dtype=fp16", "--offload-optimizer=cpu", "--zero-stage=3"]),
    (2, ["--dtype=bf16", "--moments-dtype=8bit", "--master-dtype=none"]),
    (4, ["--dtype=bf16", "--optimizer=muon", "--tensor-parallel=2", "--zero-stage=1"]),
    (2, ["--dtype=fp16", "--optimizer=muon", "--offload-optimizer=cpu", "--moments-dtype=bf16", "--zero-stage=2"]),
    (2, ["--precision=te-fp8", "--tensor-parallel=2"]),
    (2, ["--precision=te-fp8", "--zero-stage=1"])],
    ids=["ZeRO", "stages", "stages that share layers", "offload", "small state", "Muon", "Muon, offload", "fp8", "fp8, ZeRO"])
def test_nothing_is_loaded_beside_collectives(ranks, options, experiment, seed, tmp_path):
    """A first launch may wait for all work of the GPU, and so for a collective that waits for another rank. The code of all that
    steps, validation and samples launch is loaded before."""
    if "--precision=te-fp8" in options:
        experiment = Experiment(tmp_path, seed, dataclasses.replace(SIZES, channels=32))
    run, counts = counted(tmp_path, *experiment.options(*options, steps=3), "--val-data", experiment.validation, "--val-every=1",
                          "--sample-every=1", "--sample-tokens=3", "--prompt=5 6 7", ranks=ranks, variables={"SIMT_CHIP": "90"})
    assert [count.get("first launches beside NCCL") for count in counts] == [None] * ranks
    assert any(count["multiprocessors"]["mean held"] > 0 for count in counts)  # there are collectives


def test_pairs_of_stages_leave_the_multiprocessors_to_kernels(seed, tmp_path):
    """A middle stage has four pairs, whose receives spin until their peers send. By default each may hold 32 multiprocessors."""
    experiment = Experiment(tmp_path, seed, dataclasses.replace(SIZES, layers=4))
    _, counts = counted(tmp_path, *experiment.options("--dtype=bf16", "--pipeline-parallel=4", "--micro-batch-size=1", steps=2), ranks=4)
    wanted = [count["multiprocessors"]["most wanted"] for count in counts]
    assert max(wanted) <= 4 * 4 + 32 and any(count["multiprocessors"]["mean held"] > 0 for count in counts)  # and one collective
