"""Low-rank adapters on simulated GPUs: the plan is the run, and the run is the CPU's."""

import shlex

import numpy
import pytest

import adapter_folders
import model_folders
import planned
import program
import safetensors_numpy
import simulated
from test_adapters import CONFIG

simulated.require()
LAYERS = {**CONFIG, "num_hidden_layers": 8}
RUN = ["--seq-len=16", "--global-batch-tokens=128", "--micro-batch-size=2", "--val-every=0", "--lora-rank=8", "--steps=3", "--lr=3e-3"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    model_folders.write(folder / "base", CONFIG)
    model_folders.write(folder / "many", LAYERS)
    program.write_token_file(folder / "train_0.bin", numpy.random.default_rng(7).integers(0, 150, 4097))
    return folder


def random_options(draw, base):
    """Those of planned.random_options for a base in a folder."""
    while True:
        options, ranks = planned.random_options(draw, most_ranks=4, tiers=["cpu"])
        rank = draw.choice([1, 4, 8])
        options = [option for option in options if not option.startswith(
            ("--model=", "--layers=", "--heads=", "--kv-heads=", "--channels=", "--mlp-size=", "--seq-len="))]
        options += [f"--init={base}", "--seq-len=16", f"--lora-rank={rank}", f"--lora-layers={draw.choice(['all', 'q,v', 'k,up,down'])}"]
        if "--tensor-parallel=4" not in options:
            options += draw.choice([[], ["--base-dtype=nf4"]])
        return options, ranks


def test_plans_equal_runs(place, tmp_path, configurations=2):
    draw = planned.seeded()
    for number in range(configurations):
        options, ranks = random_options(draw, place / "many")
        print(shlex.join(options), "on", ranks)
        run = simulated.train(tmp_path / str(number), *options, f"--train-data={place / 'train_0.bin'}", "--device=cuda", "--steps=2", "--val-every=0",
                              ranks=ranks)
        planned.assert_equals_run(planned.plan(*options, "--gpu=A100", f"--gpus={ranks}")[0], run)


@pytest.mark.parametrize("ranks, how, format", [
    (1, [], ["--dtype=fp32"]), (1, ["--recompute=selective"], ["--dtype=fp32", "--base-dtype=nf4"]),
    (4, ["--tensor-parallel=2", "--zero-stage=3"], ["--dtype=fp32", "--base-dtype=nf4"]),
    (2, ["--zero-stage=3", "--offload-parameters=cpu", "--offload-optimizer=cpu"], ["--dtype=fp32", "--base-dtype=nf4"]),
    (1, [], ["--dtype=bf16", "--base-dtype=nf4"])], ids=str)
def test_follows_the_cpu(ranks, how, format, place, tmp_path):
    common = [f"--init={place / 'base'}", f"--train-data={place / 'train_0.bin'}", *RUN, *format]
    cpu = program.train(tmp_path / "cpu", *common, f"--export={tmp_path / 'a'}")
    gpu = simulated.train(tmp_path / "gpu", *common, *how, "--device=cuda", f"--export={tmp_path / 'b'}", ranks=ranks)
    # In fp32, products have sums of other orders; in bf16, a last place of the activations, 2^-8, moves a loss of 5 by less than 2^-8 of it.
    assert gpu.losses == pytest.approx(cpu.losses, abs=5 * 2.0**-8 if "--dtype=bf16" in format else 1e-5)
    # The update of the last step is not in the losses. AdamW's is about --lr an element at most, in either direction.
    for (name, a), b in zip(adapter_folders.read(tmp_path / "a")[0].items(), adapter_folders.read(tmp_path / "b")[0].values()):
        assert abs(a - b).max() <= 2 * 3 * 3e-3, name


def test_equal_weights_give_one_export(place, tmp_path):
    """At stage 3 with two tensor-parallel ranks, the merged base in 4 bits is one process's."""
    common = [f"--init={place / 'base'}", f"--train-data={place / 'train_0.bin'}", *RUN, "--dtype=fp32", "--base-dtype=nf4", "--lr=0", "--merge"]
    program.train(tmp_path / "cpu", *common, f"--export={tmp_path / 'a'}")
    simulated.train(tmp_path / "gpu", *common, "--device=cuda", "--tensor-parallel=2", "--zero-stage=3", f"--export={tmp_path / 'b'}", ranks=4)
    a, b = (safetensors_numpy.load(tmp_path / folder / "model.safetensors") for folder in "ab")
    assert a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
