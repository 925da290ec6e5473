"""Sharded checkpoints: each element is in one box, PyTorch's rules hold (boxes.py), and any mesh loads what any other saved."""

import hashlib
import json
import shutil

import numpy as np
import pytest

import boxes
import program
import safetensors_numpy
import simulated

GPT2 = ["--layers=3", "--heads=2", "--channels=64", "--seq-len=16", "--global-batch-tokens=384", "--device=cpu"]
LLAMA = ["--model=llama-tiny", "--layers=3", "--heads=4", "--kv-heads=2", "--channels=64", "--mlp-size=96", "--seq-len=16", "--vocab-size=257",
         "--global-batch-tokens=384", "--device=cpu"]
QUIET = ["--sample-tokens=0", "--val-batches=1"]

# Processes and options of meshes.
ONE, TWO_WHOLE, THREE_WHOLE = (1, []), (2, []), (3, [])
TWO_SHARDS, THREE_SHARDS, THREE_PARAMETERS = (2, ["--zero-stage=1"]), (3, ["--zero-stage=2"]), (3, ["--zero-stage=3"])
GROUPS = (4, ["--zero-stage=3", "--zero-shard-size=2"])
TENSOR, TENSOR_SHARDS = (2, ["--tensor-parallel=2"]), (4, ["--tensor-parallel=2", "--zero-stage=3"])
STAGES, THREE_STAGES = (4, ["--pipeline-parallel=2"]), (3, ["--pipeline-parallel=3"])
ALL = (4, ["--pipeline-parallel=2", "--tensor-parallel=2"])

BF16, LEAN = ["--dtype=bf16"], ["--dtype=bf16", "--moments-dtype=bf16", "--master-dtype=none"]
LION, SGD, MUON = ["--optimizer=lion"], ["--optimizer=sgd", "--momentum=0.9"], ["--optimizer=muon"]
EIGHT = ["--moments-dtype=8bit"]


def offloaded(folder, *what):
    return [*(f"--offload-{part}=nvme" for part in what), f"--nvme-dir={folder}/disk"]


def test_a_part_is_no_model(tmp_path):
    program.run(*GPT2, *QUIET, "--steps=1", f"--out-dir={tmp_path}/run", ranks=3)
    for rank, words in ((0, "give the folder of the checkpoint, which has the other parts"), (1, "give the folder with all its files")):
        part = tmp_path / f"run/checkpoint-00000001/weights-{rank:05}-1.safetensors"
        refused = program.run(*GPT2, *QUIET, "--steps=0", f"--init={part}", check=False)
        assert refused.returncode == 1 and words in refused.stderr and refused.stderr.count("\n") == 1


def shards(path):
    return json.loads(boxes.metadata(path)[boxes.SHARDING])


@pytest.mark.parametrize("options, mesh, most", [(GPT2, ONE, 1), (LLAMA, THREE_WHOLE, 1), (GPT2, THREE_PARAMETERS, 3), (GPT2, TENSOR, 3), (GPT2, TENSOR_SHARDS, 5),
                                                 (LLAMA, THREE_SHARDS, 3), (LLAMA, GROUPS, 3), (LLAMA, ALL, 3)])
def test_the_files_of_ranks(options, mesh, most, tmp_path):
    ranks, how = mesh
    program.run(*options, *how, *QUIET, "--steps=1", f"--out-dir={tmp_path}/run", f"--export={tmp_path}/w.safetensors", ranks=ranks)
    checkpoint = tmp_path / "run/checkpoint-00000001"
    found = sorted(path.name for path in checkpoint.iterdir())
    assert [name for name in found if "checksums" in name] == [f"checksums-{rank:05}.json" for rank in range(ranks)]
    for path in [*boxes.weights_files(checkpoint), *boxes.state_files(checkpoint)]:
        kind, rank, number = path.stem.split("-")
        assert 1 <= int(number) <= most and int(rank) < ranks
        # A box of a tensor in a file, whose place has as many numbers as the tensor dimensions; no other tensor.
        assert boxes.metadata(path) == {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": boxes.metadata(path)["DCP_SHARDING_INFO"]}
        assert shards(path).keys() == boxes.boxes(path).keys() != set()
        assert all(len(place["saved_offsets"]) == array.ndim and array.size > 0
                   for place, (_, array) in zip(shards(path).values(), boxes.boxes(path).values()))
    # Merged, they are the exported weights, of which none is padding; and the rule of the whole shape holds.
    weights, exported = boxes.weights(checkpoint), boxes.merge([tmp_path / "w.safetensors"])
    assert weights.keys() == exported.keys() and all(np.array_equal(weights[name], exported[name]) for name in exported)
    state = boxes.state(checkpoint)
    assert {name: state[f"optim.state.{name}.exp_avg"].shape for name in weights} == {name: array.shape for name, array in weights.items()}
    elements = [sum(array.size for path in checkpoint.glob(f"*-{rank:05}-*") for _, array in boxes.boxes(path).values()) for rank in range(ranks)]
    assert sum(elements) == 3 * sum(array.size for array in weights.values())
    if how == [] and ranks > 1:
        # The last ranks have the padding: of five units to blocks of 1024 elements a rank, and of two tables from 257 to 384 rows.
        assert max(elements) <= sum(elements) / ranks + 3 * (5 * 1024 + 2 * (384 - 257) * 64 / ranks)


def test_dtypes_are_those_in_memory(tmp_path):
    for name, options, of_weights, of_state in (("master", BF16, "<f4", "<f4"), ("lean", LEAN, "BF16", "BF16"), ("eight", [*BF16, *EIGHT], "<f4", "<f4")):
        program.run(*GPT2, *options, *QUIET, "--steps=1", f"--out-dir={tmp_path}/{name}")
        checkpoint = tmp_path / f"{name}/checkpoint-00000001"
        for files, dtype in ((boxes.weights_files(checkpoint), of_weights), (boxes.state_files(checkpoint), of_state)):
            size = sum(path.stat().st_size for path in files)
            elements = sum(array.size for path in files for _, array in boxes.boxes(path).values())
            assert (2 if dtype == "BF16" else 4) == size // elements, (name, size, elements)


# What the reader of torch 2.15 reads of two folders (make_torch_references.py).
REFERENCES = program.ROOT / "test/reference"
READ_BY_TORCH = json.loads((REFERENCES / "torch_checkpoints.json").read_text())


@pytest.mark.parametrize("name", ["saved_by_torch", "saved_by_train_gpt"])
def test_pytorch_reads_the_same(name, tmp_path):
    """Of a folder that two processes of PyTorch saved, and of one that four ranks of the program saved."""
    expected = {tensor: (tuple(shape), digest) for tensor, (_, shape, digest) in READ_BY_TORCH[name].items()}
    described = lambda tensors: {tensor: (array.shape, hashlib.sha256(array.tobytes()).hexdigest()) for tensor, array in tensors.items()}
    files = sorted((REFERENCES / name).iterdir())
    assert len(files) > 1 and described(boxes.merge(files)) == expected
    program.run(*READ_BY_TORCH["options"], "--device=cpu", *QUIET, "--steps=0", f"--init={REFERENCES / name}", f"--export={tmp_path}/w.safetensors")
    weights = {tensor: about for tensor, about in expected.items() if not tensor.startswith("optim.")}
    assert described(safetensors_numpy.load(tmp_path / "w.safetensors")) == weights


def save(folder, options, mesh):
    """A run of three steps, whose checkpoint after two of them is there."""
    ranks, how = mesh
    program.run(*options, *how, *QUIET, "--steps=3", "--checkpoint-every=2", "--val-every=0", f"--out-dir={folder}", ranks=ranks)
    shutil.rmtree(folder / "checkpoint-00000003")
    return folder / "checkpoint-00000002"


def save_what_is_loaded(folder, options, mesh, run=program.run):
    """Resumes a run in its folder: the checkpoint that it saves before the next step, as the best so far. That step ruins the
    weights."""
    ranks, how = mesh
    result = run(*options, *how, *QUIET, "--steps=3", "--val-every=1", "--keep-best", "--lr=1e9", "--lr-schedule=constant", "--warmup-steps=0",
                 f"--out-dir={folder}", "--resume", ranks=ranks, check=False)
    again = folder / "best/checkpoint-00000002"
    assert again.exists(), result.stdout + result.stderr
    return again


PAIRS = [(GPT2, ONE, THREE_PARAMETERS), (GPT2, THREE_PARAMETERS, ONE), (GPT2, THREE_WHOLE, TENSOR), (GPT2, TENSOR, THREE_SHARDS),
         (GPT2, TENSOR_SHARDS, STAGES), (GPT2, THREE_STAGES, TENSOR_SHARDS), (GPT2, GROUPS, THREE_PARAMETERS), (GPT2, ALL, GROUPS),
         ([*LLAMA, *LION], ONE, TENSOR), ([*LLAMA, *LION], TENSOR_SHARDS, THREE_PARAMETERS), ([*LLAMA, *SGD], THREE_PARAMETERS, STAGES),
         ([*LLAMA, *BF16], THREE_STAGES, ALL), ([*GPT2, *SGD, *BF16], ONE, THREE_SHARDS), ([*GPT2, *LION, *BF16], THREE_SHARDS, TENSOR),
         ([*LLAMA, *MUON], ONE, TENSOR_SHARDS), ([*GPT2, *MUON], TENSOR, THREE_SHARDS), ([*GPT2, *LEAN], THREE_PARAMETERS, ONE),
         ([*LLAMA, *LEAN], ONE, TENSOR), ([*GPT2, *EIGHT], ONE, THREE_PARAMETERS), ([*LLAMA, *BF16, *EIGHT], TENSOR, TENSOR_SHARDS),
         ([*LLAMA, *EIGHT], THREE_SHARDS, STAGES)]


@pytest.mark.more
@pytest.mark.parametrize("options, source, target", PAIRS, ids=lambda value: " ".join(map(str, value)) or "-")
def test_a_mesh_loads_what_another_saved(options, source, target, tmp_path):
    saved = save(tmp_path, options, source)
    again = save_what_is_loaded(tmp_path, options, target)
    assert boxes.contents(again) == boxes.contents(saved)


@pytest.mark.more
@pytest.mark.parametrize("source, target", [((), ("optimizer",)), (("optimizer", "parameters"), ())])
def test_offloaded_state_is_loaded_and_saved(source, target, tmp_path):
    options = [*LLAMA, *BF16, "--micro-batch-size=1"]
    saved = save(tmp_path, options, (2, [*TWO_SHARDS[1], *(offloaded(tmp_path, *source) if source else [])]))
    again = save_what_is_loaded(tmp_path, options, (3, [*THREE_SHARDS[1], *(offloaded(tmp_path, *target) if target else [])]))
    assert boxes.contents(again) == boxes.contents(saved)


@pytest.mark.more
@simulated.NEEDED
def test_a_gpu_loads_what_a_cpu_saved(tmp_path):
    options = [*GPT2[:-1], "--device=cuda", *BF16]
    saved = save(tmp_path / "run", [*GPT2, *BF16], THREE_WHOLE)

    def run(*words, ranks, check):
        return simulated.run(words, tmp_path / "folder", ranks=ranks)

    again = save_what_is_loaded(tmp_path / "run", options, (2, ["--zero-stage=2"]), run)
    assert boxes.contents(again) == boxes.contents(saved)
