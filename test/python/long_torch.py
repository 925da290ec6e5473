"""The program against a newer PyTorch than the tests' own, of 2.9 or later: its distributed checkpoints, and
torch.optim.Muon. TORCH_PYTHON names its interpreter:

    python3 -m venv VENV && VENV/bin/pip install torch==2.15.0 safetensors numpy
    make test-long SUITE=torch TORCH_PYTHON=VENV/bin/python
"""

import hashlib
import json
import os
import shutil
import subprocess

import pytest
import torch

import boxes
import pages
import program
import reference_model
import safetensors_file
import safetensors_numpy
import torch_muon
from model_comparison import Experiment
from test_checkpoints import ALL, BF16, GPT2, LEAN, LION, LLAMA, MUON, ONE, QUIET, SGD, STAGES, TENSOR, TENSOR_SHARDS, THREE_PARAMETERS

PYTHON = os.path.abspath(shutil.which(os.environ.get("TORCH_PYTHON", "")) or "none")
IS_NEW = "import safetensors, torch, torch.distributed.checkpoint as dcp; torch.optim.Muon, dcp.HuggingFaceStorageReader"


def what_is_lacking():
    if not os.path.exists(PYTHON):
        return "TORCH_PYTHON names no interpreter with torch 2.9 or later"
    tried = subprocess.run([PYTHON, "-c", IS_NEW], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"{PYTHON} has no such torch: {tried.stderr.splitlines()[-1]}"


LACKING = what_is_lacking()
pytestmark = pytest.mark.skipif(LACKING != "", reason=LACKING)


def run_torch(*words, cwd=program.ROOT):
    result = subprocess.run([PYTHON, *map(str, words)], cwd=cwd, capture_output=True, text=True, timeout=600 * program.PATIENCE)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def saved(folder, options, mesh):
    ranks, how = mesh
    program.run(*options, *how, *QUIET, "--steps=2", f"--out-dir={folder}", ranks=ranks)
    return folder / "checkpoint-00000002"


def read_by_boxes(checkpoint):
    """As torch_reader.py describes it."""
    dtypes = {name: {"F32": "float32", "BF16": "bfloat16"}[dtype] for path in checkpoint.glob("*.safetensors")
              for name, (dtype, _, _) in safetensors_file.load(path).items()}
    tensors = {**boxes.weights(checkpoint), **boxes.state(checkpoint)}
    return {name: [dtypes[name], list(array.shape), hashlib.sha256(array.tobytes()).hexdigest()] for name, array in tensors.items()}


SAVED = {"adamw": (GPT2, ONE), "lion": ([*GPT2, *LION], THREE_PARAMETERS), "muon": ([*GPT2, *MUON], TENSOR),
         "five boxes": (GPT2, TENSOR_SHARDS), "bf16": ([*GPT2, *LEAN], STAGES), "llama": ([*LLAMA, *SGD, *BF16], ALL)}


@pytest.mark.parametrize("name", SAVED)
def test_pytorch_loads_checkpoints(name, tmp_path):
    """Bit for bit: into whole tensors, and into rows or columns that two processes share."""
    checkpoint = saved(tmp_path / "run", *SAVED[name])
    expected = read_by_boxes(checkpoint)
    assert any(tensor.startswith("optim.state.") for tensor in expected)
    assert {about[0] for about in expected.values()} == {"bfloat16" if name == "bf16" else "float32"}
    for dimension in ([], ["0"], ["1"]):
        assert json.loads(run_torch("test/python/torch_reader.py", checkpoint, *dimension)) == expected


def test_the_lines_of_the_page(tmp_path):
    """docs/checkpoints.md says how PyTorch loads a checkpoint."""
    [lines] = [lines for _, how, lines in pages.blocks() if how == "run: torch"]
    checkpoint = saved(tmp_path / "run", *SAVED["lion"])
    (tmp_path / "runs/x").mkdir(parents=True)
    (tmp_path / "runs/x/checkpoint-00001000").symlink_to(checkpoint)
    more = [f"import json, sys; sys.path.append({str(program.ROOT / 'test/python')!r})", "import torch_reader",
            "print(json.dumps(torch_reader.description(tensors)))"]
    assert json.loads(run_torch("-c", "\n".join([*lines, *more]), cwd=tmp_path)) == read_by_boxes(checkpoint)


STEPS = 20


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_muon(name, tmp_path, seed):
    """How far matrices went, in the program and in PyTorch. With its iteration in fp64, the bound is test_muon's in
    test_training_against_pytorch.py. PyTorch itself rounds what it iterates to bf16. The effect is drawn in the
    reference, by random roundings, which have twice the variance of those to nearest (model_bounds.py): a matrix of many
    elements is 0.7 of a draw off. Twice a draw is allowed, since PyTorch rounds in slightly other places."""
    model = torch_muon.MODELS[name]
    experiment = Experiment(tmp_path, model, batch=torch_muon.BATCH, seed=seed)
    settings = {"lr": torch_muon.RATE, "weight_decay": torch_muon.DECAY, "grad_clip": torch_muon.MAX_NORM}
    program.train(tmp_path / "run", *experiment.options(STEPS, "--device=cpu", "--optimizer=muon", "--lr-schedule=constant"),
                  *(f"--{option.replace('_', '-')}={number}" for option, number in settings.items()), f"--export={tmp_path}/w.safetensors")

    def loaded(file):
        return {name: torch.tensor(array).double() for name, array in safetensors_numpy.load(tmp_path / file).items()}

    def errors(*dtype):
        run_torch("test/python/torch_muon.py", tmp_path, name, STEPS, *dtype)
        return reference_model.errors_of_changes(experiment.weights, loaded("torch.safetensors"), loaded("w.safetensors"))

    def reference(**options):
        return reference_model.train(experiment.weights, model, [experiment.tokens] * STEPS, **settings,
                                     make_optimizer=lambda groups, rate: reference_model.Muon(groups, rate, **options))[2]

    generator = torch.Generator().manual_seed(seed)
    drawn = reference_model.errors_of_changes(experiment.weights, reference(), reference(
        store=lambda x: reference_model.round_stochastically(x, generator)))
    in_fp64, in_bf16 = errors("float64"), errors()
    print(f"{name}: in fp64 {in_fp64}, in bf16 {in_bf16}, drawn {drawn}")
    assert len(in_fp64) >= 4 and max(in_fp64.values()) <= 1e-3
    assert all(error <= 2 * drawn[kind] for kind, error in in_bf16.items())
