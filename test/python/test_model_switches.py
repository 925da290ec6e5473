"""--bias=false and --tied-head=false, alone and together: the resulting model, the same run on every mesh, files of weights,
and checkpoints. The suites against PyTorch compare losses and gradients, and test_generate.py compares texts. The refused cases
are in wrong_files.py."""

import dataclasses
import functools
import math

import numpy as np
import pytest

import program
import safetensors_numpy
from old_checkpoint import copy_without
from program import digest
from reference_gpt2 import GPT2, SWITCHES_OFF
from refused import one_error
from test_zero import train

TIED = GPT2(layers=4, heads=2, channels=32, seq_len=16, vocab_size=256)
OFF = [dataclasses.replace(TIED, **switches) for switches in SWITCHES_OFF]
BOTH = OFF[-1]
QUIET = ["--sample-tokens=0", "--val-batches=1", "--warmup-steps=100"]
TOLERANCE = 2e-5  # relative difference of losses in fp32, as in test_pipeline.py


def name_of(sizes):
    return "+".join(option[2:-6] for option in sizes.options() if option.endswith("=false"))


of_each = pytest.mark.parametrize("sizes", OFF, ids=name_of)


# ---- the model


@of_each
def test_the_model_has_these_tensors_and_no_others(sizes, tmp_path):
    run, _, out = train(tmp_path, *sizes.options(), *QUIET, "--steps=1", ranks=1)
    shapes = sizes.shapes()
    exported = {name: tensor.shape for name, tensor in safetensors_numpy.load(tmp_path / "w.safetensors").items()}
    assert exported == shapes
    assert run.record["parameters"] == sum(math.prod(shape) for shape in shapes.values())
    said = " ".join(out.split())
    assert ("no biases" in said) == (not sizes.bias) and ("a head of its own" in said) == (not sizes.tied_head)


def test_the_saved_configuration_repeats_the_run(tmp_path):
    options = [*BOTH.options(), "--global-batch-tokens=384", "--steps=2"]
    first = program.train(tmp_path / "a", *options)
    config = (tmp_path / "a/config.toml").read_text().splitlines()
    assert "bias = false" in config and "tied-head = false" in config
    again = program.train(tmp_path / "b", f"--config={tmp_path}/a/config.toml")
    assert again.losses == first.losses
    # The command line turns one on again.
    other = program.train(tmp_path / "c", f"--config={tmp_path}/a/config.toml", "--tied-head")
    alone = program.train(tmp_path / "d", *options, "--tied-head=true")
    assert other.losses == alone.losses != first.losses
    assert other.record["configuration"]["bias"] is False and other.record["configuration"]["tied-head"] is True


# ---- on meshes

STAGES, TENSOR = "--pipeline-parallel=2", ["--tensor-parallel=2", "--sequence-parallel"]
# Options with the same bits on this number of processes. Each run is near that of one process.
MESHES = {
    "one process": (1, [[], ["--recompute=selective"], ["--recompute=block"]]),
    "data": (2, [[], ["--zero-stage=1", "--recompute=selective"], ["--zero-stage=3"], ["--zero-stage=3", "--recompute=block"]]),
    "stages": (2, [[STAGES], [STAGES, "--pipeline-schedule=zb-h1", "--recompute=selective"],
                   [STAGES, "--pipeline-schedule=interleaved", "--recompute=block"]]),
    "tensor": (2, [TENSOR, [*TENSOR, "--recompute=selective"], [*TENSOR, "--recompute=block"]]),
    "tensor, whole tokens": (2, [TENSOR[:1]]),
    "stages and shards": (4, [[STAGES, "--zero-stage=0"], [STAGES, "--zero-stage=3", "--pipeline-schedule=zb-h1"]]),
    "stages and tensor": (4, [[STAGES, *TENSOR], [STAGES, *TENSOR, "--pipeline-schedule=interleaved", "--recompute=selective"]]),
}
OF_MESHES = ["--steps=4", "--micro-batch-size=2", "--reduce-every=micro-batch", "--check-replicas-every=2", *QUIET]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A function that gives the run of one process and its final weights."""
    @functools.cache
    def run(sizes, dtype):
        folder = tmp_path_factory.mktemp("alone")
        return train(folder, *sizes.options(), *OF_MESHES, dtype, ranks=1)[0], safetensors_numpy.load(folder / "w.safetensors")
    return run


def runs_of_the_same_bits(mesh, sizes, dtype, folder):
    """Runs all of them; returns the first."""
    ranks, alike = MESHES[mesh]
    runs = [train(folder / str(i), *sizes.options(), *OF_MESHES, dtype, *options, ranks=ranks) for i, options in enumerate(alike)]
    for (_, results, _), options in zip(runs, alike):
        assert results == runs[0][1], options
    return runs[0][0]


# Each way to divide a model with one switch alone; all meshes with both switches.
ALONE_ON = ["data", "stages", "tensor"]


@pytest.mark.parametrize("mesh, sizes", [*((mesh, BOTH) for mesh in MESHES), *((mesh, sizes) for mesh in ALONE_ON for sizes in OFF[:2])],
                         ids=lambda value: name_of(value) if isinstance(value, GPT2) else value)
def test_every_mesh_trains_the_same_run(mesh, sizes, alone, tmp_path):
    run = runs_of_the_same_bits(mesh, sizes, "--dtype=fp32", tmp_path)
    whole, weights = alone(sizes, "--dtype=fp32")
    assert run.losses == pytest.approx(whole.losses, rel=TOLERANCE)
    assert run.column("grad_norm")[0] == pytest.approx(whole.column("grad_norm")[0], rel=TOLERANCE)
    assert run.lines[-1]["val_loss"] == pytest.approx(whole.lines[-1]["val_loss"], rel=TOLERANCE)
    others = safetensors_numpy.load(run.out_dir / "w.safetensors")
    assert weights.keys() == others.keys()
    for name, tensor in weights.items():
        other = others[name]
        if name.endswith("attn.c_attn.bias"):  # except the keys', whose gradient is zero apart from rounding
            C = sizes.channels
            tensor, other = (np.delete(each, slice(C, 2 * C)) for each in (tensor, other))
        assert np.abs(tensor - other).max() <= TOLERANCE, name


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_trains_the_same_run_in_bf16(mesh, alone, tmp_path):
    run = runs_of_the_same_bits(mesh, BOTH, "--dtype=bf16", tmp_path)
    if "tensor" not in mesh:
        # The first step's losses are the same sum of the same numbers in fp64.
        assert run.losses[0] == pytest.approx(alone(BOTH, "--dtype=bf16")[0].losses[0], rel=1e-8)


# ---- files of weights


@of_each
def test_export_and_init_are_inverse(sizes, tmp_path):
    first, second, theirs = (tmp_path / f"{name}.safetensors" for name in ("first", "second", "theirs"))
    options = [*sizes.options(), "--global-batch-tokens=384"]
    program.train(tmp_path / "a", *options, "--steps=2", f"--export={first}")
    program.train(tmp_path / "b", *options, "--steps=0", f"--init={first}", f"--export={second}")
    assert first.read_bytes() == second.read_bytes()
    # The names of Hugging Face's files: all but the head have the prefix.
    safetensors_numpy.save(theirs, {name if name == "lm_head.weight" else f"transformer.{name}": tensor
                                    for name, tensor in safetensors_numpy.load(first).items()})
    second.unlink()
    program.train(tmp_path / "c", *options, "--steps=0", f"--init={theirs}", f"--export={second}", "--zero-stage=3", ranks=2)
    assert first.read_bytes() == second.read_bytes()


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The weights of a short training with all switches on, and the losses that they give."""
    folder = tmp_path_factory.mktemp("tied")
    train(folder / "training", *TIED.options(), *QUIET, "--steps=3", ranks=1)
    file = folder / "training/w.safetensors"
    return file, looked_at(folder / "look", file, TIED)[1]


def looked_at(folder, file, sizes, *options, ranks=1):
    """The printed text, and the losses of a step with a learning rate of 0."""
    run, _, out = train(folder, *sizes.options(), *QUIET, "--steps=1", "--lr=0", "--micro-batch-size=2", f"--init={file}", *options,
                        ranks=ranks)
    return out, (run.losses, run.lines[-1]["val_loss"])


@pytest.mark.parametrize("ranks, mesh", [(1, []), (2, ["--zero-stage=3"]), (2, [STAGES])], ids=["1", "ZeRO-3", "stages"])
def test_a_head_that_a_file_lacks_begins_as_the_table(ranks, mesh, tied, tmp_path):
    file, losses = tied
    tensors = safetensors_numpy.load(file)
    theirs = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    safetensors_numpy.save(tmp_path / "theirs.safetensors", theirs)
    safetensors_numpy.save(tmp_path / "saved twice.safetensors", theirs | {"lm_head.weight": tensors["wte.weight"]})
    for path, is_copied in ((file, True), (tmp_path / "theirs.safetensors", True), (tmp_path / "saved twice.safetensors", False)):
        folder = tmp_path / path.stem
        out, own = looked_at(folder, path, OFF[1], *mesh, ranks=ranks)
        assert out.count(f"note: {path} has no lm_head.weight: the head starts as a copy of wte.weight\n") == is_copied
        assert own == (pytest.approx(losses[0], rel=1e-8), pytest.approx(losses[1], rel=1e-8))
        exported = safetensors_numpy.load(folder / "w.safetensors")
        for name, tensor in {**tensors, "lm_head.weight": tensors["wte.weight"]}.items():
            assert exported.pop(name).tobytes() == tensor.tobytes(), name
        assert not exported


def test_the_copied_head_learns_on_its_own(tied, tmp_path):
    train(tmp_path, *OFF[1].options(), *QUIET, "--steps=2", f"--init={tied[0]}", "--lr=1e-3", ranks=1)
    weights = safetensors_numpy.load(tmp_path / "w.safetensors")
    assert np.abs(weights["lm_head.weight"] - weights["wte.weight"]).max() > 1e-5


# ---- checkpoints

SAVING = ["--steps=4", "--checkpoint-every=2", "--global-batch-tokens=384", "--micro-batch-size=2", *QUIET]


@of_each
def test_a_resumed_run_goes_on_bit_identically(sizes, tmp_path):
    whole, _, _ = train(tmp_path / "whole", *sizes.options(), *SAVING, STAGES, ranks=2)
    options = [*sizes.options(), *SAVING, f"--resume={tmp_path}/whole/checkpoint-00000002"]
    on, _, _ = train(tmp_path / "on", *options, STAGES, ranks=2)
    assert on.losses == whole.losses[2:]
    assert digest(tmp_path / "on/w.safetensors") == digest(tmp_path / "whole/w.safetensors")
    other, _, _ = train(tmp_path / "other", *options, ranks=1)
    assert other.losses == pytest.approx(whole.losses[2:], rel=TOLERANCE)


@of_each
def test_a_checkpoint_is_refused_by_the_model_with_all_switches_on(sizes, tmp_path):
    program.train(tmp_path / "run", *sizes.options(), *SAVING)
    checkpoint = tmp_path / "run/checkpoint-00000004"
    first = next(option for option in sizes.options() if option.endswith("=false"))
    result = program.run(*TIED.options(), *SAVING, "--bias", "--tied-head", f"--resume={checkpoint}", check=False)
    assert result.returncode == 1
    assert one_error(result.stderr) == f"{checkpoint} has another model, with {first}; give {first}"
    # If nobody gives them, they are the checkpoint's.
    program.run(*TIED.options(), *SAVING, "--steps=5", f"--resume={checkpoint}")


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    """A run, and its checkpoint after two steps as a program without the switches wrote it."""
    folder = tmp_path_factory.mktemp("old")
    whole = program.train(folder / "run", *TIED.options(), *SAVING)
    return whole, copy_without(["bias", "tied-head"], folder / "run/checkpoint-00000002", folder / "old")


def test_a_checkpoint_that_knows_no_switches_is_of_the_model_with_all(old, tmp_path):
    whole, checkpoint = old
    on = program.train(tmp_path / "on", *TIED.options(), *SAVING, f"--resume={checkpoint}")
    assert on.losses == whole.losses[2:]
    # Its text does not change with settings in a configuration file.
    (tmp_path / "c.toml").write_text("bias = false\ntied-head = false\n")
    generate = ["--generate", f"--resume={checkpoint}", "--prompt=The", "--sample-tokens=20", "--temperature=0"]
    assert program.run(*generate, f"--config={tmp_path}/c.toml").stdout == program.run(*generate).stdout


@pytest.mark.parametrize("switch", ["bias", "tied-head"])
def test_a_checkpoint_that_knows_no_switches_is_refused_by_a_model_without(switch, old, tmp_path):
    _, checkpoint = old
    for options in ([*TIED.options(), *SAVING], ["--generate"]):
        result = program.run(*options, f"--{switch}=false", f"--resume={checkpoint}", *([f"--out-dir={tmp_path}/x"] * (len(options) > 1)),
                             check=False)
        assert result.returncode == 1 and not list(tmp_path.iterdir())
        assert one_error(result.stderr) == f"{checkpoint} has another model, with --{switch}=true; leave out --{switch}=false"
