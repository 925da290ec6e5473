"""Offload on simulated GPUs (simulated.py): what lies in the host's memory or on a disk gives the same bits, for every order of the
streams' work. A copy between host and device is done as late as its stream's order allows, and the host sees what is there."""

import functools

import pytest
import simulated
import test_offload
from reference_gpt2 import GPT2
from simulated import at_once, train
from simulated_experiment import BF16, Experiment, cached

simulated.require()

FP32 = ["--dtype=fp32"]
SHORT = [*BF16, "--gradient-dtype=bf16"]
SMALL = [*BF16, "--master-dtype=none", "--moments-dtype=bf16"]
MUON = ["--optimizer=muon", "--lr=1e-3"]
PIPELINE = ["--pipeline-parallel=2", "--pipeline-schedule=zb-h1"]
UNTIED, LAYER_BY_LAYER = "--tied-head=false", "--pipeline-schedule=breadth-first"


@pytest.fixture(scope="module")
def layers(tmp_path_factory, seed):
    """Seven layers, which take turns in buffers; four micro-batches of one sequence on one GPU."""
    return Experiment(tmp_path_factory.mktemp("layers"), seed, GPT2(layers=7, heads=2, channels=16, seq_len=16, vocab_size=64))


def offloaded(state, parameters):
    return [f"--offload-optimizer={state}", f"--offload-parameters={parameters}"]


@pytest.mark.parametrize("ranks, options, offload", [
    (1, FP32, offloaded("cpu", "cpu")),
    (1, BF16, offloaded("cpu", "none")),
    (1, BF16, [*offloaded("none", "cpu"), "--prefetch-units=0"]),
    (1, SHORT, [*offloaded("cpu", "cpu"), "--overlap-grad-reduce=false"]),
    (1, [*BF16, "--stochastic-rounding"], offloaded("nvme", "nvme")),
    (1, SMALL, offloaded("cpu", "nvme")),
    (1, [*SMALL, "--recompute=block"], [*offloaded("nvme", "cpu"), "--prefetch-units=4"]),
    (2, [*SHORT, "--zero-stage=0"], offloaded("cpu", "cpu")),
    (2, [*BF16, "--zero-stage=1", "--reduce-every=micro-batch"], offloaded("cpu", "cpu")),
    (2, [*BF16, "--zero-stage=1"], offloaded("nvme", "nvme")),
    (2, [*SHORT, "--zero-stage=2"], offloaded("nvme", "none")),
    (2, [*FP32, "--zero-stage=2", "--reduce-every=step"], offloaded("cpu", "cpu")),
    (2, [*BF16, "--zero-stage=3"], offloaded("cpu", "cpu")),
    (2, [*SHORT, "--zero-stage=3"], offloaded("nvme", "nvme")),
    (2, [*FP32, "--zero-stage=3"], [*offloaded("none", "nvme"), "--prefetch-units=1"]),
    (2, [*BF16, *PIPELINE], offloaded("cpu", "cpu")),
    (2, [*BF16, "--pipeline-parallel=2", "--pipeline-schedule=interleaved", "--tied-head=false"], offloaded("nvme", "nvme")),
    (2, [*SHORT, "--tensor-parallel=2", "--sequence-parallel"], offloaded("cpu", "nvme")),
    (1, [*BF16, UNTIED], [*offloaded("cpu", "cpu"), LAYER_BY_LAYER]),
    (1, [*SHORT, UNTIED, "--recompute=block"], [*offloaded("nvme", "nvme"), LAYER_BY_LAYER]),
    (2, [*FP32, UNTIED, "--zero-stage=3", "--reduce-every=step"], [*offloaded("cpu", "nvme"), LAYER_BY_LAYER]),
    (2, [*SHORT, UNTIED, "--zero-stage=2", "--reduce-every=micro-batch"], [*offloaded("nvme", "cpu"), LAYER_BY_LAYER]),
    (1, [*FP32, *MUON], offloaded("cpu", "cpu")),
    (2, [*BF16, *MUON, "--zero-stage=1"], offloaded("cpu", "none")),
    (2, ["--dtype=fp16", *MUON, "--zero-stage=3"], offloaded("cpu", "cpu")),
    (2, [*SMALL, *MUON, "--tensor-parallel=2"], offloaded("cpu", "none")),
], ids=lambda value: " ".join(value) if isinstance(value, list) else str(value))
def test_trains_the_same_run(ranks, options, offload, layers, tmp_path):
    init = [] if "--tied-head=false" in options else ["--init", layers.init]
    common = [*layers.options(*options, "--micro-batch-size=1", steps=4)[2:], *init, "--val-data", layers.validation, "--val-every=2",
              "--checkpoint-every=2", "--check-replicas-every=1"]
    # The first run chooses the algorithms of products for the others.
    whole = train(tmp_path / "whole", *common, ranks=ranks, variables=cached(tmp_path))
    others = at_once(*(functools.partial(train, tmp_path / str(seed), *common, *offload, f"--nvme-dir={tmp_path}/{seed}-disk"
                                         if "nvme" in " ".join(offload) else "--log-every=1", ranks=ranks, seed=seed, variables=cached(tmp_path))
                       for seed in (1, 2)))
    for run in others:
        assert run.record["configuration"]["device"] == "cuda"
        test_offload.same(run, whole)


def test_a_run_goes_on_elsewhere(layers, tmp_path):
    """From the host's memory to a disk and back to the GPU's memory; and text of parameters that are not on the GPU."""
    options = ["--init", layers.init, *layers.options(*BF16, "--stochastic-rounding", "--micro-batch-size=1", steps=6)[2:]]
    whole = train(tmp_path / "whole", *options, variables=cached(tmp_path))
    folder, disk = tmp_path / "parts", f"--nvme-dir={tmp_path}/disk"
    train(folder, *options, "--steps=2", *offloaded("cpu", "cpu"), variables=cached(tmp_path))
    for steps, offload in ((4, [*offloaded("nvme", "nvme"), disk]), (6, offloaded("none", "none"))):
        run = simulated.run([f"--out-dir={folder}/run", "--resume", f"--steps={steps}", "--sample-tokens=0", *offload], folder, variables=cached(tmp_path))
        assert run.returncode == 0, run.stderr
    parts = simulated.program.Run(folder / "run")
    assert parts.column("loss") == whole.column("loss")
    last = "checkpoint-00000006"
    assert test_offload.checkpoints(parts)[last] == test_offload.checkpoints(whole)[last]
    texts = [simulated.run(["--generate", f"--resume={folder}/run", "--sample-tokens=20", *offload], folder, variables=cached(tmp_path))
             for offload in ([], ["--offload-parameters=cpu"], ["--offload-parameters=nvme", disk])]
    assert [text.returncode for text in texts] == [0, 0, 0], texts[-1].stderr
    assert texts[0].stdout == texts[1].stdout == texts[2].stdout and texts[0].stdout.strip()


def test_the_header_tells_what_each_tier_has(layers, tmp_path):
    """With everything offloaded, the host has as much as a GPU without."""
    options = layers.options(*BF16, "--micro-batch-size=1", steps=2)
    whole, run = (train(tmp_path / name, *options, *offload, variables=cached(tmp_path))
                  for name, offload in (("whole", []), ("host", offloaded("cpu", "cpu"))))
    offload, printed = run.record["offload"], " ".join(run.output.split())
    arenas = ("parameters", "gradients", "master", "moments")
    assert offload["disk"] == 0 and offload["host"] == sum(whole.record["memory"][arena] for arena in arenas)
    assert all(arena in printed.split("host memory")[1].split("offload")[0] for arena in arenas)
    assert "a step moves " in printed and whole.record["offload"]["to_device"] == 0 < offload["to_device"]
