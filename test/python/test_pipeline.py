"""Pipelines as a user runs them. Every schedule gives the same run, near that of one process. A run resumes on another mesh.
Open MPI's counts of bytes and a process that dies are tested too. test/mpi/parallel_matrix_test.cpp compares the ranks' own
numbers, step by step."""

import os
import re
import signal
import subprocess
import time

import numpy as np
import pytest

import planned
import program
import safetensors_numpy
from planned import plan
from program import digest
from test_zero import TINY, processes, sample, sent, train

SMALL = ["--layers=4", "--micro-batch-size=2", "--check-replicas-every=2"]
TOLERANCE = 2e-5  # relative difference of losses in fp32
ORDERS = [["--pipeline-schedule=1f1b"], ["--pipeline-schedule=naive"], ["--pipeline-schedule=gpipe"],
          ["--pipeline-schedule=interleaved"], ["--pipeline-schedule=breadth-first"], ["--pipeline-schedule=zb-h1"]]


def mesh(stages, *more):
    return [f"--pipeline-parallel={stages}", *more]


def test_every_schedule_is_the_same_run(tmp_path):
    """Compares losses, norms, validation, samples and files, with all ZeRO stages and recompute."""
    options = [*SMALL, "--steps=6", "--reduce-every=micro-batch", "--sample-tokens=30", "--temperature=0"]
    more = [["--zero-stage=0"], ["--zero-stage=1", "--recompute=selective"], ["--zero-stage=2"],
            ["--zero-stage=3", "--recompute=block", "--recompute-every=2"], ["--zero-stage=3"], ["--zero-stage=3", "--recompute=block"]]
    runs = [train(tmp_path / str(number), *options, *mesh(2), *order, *with_these)
            for number, (order, with_these) in enumerate(zip(ORDERS, more))]
    for (_, results, out), order in zip(runs, ORDERS):
        assert results == runs[0][1], order
        assert sample(out) == sample(runs[0][2])
    whole, (losses, norms, val_loss, _), out = train(tmp_path / "whole", *options, ranks=1)
    assert runs[0][0].losses == pytest.approx(losses, rel=TOLERANCE)
    assert runs[0][0].column("grad_norm")[0] == pytest.approx(norms[0], rel=TOLERANCE)
    assert runs[0][0].lines[-1]["val_loss"] == pytest.approx(val_loss, rel=TOLERANCE)
    assert sample(out) == sample(runs[0][2])  # greedy, and far from a tie
    weights, others = (safetensors_numpy.load(run.out_dir / "w.safetensors") for run in (whole, runs[0][0]))
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        if name.endswith("attn.c_attn.bias"):  # except the keys', whose gradient is zero apart from rounding
            tensor, others[name] = (np.delete(each, slice(32, 64)) for each in (tensor, others[name]))
        assert np.abs(tensor - others[name]).max() <= TOLERANCE, name


def test_an_odd_number_of_stages_is_the_same_run(tmp_path):
    """Chunks of an interleaved schedule pass the residual stream around a ring of three stages."""
    options = ["--layers=6", "--micro-batch-size=2", "--global-batch-tokens=384", "--steps=3", "--sample-tokens=0"]
    schedules = [[], ["--pipeline-schedule=interleaved", "--virtual-stages=2"], ["--pipeline-schedule=breadth-first"],
                 ["--pipeline-schedule=zb-h1"]]
    first, *others = [train(tmp_path / str(number), *options, *mesh(3), *schedule, ranks=3)[:2]
                      for number, schedule in enumerate(schedules)]
    for run, results in others:
        assert results == first[1] and digest(run.out_dir / "w.safetensors") == digest(first[0].out_dir / "w.safetensors")
    _, (losses, *_), _ = train(tmp_path / "whole", *options, ranks=1)
    assert first[0].losses == pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.more
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_first_or_last_stage_without_layers(tied, tmp_path):
    """The embedding, or the head, may have a stage for itself: the same bits as with layers, the bytes of the plan, and a resume on
    another mesh."""
    options = [*SMALL, f"--tied-head={str(tied).lower()}", "--steps=4", "--reduce-every=micro-batch", "--sample-tokens=20", "--temperature=0",
               "--lr-schedule=constant"]
    layers = {"interleaved": ["0,2,2,0", "1,1,2,0"], "breadth-first": ["2,1,1,0", "0,1,1,2"]}
    _, results, out = train(tmp_path / "layers", *options, *mesh(2))
    for number, [order] in enumerate(ORDERS):
        kinds = layers.get(order.partition("=")[2], ["4,0", "0,4"])
        for which, counts in enumerate(kinds):
            these = [*mesh(2), order, f"--pipeline-layers={counts}", *(["--virtual-stages=2"] if kinds != ["4,0", "0,4"] else []),
                     f"--zero-stage={(number + which) % 4}", *(["--recompute=block"] if number % 2 else [])]
            run, same, text = train(tmp_path / f"{number}-{which}", *options, *these)
            assert same == results, these
            assert sample(text) == sample(out)
            if not tied and which == 0:
                planned.assert_equals_run(plan(*TINY, *options, *these, "--processes=4")[0], run)
    train(tmp_path / "parts", *options, *mesh(2), "--pipeline-layers=4,0", "--zero-stage=2", "--steps=2")
    _, resumed, _ = train(tmp_path / "parts", "--layers=4", "--resume", "--steps=4", *mesh(2), "--pipeline-layers=0,4", "--zero-stage=3",
                          "--pipeline-schedule=zb-h1", "--check-replicas-every=2")
    assert resumed == results


def test_three_stages_of_which_two_have_no_layers(tmp_path):
    options = ["--layers=3", "--micro-batch-size=2", "--global-batch-tokens=384", "--steps=3", "--sample-tokens=0"]
    runs = [train(tmp_path / str(number), *options, *mesh(3), *more, ranks=3)[1]
            for number, more in enumerate([[], ["--pipeline-layers=0,3,0"], ["--pipeline-layers=0,3,0", "--pipeline-schedule=zb-h1"]])]
    assert runs[1] == runs[0] and runs[2] == runs[0]


def test_more_stages_than_layers(tmp_path):
    options = ["--layers=2", "--micro-batch-size=3", "--global-batch-tokens=384", "--steps=3", "--sample-tokens=0"]
    _, results, _ = train(tmp_path / "two", *options, *mesh(2), ranks=2)
    for number, (stages, more) in enumerate([(3, ["--pipeline-layers=1,1,0"]), (4, ["--pipeline-layers=0,1,1,0"]),
                                             (2, ["--pipeline-layers=0,1,1,0", "--virtual-stages=2", "--pipeline-schedule=breadth-first"])]):
        assert train(tmp_path / str(number), *options, *mesh(stages), *more, ranks=stages)[1] == results


LAYER_BY_LAYER = ["--pipeline-schedule=breadth-first"]


@pytest.mark.parametrize("ranks, options", [
    (1, []), (1, ["--virtual-stages=2", "--recompute=selective"]), (2, ["--tensor-parallel=2", "--sequence-parallel"]),
    (2, ["--zero-stage=0", "--recompute=block"]), (2, ["--zero-stage=1", "--reduce-every=micro-batch"]),
    (2, ["--zero-stage=2", "--reduce-every=micro-batch"]), (2, ["--zero-stage=2", "--reduce-every=step"]),
    (2, ["--zero-stage=3", "--reduce-every=micro-batch", "--recompute=block", "--recompute-every=2"]),
    (2, ["--zero-stage=3", "--reduce-every=step", "--prefetch-units=2", "--dtype=bf16", "--gradient-dtype=bf16"]),
    (4, ["--zero-stage=3", "--zero-shard-size=2", "--reduce-every=step", "--overlap-grad-reduce=false"])], ids=str)
def test_layer_by_layer_is_the_same_run(ranks, options, tmp_path):
    """On one stage, with an untied head: each sum of gradients keeps its order."""
    options = [*SMALL, "--tied-head=false", "--steps=5", "--val-every=2", "--sample-tokens=0", *options]
    default, results, _ = train(tmp_path / "default", *[option for option in options if "virtual" not in option], ranks=ranks)
    run, same, _ = train(tmp_path / "layers", *options, *LAYER_BY_LAYER, ranks=ranks)
    assert same == results
    assert run.record["pipeline"]["stages"] == 1
    assert (sum(run.record["bytes_sent"].values()) < sum(default.record["bytes_sent"].values())) == ("--zero-stage=3" in options)


def test_layer_by_layer_a_layer_is_gathered_twice_and_reduced_once(tmp_path):
    options = [*SMALL, "--tied-head=false", "--steps=1", "--zero-stage=3", "--sample-tokens=0", *LAYER_BY_LAYER]
    two, many = (train(tmp_path / str(tokens), *options, f"--global-batch-tokens={tokens}", ranks=2)[0] for tokens in (128, 640))
    assert [run.record["micro_batches"] for run in (two, many)] == [2, 10]
    assert two.record["bytes_sent"] == many.record["bytes_sent"]
    assert two.record["memory"]["gradients"] == many.record["memory"]["gradients"]


@pytest.mark.more
@pytest.mark.parametrize("mesh_of_8", [mesh(2, "--pipeline-schedule=zb-h1"), ["--tensor-parallel=2", "--sequence-parallel"]],
                         ids=["stages", "tensor"])
def test_groups_of_shards_beside_other_splits_are_the_same_run(mesh_of_8, tmp_path):
    """Hybrid sharding: four data ranks hold two copies of the shards."""
    options = [*SMALL, "--steps=4", "--reduce-every=micro-batch", "--sample-tokens=0", *mesh_of_8]
    _, whole, _ = train(tmp_path / "whole", *options, ranks=8)
    for stage in (1, 3):
        run, results, _ = train(tmp_path / str(stage), *options, f"--zero-stage={stage}", "--zero-shard-size=2", ranks=8)
        assert results == whole
        assert run.record["mesh"]["replicas"] == 2


MESHES = {"one process": ([], 1), "2 stages x 2": (mesh(2, "--zero-stage=3"), 4), "4 stages": (mesh(4, "--pipeline-schedule=gpipe"), 4),
          "2 stages": (mesh(2, "--pipeline-schedule=interleaved"), 2), "3 data ranks": (["--zero-stage=2"], 3),
          "2 stages x 2 tensor": (mesh(2, "--tensor-parallel=2", "--sequence-parallel"), 4)}


@pytest.mark.parametrize("saved, resumed", [("2 stages x 2", "2 stages x 2"), ("2 stages x 2", "one process"),
                                            ("one process", "2 stages x 2"), ("4 stages", "2 stages"),
                                            ("2 stages", "4 stages"), ("3 data ranks", "4 stages"),
                                            ("2 stages x 2 tensor", "2 stages x 2 tensor"), ("2 stages x 2 tensor", "one process"),
                                            ("3 data ranks", "2 stages x 2 tensor")])
def test_a_checkpoint_of_one_mesh_goes_on_on_another(saved, resumed, tmp_path):
    options = [*SMALL, "--lr-schedule=constant", "--sample-tokens=0", "--checkpoint-every=3", "--reduce-every=micro-batch"]
    where, ranks = MESHES[saved]
    first, _, _ = train(tmp_path / "first", *options, "--steps=6", *where, ranks=ranks)
    where, ranks = MESHES[resumed]
    on, _, _ = train(tmp_path / "on", *options, "--steps=6", f"--resume={first.out_dir}/checkpoint-00000003", *where, ranks=ranks)
    assert on.column("step") == [4, 5, 6]
    if saved == resumed:
        assert on.losses == first.losses[3:]
        assert digest(tmp_path / "on/w.safetensors") == digest(tmp_path / "first/w.safetensors")
    else:
        assert on.losses == pytest.approx(first.losses[3:], rel=TOLERANCE)


def test_the_same_checkpoint_on_any_number_of_stages_gives_the_same_bits(tmp_path):
    """The two parts of the tied gradients are added once, wherever they are computed."""
    options = [*SMALL, "--steps=4", "--sample-tokens=0"]
    two, four = (train(tmp_path / str(stages), *options, *mesh(stages), ranks=stages)[1] for stages in (2, 4))
    assert two == four


# ---- bytes that are sent


@pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")
@pytest.mark.parametrize("stages, options", [(2, ["--micro-batch-size=3"]), (2, ["--pipeline-schedule=interleaved", "--micro-batch-size=6"]),
                                             (4, ["--pipeline-schedule=gpipe", "--micro-batch-size=4"]),
                                             (2, ["--micro-batch-size=3", "--tied-head=false"])])
def test_open_mpi_sent_what_the_list_says(stages, options, tmp_path):
    """Four more steps send four times the bytes of the formula, and the other bytes of a step."""
    options = ["--layers=4", *options, *mesh(stages), "--val-batches=1", "--sample-tokens=0"]
    few, more = (sent(tmp_path / str(steps), *options, f"--steps={steps}", ranks=stages) for steps in (2, 6))
    micro_batch = int(re.search(r"size=(\d+)", " ".join(options))[1])
    chunks = stages * (2 if "--pipeline-schedule=interleaved" in options else 1)
    # Each way over each border: the residual stream of every micro-batch, B T C. 24 sequences of 16 tokens, 32 channels.
    activations = 2 * (chunks - 1) * (24 // micro_batch) * micro_batch * 16 * 32 * 4
    assert activations == 2 * (chunks - 1) * 24 * 16 * 32 * 4
    # wte's gradients, 256 rows, to and fro between two stages: each sends a half to be added, and a sum. An untied head is on
    # one stage only.
    is_tied = "--tied-head=false" not in options
    tied = 2 * 256 * 32 * 4 if is_tied else 0
    besides = (more - few) / 4 - activations - tied
    # The gradients' sums of squares, one number for every 1024 elements of all units: 8 + 1 + 4 x 13 + 1, and 8 for an untied
    # head. Like the loss, they are summed over the stages in fp64. Each rank also tells every other rank whether a signal came.
    blocks = 8 + 1 + 4 * 13 + 1 + (0 if is_tied else 8)
    rest = blocks % stages
    squares = stages * (stages - 1) * (2 * (blocks // stages) + rest) * 4
    assert besides == squares + stages * (stages - 1) * 8 * 2


# ---- processes that die


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_stage_ends_the_job(victim, tmp_path):
    command = [program.PROGRAM, "--processes", "4", "--layers=8", "--heads=2", "--channels=128", "--seq-len=16",
               "--global-batch-tokens=384", "--device=cpu", f"--out-dir={tmp_path}", "--steps=1000000", *mesh(4), "--sample-tokens=0",
               "--comm-timeout=20"]
    job = subprocess.Popen(command, cwd=program.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 5:
        assert job.poll() is None
        time.sleep(0.05)
    start = time.monotonic()
    os.kill(sorted(processes(str(tmp_path)))[victim], signal.SIGKILL)
    err = job.communicate(timeout=60 * program.PATIENCE)[1]
    assert job.returncode != 0 and time.monotonic() - start < 40 * program.PATIENCE
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) <= 1, err
