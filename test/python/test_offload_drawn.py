"""Runs with state and parameters on a disk, of drawn meshes and options: the losses, norms, validations and checkpoints of the same run
in memory."""

import random

import pytest

import test_offload

BLOCKS = ["--layers=8", "--channels=32", "--heads=2", "--seq-len=16", "--vocab-size=384", "--micro-batch-size=1", "--sample-tokens=0",
          "--device=cpu", "--lr=3e-3", "--steps=5", "--val-every=2", "--val-batches=2", "--checkpoint-every=2", "--grad-clip=0.3"]


def drawn(draw):
    """The processes, and options of the mesh and of numbers."""
    pipeline, tensor, data = draw.choice([(1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 1, 1), (4, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 1)])
    options = [f"--pipeline-parallel={pipeline}", f"--tensor-parallel={tensor}", f"--tied-head={draw.choice(['true', 'false'])}"]
    micro_batches = 3
    schedule = draw.choice(["gpipe", "1f1b", "interleaved", "zb-h1", "breadth-first"] if pipeline > 1 else ["1f1b", "breadth-first"])
    if pipeline > 1 or schedule == "breadth-first":
        options.append(f"--pipeline-schedule={schedule}")
    if schedule == "interleaved":
        options.append("--virtual-stages=2")
        micro_batches = 2 * pipeline
    if tensor > 1:
        options += draw.choice([[], ["--sequence-parallel"]])
    if data > 1:
        options += [f"--zero-stage={draw.choice([0, 1, 2, 3])}", *draw.choice([[], ["--reduce-every=step"], ["--reduce-every=micro-batch"]])]
    options.append(f"--global-batch-tokens={16 * data * micro_batches}")
    options += draw.choice([["--dtype=fp32"], ["--dtype=bf16"], ["--dtype=bf16", "--gradient-dtype=bf16", "--stochastic-rounding"],
                            ["--dtype=bf16", "--master-dtype=none", "--moments-dtype=bf16"], ["--dtype=fp16"]])
    options += draw.choice([[], ["--recompute=selective"], ["--recompute=block"], ["--recompute=block", "--recompute-every=2"]])
    return pipeline * tensor * data, options


@pytest.mark.parametrize("seed", range(12))
def test_a_drawn_run_is_the_same(seed, tmp_path):
    draw = random.Random(seed)
    ranks, options = drawn(draw)
    tiers = draw.choice([["optimizer"], ["parameters"], ["optimizer", "parameters"], ["optimizer", "parameters"]])
    offload = [f"--nvme-dir={tmp_path}/a,{tmp_path}/b", *[f"--offload-{what}=nvme" for what in tiers], *draw.choice([[], ["--overlap-grad-reduce=false"]])]
    if "parameters" in tiers:
        offload += draw.choice([[], ["--prefetch-units=0"], ["--prefetch-units=1"], ["--prefetch-units=4"]])
    print(ranks, *options, *offload)
    runs = [test_offload.program.train(tmp_path / name, *BLOCKS, *options, *more, ranks=ranks, env=test_offload.ONE_THREAD)
            for name, more in (("memory", []), ("disk", offload))]
    test_offload.same(runs[1], runs[0])
