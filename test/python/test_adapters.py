"""Low-rank adapters (LoRA, QLoRA) against PyTorch and PEFT; their files; the meshes on which they train; what is refused."""

import json
import math
import os
import re
import shlex
import shutil
import subprocess

import numpy
import pytest
import torch

import adapter_folders
import boxes
import model_comparison
import model_folders
import planned
import program
import reference_llama
import reference_model
import reference_ops
import safetensors_numpy

SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))
PEFT = program.ROOT / "test/reference/saved_by_peft"
KINDS = ["llama", "mistral", "qwen2", "qwen3", "olmo2"]
TRAIN = ["--seq-len=16", "--global-batch-tokens=128", "--sample-tokens=0", "--val-every=0", "--dtype=fp32", "--lr=3e-3"]
# Heads and channels of which two tensor-parallel ranks have whole blocks of 4 bits.
CONFIG = {**model_folders.LLAMA, "hidden_size": 128, "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 4}
SMALL = {**model_folders.LLAMA, "num_hidden_layers": 1}
# Sums over ranks have another order. An element whose gradient is nothing but rounding moves by AdamW's rate in either direction,
# which changes the next loss by 2 * 3e-3 times its gradient there. That is about 1 / sqrt(32768): the adapters of rank 4 have so
# many numbers, and their gradient's norm is clipped to 1. The worst of all meshes had one such element, 3.3e-5; six may be.
OF_OTHER_SUMS = 6 * 2 * 3e-3 / math.sqrt(32768)


def probe_path():
    return f"{program.BUILD}/test/probe/model_probe"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base, and token shards for its vocabulary of 150."""
    folder = tmp_path_factory.mktemp("adapters")
    model_folders.write(folder / "base", CONFIG)
    program.write_token_file(folder / "train_0.bin", numpy.random.default_rng(7).integers(0, 150, 1025))
    return folder


def options(place, *more, base="base"):
    return [f"--init={place / base}", f"--train-data={place / 'train_0.bin'}", *TRAIN, *more]


def train(place, name, *more, ranks=1, **arguments):
    return program.train(place / name, *options(place, *more, **arguments), ranks=ranks)


# ---- against PyTorch in fp64

@pytest.mark.parametrize("layers", ["all", "q,v", "k,o,up", "gate,down"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_all_adapters(kind, layers, tmp_path):
    """To 1e-5 of each one's norm, as the whole model's gradients; those of the base are not there."""
    sizes = reference_llama.MODELS[kind]
    generator = torch.Generator().manual_seed(SEED)
    weights = reference_model.random_weights(sizes, generator)
    tokens = reference_model.random_tokens(sizes, 3, generator)
    model_comparison.save_weights(tmp_path / "init.safetensors", weights)
    adapters = adapter_folders.random_adapters(sizes.shapes(), 5, layers, SEED)
    adapter_folders.write(tmp_path / "adapter", adapters, alpha=12)

    class Sizes:
        @staticmethod
        def options():
            return [*sizes.options(), f"--init={tmp_path / 'init.safetensors'}", f"--lora={tmp_path / 'adapter'}"]

    loss, norm_squared, gradients = model_comparison.run_probe(probe_path(), tmp_path, weights, Sizes, "fp32", tokens, 1)
    adapted = adapter_folders.Adapted(sizes, weights, 12 / 5)
    expected_loss, expected = reference_model.loss_and_gradients(adapter_folders.as_tensors(adapters), adapted, tokens)
    assert abs(loss - expected_loss) <= 1e-5, f"SEED={SEED}"
    assert gradients.keys() == expected.keys()
    shares = {name: ((gradients[name] - gradient).norm() / gradient.norm()).item() for name, gradient in expected.items()}
    worst = max(shares, key=shares.get)
    assert shares[worst] <= 1e-5, f"SEED={SEED}: {worst} is {shares[worst]:.1e} of its norm off"
    assert math.isclose(norm_squared, sum(g.square().sum().item() for g in gradients.values()), rel_tol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_of_20_steps(kind, tmp_path):
    """AdamW without decay, as PyTorch's: only A and B change."""
    sizes = reference_llama.MODELS[kind]
    experiment = model_comparison.Experiment(tmp_path, sizes, 3, SEED)
    adapters = adapter_folders.random_adapters(sizes.shapes(), 4, seed=SEED)
    folder = adapter_folders.write(tmp_path / "adapter", adapters, alpha=4, use_rslora=True)
    run = program.train(tmp_path / "run", *experiment.options(20, f"--lora={folder}", "--lr=1e-3", "--lr-schedule=constant", "--dtype=fp32",
                                                              "--grad-clip=0", "--val-every=0"))
    adapted = adapter_folders.Adapted(sizes, experiment.weights, 4 / math.sqrt(4))
    leaves = {name: tensor.requires_grad_() for name, tensor in adapter_folders.as_tensors(adapters).items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = reference_model.loss(leaves, adapted, experiment.tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] - losses[-1] > 0.05
    assert run.losses == pytest.approx(losses, abs=1e-5), f"SEED={SEED}"


def test_an_adapter_of_peft_has_its_losses(tmp_path):
    """make_peft_references.py made the adapter and recorded the losses of its training from there."""
    recorded = json.loads((PEFT / "losses.json").read_text())
    model_folders.write(tmp_path / "base", SMALL)
    program.write_token_file(tmp_path / "train_0.bin", recorded["tokens"])
    (tmp_path / "adapter").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(PEFT / file, tmp_path / "adapter")
    words = [f"--init={tmp_path / 'base'}", f"--lora={tmp_path / 'adapter'}", f"--train-data={tmp_path / 'train_0.bin'}", *recorded["options"]]
    text = program.run(*words, f"--out-dir={tmp_path / 'run'}").stdout
    assert program.Run(tmp_path / "run").losses == pytest.approx(recorded["losses"], abs=1e-5)
    assert "lora_dropout 0.1 is not used" in text and "does not say which weights its base had" in " ".join(text.split())


# ---- files

def loss_in(text):
    return re.search(r"validation after step 0: loss (\S+)", text)[1]


def test_initial_adapters(place):
    """A is uniform in +-1/sqrt(inputs), by seed, name and element; B is zero; so the model is the base."""
    validation, made = f"--val-data={place / 'train_0.bin'}", {}
    losses = {"base": loss_in(program.run(*options(place, "--steps=0", validation, f"--out-dir={place / 'plain'}")).stdout)}
    for name, more in {"one": [], "two": ["--tensor-parallel=2"], "other": ["--seed=2"]}.items():
        ranks = 2 if name == "two" else 1
        out = program.run(*options(place, "--lora-rank=16", "--steps=0", validation, f"--export={place / name}", *more,
                                   f"--out-dir={place / f'run-{name}'}"), ranks=ranks).stdout
        losses[name] = loss_in(out)
        made[name], config = adapter_folders.read(place / name)
    assert losses["base"] == losses["one"] == losses["other"]
    assert config["r"] == 16 and config["lora_alpha"] == 32 and config["base_model_name_or_path"] == str(place / "base")
    assert len(made["one"]) == 2 * 7 * CONFIG["num_hidden_layers"]
    for name, array in made["one"].items():
        assert (array == made["two"][name]).all(), name
        if "lora_B" in name:
            assert not array.any()
            continue
        bound = 1 / math.sqrt(array.shape[1])
        assert abs(array).max() <= bound and array.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert (array != made["other"][name]).mean() > 0.99
    different = {array.tobytes() for name, array in made["one"].items() if "lora_A" in name}
    assert len(different) == 7 * CONFIG["num_hidden_layers"]


def test_a_checkpoint_has_the_adapters_alone(place):
    run = train(place, "run", "--lora-rank=2", "--lora-layers=q,down", "--steps=2", f"--export={place / 'small'}")
    checkpoint = run.out_dir / "checkpoint-00000002"
    saved, (exported, _) = boxes.weights(checkpoint), adapter_folders.read(place / "small")
    assert saved.keys() == exported.keys() and all((saved[name] == exported[name]).all() for name in saved)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in saved} == {"q_proj", "down_proj"}
    assert boxes.state(checkpoint).keys() == {f"optim.state.{name}.{state}" for name in saved for state in ("exp_avg", "exp_avg_sq")}
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert list(manifest).index("base") == list(manifest).index("files") - 1
    base = manifest["base"]
    assert base["weights"] == str(place / "base") and len(base["checksum"]) == 16
    likeliest = ["--prompt=1 2 3", "--sample-tokens=4", "--temperature=0"]
    text = program.run("--generate", f"--resume={run.out_dir}", *likeliest).stdout
    assert text == program.run("--generate", f"--lora={place / 'small'}", "--seq-len=16", *likeliest).stdout


@pytest.mark.parametrize("how", ["fp32", "bf16", "nf4", "original", "tensor-parallel"])
def test_merged_weights(place, how):
    """W + s B A in fp32, rounded once. W is what the folder has, in bf16 as well; of NF4 it is what it was trained beside, or that."""
    config, weights = CONFIG, safetensors_numpy.load(place / "base/model.safetensors")
    nf4 = ["--base-dtype=nf4"] if how in ("nf4", "original") else []
    more = ["--tensor-parallel=2", "--zero-stage=3"] if how == "tensor-parallel" else []
    ranks = 4 if more else 1
    more = ["--dtype=bf16"] if how == "bf16" else more
    name = f"merged-{how}"
    result = program.run(*options(place, "--lora-rank=4", "--steps=3", *nf4, *more, f"--out-dir={place / name}"), ranks=ranks)
    merge = ["--merge", "original"] if how == "original" else ["--merge"]
    for export, how_to in (("adapter", []), ("whole", merge)):
        result = program.run(f"--resume={place / name}", "--steps=0", "--sample-tokens=0", f"--export={place / name / export}", *how_to, *more,
                             ranks=ranks)
    assert ("merged into the weights" in result.stdout) == bool(nf4)
    adapters, _ = adapter_folders.read(place / name / "adapter")
    if how == "nf4":
        weights = {key: dequantised(array) if "_proj" in key else array for key, array in weights.items()}
    file = (place / name / "whole/model.safetensors").read_bytes()
    metadata = json.loads(file[8:8 + int.from_bytes(file[:8], "little")])["__metadata__"]
    assert metadata["merged_into"] == ("weights in nf4" if how == "nf4" else "original weights")
    if how == "nf4":  # an adapter knows in which form its base was
        again = [f"--lora={place / name / 'adapter'}", "--steps=0", "--sample-tokens=0"]
        assert "beside a base in nf4; give --base-dtype nf4 for the same" in program.run(*again).stdout
        export = ["--merge", f"--export={place / name / 'again'}"]
        program.run(*again, f"--export={place / name / 'copy'}")  # which untrained stays what it was
        for other in (again, [f"--lora={place / name / 'copy'}", *again[1:]]):
            assert "--merge: " in (said := refused(*other, *export)) and "give --base-dtype nf4, or --merge original" in said
        assert "beside a base" not in program.run(*again, *export, "--base-dtype=nf4").stdout
        assert (place / name / "again/model.safetensors").read_bytes() == (place / name / "whole/model.safetensors").read_bytes()
    got = safetensors_numpy.load(place / name / "whole/model.safetensors")
    assert json.loads((place / name / "whole/config.json").read_text()) == config
    exact = adapter_folders.merged({key: array.astype(numpy.float64) for key, array in weights.items()},
                                   {key: array.astype(numpy.float64) for key, array in adapters.items()}, 32 / 4)
    for key, array in exact.items():
        # Each of the 4 products, their sums, the scale and the sum with W are rounded in fp32: 2^-24 of each one's magnitude.
        allowed = 2.0**-24 * (abs(array) + 12 * abs(array - weights[key]).max())
        assert (abs(got[key] - array) <= allowed).all(), key
    assert all((got[key] == array).all() for key, array in weights.items() if "_proj" not in key)


# ---- 4 bits

def quantised(weights):
    """(the indices of the levels, the greatest magnitudes) of blocks of 64 numbers, in fp32."""
    blocks = weights.reshape(-1, 64).astype(numpy.float32)
    most = abs(blocks).max(1)
    inverse = numpy.divide(numpy.float32(1), most, out=numpy.zeros_like(most), where=most > 0)
    levels = reference_ops.NF4_LEVELS.astype(numpy.float32)
    midpoints = (levels[1:] + levels[:-1]) * numpy.float32(0.5)
    return ((blocks * inverse[:, None])[:, :, None] > midpoints).sum(-1), most


def dequantised(weights):
    indices, most = quantised(weights)
    return (reference_ops.NF4_LEVELS.astype(numpy.float32)[indices] * most[:, None]).reshape(weights.shape)


def test_a_base_in_4_bits_computes_with_its_levels(place, tmp_path):
    """The losses are those of a base that has the levels, and training leaves them."""
    weights = model_folders.weights_of(CONFIG)
    weights["model.layers.0.self_attn.q_proj.weight"][0, :64] = 0
    model_folders.write(tmp_path / "base", CONFIG, weights)
    model_folders.write(tmp_path / "levels", CONFIG, {name: dequantised(array) if "_proj" in name else array for name, array in weights.items()})
    shutil.copy(place / "train_0.bin", tmp_path)
    in_4_bits = train(tmp_path, "a", "--lora-rank=4", "--steps=6", "--base-dtype=nf4")
    plain = train(tmp_path, "b", "--lora-rank=4", "--steps=6", base="levels")
    assert in_4_bits.losses == plain.losses
    before, after = ({name: bytes_in_4_bits for name, bytes_in_4_bits in
                      safetensors_numpy.load(place_of / "model.safetensors").items()}
                     for place_of in (tmp_path / "levels", merged_without_adapters(tmp_path)))
    assert all((before[name] == after[name]).all() for name in before)
    saved = in_4_bits.record["memory"]["parameters"] / plain.record["memory"]["parameters"]
    assert saved < 0.35  # tables and adapters have 4 bytes a number, matrices 0.5625


def merged_without_adapters(place):
    """The base in 4 bits, from a run whose adapters stay at zero."""
    program.run(*options(place, "--lora-rank=4", "--steps=2", "--base-dtype=nf4", "--lr=0", f"--export={place / 'zero'}", "--merge",
                         f"--out-dir={place / 'c'}"))
    return place / "zero"


# ---- meshes

# (ranks, options). The first group has one process's bits, if its sums are of the same micro-batches.
SAME_BITS = [(1, ["--recompute=selective"]), (1, ["--recompute=block"]), (1, ["--offload-optimizer=cpu", "--offload-parameters=cpu"]),
             (1, ["--offload-optimizer=nvme", "--offload-parameters=nvme", "--nvme-dir={}"]),
             *((2, ["--pipeline-parallel=2", f"--pipeline-schedule={schedule}"])
               for schedule in ("naive", "gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1")),
             (2, ["--pipeline-parallel=2", "--pipeline-schedule=zb-h1", "--recompute=selective"])]
OF_TWO = [(2, ["--zero-stage=1"]), (2, ["--zero-stage=2"]), (2, ["--zero-stage=3"]), (2, ["--zero-stage=3", "--reshard-after-forward=false"]),
          (2, ["--zero-stage=3", "--offload-parameters=nvme", "--nvme-dir={}"]), (2, ["--zero-stage=1", "--offload-optimizer=nvme", "--nvme-dir={}"]),
          (4, ["--zero-stage=3", "--pipeline-parallel=2"])]
OTHERS = [(2, []), (4, ["--zero-stage=3", "--zero-shard-size=2"]), (2, ["--tensor-parallel=2"]),
          (2, ["--tensor-parallel=2", "--sequence-parallel"]), (4, ["--tensor-parallel=2", "--sequence-parallel", "--zero-stage=3"]),
          (4, ["--tensor-parallel=2", "--pipeline-parallel=2", "--pipeline-schedule=zb-h1", "--sequence-parallel"])]
FORMATS = {"fp32": [], "nf4": ["--base-dtype=nf4"], "bf16": ["--dtype=bf16"], "fp8": ["--dtype=bf16", "--fp8=current"]}


def losses_on(place, name, ranks, more, how):
    more = [option.format(place) for option in more]
    return train(place, name, "--lora-rank=4", "--steps=5", "--micro-batch-size=2", "--check-replicas-every=2", *how, *more, ranks=ranks).losses


@pytest.mark.parametrize("format", FORMATS)
def test_every_mesh_trains_the_same_run(format, place):
    how = FORMATS[format]
    one = losses_on(place, f"{format}-one", 1, [], how)
    for number, (ranks, more) in enumerate(SAME_BITS if format != "fp8" else SAME_BITS[:2]):
        assert losses_on(place, f"{format}-{number}", ranks, more, how) == one, more
    if format == "fp8":
        return
    once = [*how, "--reduce-every=step"]
    two = losses_on(place, f"{format}-two", *OTHERS[0], once)
    for number, (ranks, more) in enumerate(OF_TWO):
        assert losses_on(place, f"{format}-two-{number}", ranks, more, once) == two, more
    # In bf16 a unit of the last place of the activations, 2^-8 of them, moves a loss of 5 by less than its own 2^-8.
    allowed = 5 * 2.0**-8 if format == "bf16" else OF_OTHER_SUMS
    for number, (ranks, more) in enumerate(OTHERS):
        assert losses_on(place, f"{format}-others-{number}", ranks, more, how) == pytest.approx(one, abs=allowed), more


@pytest.mark.parametrize("how", [[], ["--base-dtype=nf4"]], ids=["fp32", "nf4"])
def test_more_tensor_parallel_ranks_than_heads_of_keys(how, tmp_path):
    """Two ranks share a head of keys: they have its B whole, and make numbers of their own rows of its matrix."""
    model_folders.write(tmp_path / "base", {**CONFIG, "hidden_size": 256, "head_dim": 64, "intermediate_size": 512})
    program.write_token_file(tmp_path / "train_0.bin", numpy.random.default_rng(7).integers(0, 150, 1025))
    one = losses_on(tmp_path, "one", 1, [], how)
    assert losses_on(tmp_path, "four", 4, ["--tensor-parallel=4"], how) == pytest.approx(one, abs=OF_OTHER_SUMS)


def test_bytes_are_those_of_the_adapters(place):
    """Gradients of adapters alone cross the data ranks, and their weights after an update; frozen weights are gathered at stage 3."""
    def sent(*more, lora=("--lora-rank=4",)):
        return train(place, "bytes", *lora, "--steps=1", "--micro-batch-size=4", "--overwrite", *more, ranks=2).record["bytes_sent"]
    L, R, C, F, H, K = 4, 4, 128, 256, 4 * 32, 2 * 32
    adapters = 4 * R * ((C + H) + 2 * (C + K) + (H + C) + 2 * (C + F) + (F + C))  # bytes of a layer's
    padded = -(-adapters // (2 * 4096)) * 2 * 4096  # whole norm blocks of 1024 numbers on two ranks
    half = padded // 2
    assert sent()["inside"] == 2 * L * half
    assert sent("--zero-stage=1")["inside"] == 2 * L * half
    in_4_bits = [sent("--zero-stage=3", *how)["inside"] for how in ([], ["--base-dtype=nf4"])]
    assert in_4_bits[1] < 0.5 * in_4_bits[0]
    # Tensor-parallel ranks exchange what they do without adapters, and sum the gradients of those that each has whole: A of
    # q, k, v, gate and up, B of o and down.
    adapted, plain = (sent("--tensor-parallel=2", lora=lora)["tensor"] for lora in (["--lora-rank=4"], []))
    assert adapted - plain == L * 7 * R * C * 4


@pytest.mark.parametrize("before, after", [((1, []), (2, ["--zero-stage=3"])), ((4, ["--tensor-parallel=2", "--zero-stage=2"]), (1, [])),
                                           ((2, ["--pipeline-parallel=2"]), (2, ["--tensor-parallel=2"]))], ids=str)
@pytest.mark.parametrize("how", [[], ["--base-dtype=nf4"]], ids=["fp32", "nf4"])
def test_resume_on_another_mesh(before, after, how, place, tmp_path):
    shutil.copytree(place / "base", tmp_path / "base")
    shutil.copy(place / "train_0.bin", tmp_path)
    common = ["--lora-rank=4", "--micro-batch-size=2", "--steps=6", "--lr-schedule=constant", *how]
    whole = train(tmp_path, "whole", *common)
    program.run(*options(tmp_path, *common[:2], "--steps=3", *common[3:], *before[1], f"--out-dir={tmp_path / 'parts'}"), ranks=before[0])
    (tmp_path / "base").rename(tmp_path / "moved")
    gone = program.run(f"--resume={tmp_path / 'parts'}", "--steps=6", "--sample-tokens=0", *after[1], ranks=after[0], check=False)
    assert gone.returncode == 1 and "is gone; give its new place with --init" in gone.stderr
    program.run(f"--resume={tmp_path / 'parts'}", "--steps=6", "--sample-tokens=0", f"--init={tmp_path / 'moved'}", *after[1], ranks=after[0])
    assert program.Run(tmp_path / "parts").losses == pytest.approx(whole.losses, abs=OF_OTHER_SUMS)
    model_folders.write(tmp_path / "other", CONFIG, model_folders.weights_of(CONFIG, seed=2))
    other = program.run(f"--resume={tmp_path / 'parts'}", "--steps=8", "--sample-tokens=0", f"--init={tmp_path / 'other'}", check=False)
    assert other.returncode == 1 and "was trained beside other weights than those of" in other.stderr


def test_the_base_is_known_by_its_weights(place, tmp_path):
    """Not by its files: shards of the same weights are the same base."""
    train(place, "named", "--lora-rank=2", "--steps=1", f"--export={place / 'named-adapter'}", "--lora-layers=v")
    weights = model_folders.weights_of(CONFIG)
    model_folders.write(tmp_path / "base", CONFIG, weights, shards=4)
    shutil.copy(place / "train_0.bin", tmp_path)
    train(tmp_path, "run", f"--lora={place / 'named-adapter'}", "--steps=1")
    weights["model.norm.weight"][3] += 1e-3
    model_folders.write(tmp_path / "changed", CONFIG, weights)
    assert "was trained beside other weights" in refused(*options(tmp_path, f"--lora={place / 'named-adapter'}", "--steps=1", base="changed"))
    here = program.run("--generate", f"--resume={tmp_path / 'run'}", "--sample-tokens=8").stdout
    (tmp_path / "base").rename(tmp_path / "moved")
    words = ["--generate", f"--resume={tmp_path / 'run'}", "--sample-tokens=8"]
    assert "which is gone; give its new place with --init" in refused(*words)
    assert program.run(*words, f"--init={tmp_path / 'moved'}").stdout == here


def test_a_step_has_no_work_for_frozen_units(place):
    text = program.run(*options(place, "--lora-rank=4", "--print-step", "--verbose")).stdout
    assert {unit.split(".")[-1] for unit in re.findall(r" (?:zero|update|reduce_scatter) +(\S+)", text)} == {"lora"}
    assert re.search(r" backward +block", text) and not re.search(r" backward +embedding", text)
    assert not re.search(r"(?:gradients|optimizer) (?!\S+\.lora)", text)
    on_disk = program.run(*options(place, "--lora-rank=4", "--print-step", "--verbose", "--offload-parameters=nvme", f"--nvme-dir={place}")).stdout
    assert {unit.split(".")[-1] for unit in re.findall(r" write_parameters +(\S+)", on_disk)} == {"lora"}
    assert re.search(r" read_parameters +layers\.0 ", on_disk)
    run = program.train(place / "counts", *(option for option in options(place, "--lora-rank=16", "--steps=1") if "--lr=" not in option))
    assert run.record["configuration"]["lr"] == 3e-4 and run.record["configuration"]["weight-decay"] == 0
    assert run.record["trained_parameters"] == 4 * 16 * ((128 + 128) + 2 * (128 + 64) + (128 + 128) + 3 * (128 + 256))


def test_plans_equal_runs(place, tmp_path):
    """Every arena, and every byte that is sent."""
    for ranks, more in [(1, ["--lora-layers=q,v"]), (1, ["--base-dtype=nf4", "--recompute=block"]), (2, ["--zero-stage=3", "--base-dtype=nf4"]),
                        (4, ["--tensor-parallel=2", "--zero-stage=2", "--dtype=bf16", "--moments-dtype=8bit"]),
                        (2, ["--pipeline-parallel=2", "--base-dtype=nf4", "--dtype=bf16", "--checkpoint-every=1"])]:
        how = [f"--init={place / 'base'}", *TRAIN[:2], "--lora-rank=4", *more]
        run = program.train(tmp_path / str(len(more)) / str(ranks), *how, f"--train-data={place / 'train_0.bin'}", "--steps=2", "--val-every=0", ranks=ranks)
        planned.assert_equals_run(planned.plan(*how, f"--processes={ranks}")[0], run)


# ---- what is refused

def refused(*words, ranks=1):
    result = program.run(*words, check=False, ranks=ranks)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 1 and len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.parametrize("key, value", [("use_dora", True), ("bias", "all"), ("lora_bias", True), ("modules_to_save", ["lm_head"]),
                                        ("rank_pattern", {"q_proj": 3}), ("alpha_pattern", {"q_proj": 3}), ("init_lora_weights", "pissa"),
                                        ("fan_in_fan_out", True), ("peft_type", "LOHA"), ("r", 0), ("r", 70000), ("lora_alpha", "x"), ("lora_alpha", -4), ("lora_alpha", 0),
                                        ("layers_to_transform", [0]), ("layers_to_transform", 1), ("new_key", [[1] * 1000])])
def test_an_adapter_that_computes_something_else(key, value, place, tmp_path):
    adapters = adapter_folders.random_adapters(model_folders.shapes_of(CONFIG), 2)
    adapter_folders.write(tmp_path / "adapter", adapters, **{key: value})
    said = refused(*options(place, f"--lora={tmp_path / 'adapter'}"))
    assert f"adapter_config.json: {key} is " in said and len(said) < 400


def test_adapters_of_other_shapes_and_names(place, tmp_path):
    shapes = model_folders.shapes_of(CONFIG)
    def of(adapters, **config):
        shutil.rmtree(tmp_path / "adapter", ignore_errors=True)
        adapter_folders.write(tmp_path / "adapter", adapters, **config)
        return refused(*options(place, f"--lora={tmp_path / 'adapter'}"))
    whole = adapter_folders.random_adapters(shapes, 2)
    assert "has the shape (3, 128), but this model needs (2, 128)" in of(
        {**whole, "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": numpy.zeros((3, 128), numpy.float32)}, r=2)
    fewer = {name: array for name, array in whole.items() if "layers.1.mlp.up_proj" not in name}
    assert "layers whose adapters differ are not computed" in of(fewer)
    assert "is no adapter of a matrix of a layer" in of({**whole, "base_model.model.model.embed_tokens.lora_embedding_A": numpy.zeros((2, 2), numpy.float32)})
    other = adapter_folders.random_adapters(model_folders.shapes_of({**CONFIG, "num_hidden_layers": 5}), 2)
    assert "is not a tensor of this model's adapters" in of(other)


@pytest.mark.parametrize("words, said", [
    (["--lora-rank=0"], "--lora-rank 0 is out of range; give 1 to"), (["--lora-rank=2", "--optimizer=muon"], "--optimizer muon updates whole matrices"),
    (["--lora-rank=2", "--lora-layers=q,x"], "--lora-layers: \"x\" is no matrix of a layer; give some of q,k,v,o,gate,up,down, or all"),
    (["--lora-rank=2", "--lora-layers="], "--lora-layers: the value is empty"), (["--lora-rank=2", "--lora-layers=q,"], "--lora-layers: \"\" is no matrix"),
    (["--lora-alpha=3"], "--lora-alpha needs --lora-rank"),
    (["--lora-rank=2", "--merge"], "--merge needs --export"), (["--merge", "--export={}/x"], "--merge is for adapters"),
    (["--lora-rank=2", "--export={}/x.safetensors"], "an adapter is a folder"), (["--base-dtype=nf4"], "--base-dtype needs --lora-rank or --lora"),
    (["--lora-rank=2", "--base-dtype=nf4", "--dtype=bf16", "--fp8=current"], "--base-dtype nf4 and --fp8 current"),
    (["--lora={}"], "is no adapter: it has no adapter_model.safetensors"), (["--lora-rank=2", "--base-dtype=int8"], "--base-dtype: unknown value 'int8'"),
    (["--lora-rank=2", "--lora-alpha=nan"], "--lora-alpha nan is out of range"),
    (["--lora-rank=2", "--lora-alpha=0"], "--lora-alpha 0 is out of range; give 1e-06 to")])
def test_options_that_do_not_fit(words, said, place, tmp_path):
    assert said in refused(*options(place, *(word.format(tmp_path) for word in words), f"--out-dir={tmp_path / 'out'}"))
    assert not list(tmp_path.iterdir())


def test_models_that_have_no_adapters(place, tmp_path):
    for kind in ("gpt2", "nanochat"):
        model_folders.write(tmp_path / kind, model_folders.CONFIGS[kind])
        assert "adapters are for the families llama, mistral, qwen2, qwen3 and olmo2" in refused(*options(tmp_path, "--lora-rank=2", base=kind))
    assert "--lora-rank adapts a model that is there; give its folder with --init" in refused("--model=llama-tiny", "--lora-rank=2", "--steps=1")
    adapter_folders.write(tmp_path / "adapter", adapter_folders.random_adapters(model_folders.shapes_of(CONFIG), 2))
    assert "--lora has its own --lora-rank; leave one of them out" in refused(*options(place, f"--lora={tmp_path / 'adapter'}", "--lora-rank=2"))
    assert "names nothing as its base, which is not here" in refused(f"--lora={tmp_path / 'adapter'}", "--generate")
    model_folders.write(tmp_path / "quantised", {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes"}})
    assert "quantization_config" in refused(*options(tmp_path, "--lora-rank=2", base="quantised"))
    assert "would cut blocks of 64 numbers" in refused(*options(place, "--lora-rank=2", "--base-dtype=nf4", "--tensor-parallel=4"), ranks=4)


def test_a_run_that_began_with_an_adapter_goes_on_by_its_configuration(place):
    train(place, "first", "--lora-rank=2", "--lora-layers=v", "--steps=1", f"--export={place / 'began'}")
    train(place, "second", f"--lora={place / 'began'}", "--steps=2", "--checkpoint-every=1")
    (place / "began").rename(place / "elsewhere")  # it is not needed any more
    for steps in (3, 4):
        text = program.run(f"--config={place / 'second/config.toml'}", "--resume", f"--steps={steps}", f"--out-dir={place / 'second'}").stdout
        assert "is ignored" not in text and "resuming from" in text
    (place / "elsewhere").rename(place / "began")
    again = program.run(f"--config={place / 'second/config.toml'}", "--steps=1", f"--out-dir={place / 'again'}").stdout
    assert "rank 2, scale 16, of v" in again
    assert program.Run(place / "again").losses == program.Run(place / "second").losses[:1]


def test_runs_with_and_without_adapters_are_told_apart(place):
    plain = train(place, "no-adapters", "--steps=1")
    assert "has no adapters; leave --lora-rank out" in refused(f"--resume={plain.out_dir}", "--lora-rank=2", "--steps=2")
    adapted = train(place, "with-adapters", "--lora-rank=2", "--steps=1")
    assert "has adapters with --lora-rank 2, and this run's is 3; leave it out" in refused(f"--resume={adapted.out_dir}", "--lora-rank=3", "--steps=2")
    assert "with --lora-layers \"all\", and this run's is \"q,v\"" in refused(f"--resume={adapted.out_dir}", "--lora-layers=v,q", "--steps=2")
    program.run(f"--resume={adapted.out_dir}", "--lora-layers=down,up,gate,o,v,k,q", "--steps=2")  # the same
    assert "has adapters without --base-dtype, and this run's is \"nf4\"" in refused(f"--resume={adapted.out_dir}", "--base-dtype=nf4", "--steps=0")
    for words in (["--steps=2"], ["--steps=0"], ["--generate"], ["--steps=0", "--merge", f"--export={place / 'nothing'}"]):
        assert "has no adapters; leave --lora out" in refused(f"--resume={plain.out_dir}", "--lora=somewhere", *words)
    assert "--generate takes its weights from --resume or --init, not both" in refused("--generate", f"--resume={plain.out_dir}", f"--init={place / 'base'}")
    assert "--init: nowhere is not there; " in refused(f"--resume={adapted.out_dir}", "--init=nowhere", "--steps=2")
    assert "has adapters, and not a model; go on with --resume" in refused(f"--init={adapted.out_dir}", "--steps=1")


def test_a_base_is_not_lost(place, tmp_path):
    """Neither under what a run writes, nor when it is a run that goes on itself."""
    shutil.copytree(place / "base", tmp_path / "base")
    shutil.copy(place / "train_0.bin", tmp_path)
    run = train(tmp_path, "run", "--lora-rank=2", "--steps=1")
    onto_it = f"--export={tmp_path / 'base/model.safetensors'}"
    assert "would overwrite" in refused(f"--resume={run.out_dir}", "--steps=0", onto_it, "--merge")
    assert "would overwrite" in refused(*options(tmp_path, "--lora-rank=2", "--steps=1", onto_it, "--merge", f"--out-dir={tmp_path / 'other'}"))
    assert "is the base of the adapters" in refused(*options(tmp_path, "--lora-rank=2", "--steps=1", f"--out-dir={tmp_path / 'base'}"))
    train(tmp_path, "whole", "--steps=1")
    train(tmp_path, "beside", "--lora-rank=2", "--steps=1", base="whole")
    program.run(f"--resume={tmp_path / 'whole'}", "--steps=2")
    program.run(f"--config={tmp_path / 'beside/config.toml'}", f"--out-dir={tmp_path / 'beside'}", "--resume", "--steps=2")
    train(tmp_path, "beside", "--lora-rank=2", "--resume-if-any", "--steps=3", base="whole")


def test_the_command_after_a_failed_export_makes_the_same_file(place, tmp_path):
    run = train(place, "failed-export", "--lora-rank=2", "--steps=1")
    words = [program.PROGRAM, f"--resume={run.out_dir}", "--steps=0", f"--export={tmp_path / 'merged'}", "--merge", "--export-dtype=bf16"]
    # 100 KiB a file: less than the merged weights have.
    failed = subprocess.run(["bash", "-c", f"ulimit -f 100; exec {shlex.join(words)}"], cwd=program.ROOT, capture_output=True, text=True)
    assert failed.returncode == 1 and not list(tmp_path.iterdir()), failed.stderr
    command = failed.stderr.strip().split("; to export its checkpoint: ")[1]
    subprocess.run(command, shell=True, check=True, cwd=program.ROOT, capture_output=True)
    assert {path.name for path in (tmp_path / "merged").iterdir()} >= {"model.safetensors", "config.json"}
    table = (tmp_path / "merged/model.safetensors").read_bytes()[:20000]
    assert b'"BF16"' in table and b"lora" not in table
