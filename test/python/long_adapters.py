"""Low-rank adapters against PEFT, and bases in 4 bits against bitsandbytes. TORCH_PYTHON names an interpreter that has them:

    python3 -m venv VENV
    VENV/bin/pip install torch==2.15.0 transformers==5.24.0 peft==0.21.0 bitsandbytes==0.50.0 safetensors numpy
    make test-long SUITE=adapters TORCH_PYTHON=VENV/bin/python
"""

import json
import os
import shutil
import subprocess

import numpy
import pytest

import model_folders
import program
import safetensors_numpy
import smollm2_folder

PYTHON = os.path.abspath(shutil.which(os.environ.get("TORCH_PYTHON", "")) or "none")
B, T = 4, 32


def what_is_lacking():
    if not os.path.exists(PYTHON):
        return "TORCH_PYTHON names no interpreter with PEFT and bitsandbytes"
    tried = subprocess.run([PYTHON, "-c", "import bitsandbytes, peft, safetensors, torch, transformers"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"{PYTHON} has not all of them: {tried.stderr.splitlines()[-1]}"


LACKING = what_is_lacking()
pytestmark = pytest.mark.skipif(LACKING != "", reason=LACKING)


def torch_peft(*words):
    result = subprocess.run([PYTHON, program.ROOT / "test/python/torch_peft.py", *map(str, words)], capture_output=True, text=True,
                            timeout=900 * program.PATIENCE)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small") / "base"
    model_folders.write(folder, {**model_folders.LLAMA, "num_hidden_layers": 3})
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    return smollm2_folder.make(tmp_path_factory)


@pytest.mark.parametrize("base, rate", [("small", 2e-3), ("smollm2", 5e-4)])
def test_adapters_of_both_programs(base, rate, request, tmp_path):
    base = request.getfixturevalue(base)
    tokens = numpy.random.default_rng(3).integers(0, 150, B * T + 1)
    program.write_token_file(tmp_path / "train_0.bin", tokens)
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    batch = [tmp_path / "tokens.json", B, T]
    common = [f"--train-data={tmp_path / 'train_0.bin'}", f"--seq-len={T}", f"--global-batch-tokens={B * T}", "--val-every=0", "--dtype=fp32",
              "--lr-schedule=constant", "--grad-clip=0"]

    def loss_of(name, *options):
        return program.train(tmp_path / name, *common, "--steps=1", "--lr=0", *options).losses[0]

    program.train(tmp_path / "ours", f"--init={base}", *common, "--lora-rank=8", "--steps=5", f"--lr={rate}", f"--export={tmp_path / 'adapter'}")
    own = loss_of("own", f"--lora={tmp_path / 'adapter'}", f"--export={tmp_path / 'merged'}", "--merge", "--export-dtype=fp32")
    assert torch_peft("losses", base, *batch, tmp_path / "adapter") == pytest.approx(own, abs=1e-5)
    assert torch_peft("losses", tmp_path / "merged", *batch) == pytest.approx(own, abs=1e-5)
    assert loss_of("merged-run", f"--init={tmp_path / 'merged'}") == pytest.approx(own, abs=1e-5)

    torch_peft("make", base, tmp_path / "theirs", 6, 12)
    theirs = [f"--lora={tmp_path / 'theirs'}", f"--init={base}"]
    assert loss_of("their-run", *theirs) == pytest.approx(torch_peft("losses", base, *batch, tmp_path / "theirs"), abs=1e-5)
    expected = torch_peft("steps", base, *batch, tmp_path / "theirs", 20, rate)
    run = program.train(tmp_path / "their-steps", *theirs, *common, "--steps=20", f"--lr={rate}")
    assert expected[0] - expected[-1] > 0.1
    assert run.losses == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_in_4_bits_are_those_of_bitsandbytes(dtype, tmp_path):
    """A million and more of them, in the exported base; and a block of zeros."""
    config = {**model_folders.LLAMA, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "head_dim": 64}
    weights = model_folders.weights_of(config)
    weights["model.layers.0.mlp.up_proj.weight"][5, 64:128] = 0
    assert sum(array.size for name, array in weights.items() if "_proj" in name) > 1e6
    model_folders.write(tmp_path / "base", config, weights)
    torch_peft("nf4", tmp_path / "base/model.safetensors", dtype, tmp_path / "expected.safetensors")
    program.write_token_file(tmp_path / "train_0.bin", range(100))
    program.run(f"--init={tmp_path / 'base'}", f"--train-data={tmp_path / 'train_0.bin'}", "--seq-len=16", "--global-batch-tokens=16", "--lora-rank=2",
                "--base-dtype=nf4", "--steps=0", f"--dtype={ {'float32': 'fp32', 'bfloat16': 'bf16'}[dtype] }", f"--export={tmp_path / 'out'}", "--merge",
                "--export-dtype=fp32", f"--out-dir={tmp_path / 'run'}")
    expected, got = (safetensors_numpy.load(path) for path in (tmp_path / "expected.safetensors", tmp_path / "out/model.safetensors"))
    assert expected.keys() == got.keys()
    for name, array in expected.items():
        assert numpy.array_equal(array if "_proj" in name else weights[name], got[name]), name
