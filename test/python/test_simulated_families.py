"""Models of Llama's kin and nanochat on simulated GPUs: the kernels that only these families use, in whole training steps."""

import numpy
import pytest

import program
import simulated

simulated.require()

SMALL = ["--layers=2", "--heads=4", "--channels=32", "--mlp-size=64", "--seq-len=24", "--vocab-size=64", "--global-batch-tokens=96",
         "--micro-batch-size=2", "--steps=3", "--val-every=0", "--dtype=fp32"]
MODELS = {
    "llama": ["--model=llama-tiny", "--kv-heads=2", "--head-size=16"],
    "qwen3": ["--model=qwen3-tiny", "--kv-heads=2", "--head-size=24", "--window=9", "--qkv-bias"],
    "olmo2": ["--model=llama-tiny", "--kv-heads=4", "--head-size=8", "--qk-norm=all", "--norms=behind", "--z-loss=1e-3"],
    "nanochat": ["--model=nanochat-tiny", "--kv-heads=2"],
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "train.bin"
    program.write_token_file(file, numpy.random.default_rng(1).integers(0, 64, 3000))
    return file


@pytest.mark.parametrize("model", MODELS)
def test_a_family_trains_as_on_the_cpu(model, tmp_path, tokens):
    """Both devices are within 1e-5 of exact losses in fp32, so they are within twice that of each other."""
    options = [*MODELS[model], *SMALL, f"--train-data={tokens}"]
    cpu = program.train(tmp_path / "cpu", *options, "--device=cpu")
    for ranks, more in ((1, []), (2, ["--tensor-parallel=2", "--sequence-parallel"]), (2, ["--zero-stage=3"])):
        gpu = simulated.train(tmp_path / f"{ranks}{len(more)}", *options, "--device=cuda", *more, ranks=ranks)
        assert gpu.losses == pytest.approx(cpu.losses, rel=2e-5), more
