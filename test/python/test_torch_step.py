"""gpu-check compares with a step in PyTorch (dev/gpu/torch_step.py). The step uses what a user of PyTorch would use on a GPU:
flash attention, fused AdamW, torch.compile and bf16. Calls that need a GPU or a newer PyTorch are recorded instead."""

import importlib.util
import sys
import types

import pytest
import torch

from program import ROOT


@pytest.fixture(scope="module")
def torch_step():
    """Imported by its path, because the step of dev/cpu, which it imports, has the same name."""
    sys.path[:0] = [str(ROOT / "dev/cpu"), str(ROOT / "dev/gpu")]
    spec = importlib.util.spec_from_file_location("gpu_torch_step", ROOT / "dev/gpu/torch_step.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calls(monkeypatch):
    """[(function, arguments)] of calls to PyTorch's functions."""
    recorded = []

    def record(owner, name, result=None):
        def called(*arguments, **options):
            recorded.append((name, *arguments, options) if options else (name, *arguments))
            return arguments[0] if result is None else result
        monkeypatch.setattr(owner, name, called, raising=False)

    record(torch, "compile")
    record(torch.nn.Module, "compile")
    record(torch.optim, "AdamW", "an optimizer")
    kernels = types.SimpleNamespace()
    for name in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_math_sdp", "enable_cudnn_sdp"):
        record(kernels, name)
    monkeypatch.setattr(torch.backends, "cuda", kernels)
    return recorded


def test_only_flash_attention_is_left_to_take(torch_step, calls, monkeypatch):
    torch_step.take_flash_attention()
    assert sorted(calls) == [("enable_cudnn_sdp", False), ("enable_flash_sdp", True), ("enable_math_sdp", False),
                             ("enable_mem_efficient_sdp", False)]
    # An older PyTorch has no such function for cuDNN.
    monkeypatch.delattr(torch.backends.cuda, "enable_cudnn_sdp")
    calls.clear()
    torch_step.take_flash_attention()
    assert len(calls) == 3


def test_models_are_compiled_whole_and_deep_ones_by_blocks(torch_step, calls):
    model = torch_step.WithHead(2, 2, 16, 8, 11)
    assert torch_step.compiled(model, 12, "cuda") == (model, "whole") and calls == [("compile", model)]
    calls.clear()
    head = model.head
    assert torch_step.compiled(model, 48, "cuda") == (model, "by blocks")
    assert calls == [*(("compile", block) for block in model.blocks), ("compile", head)]
    calls.clear()
    assert torch_step.compiled(model, 12, "cpu") == (model, "not") and not calls


def test_adamw_is_fused_and_decays_matrices(torch_step, calls):
    model = torch_step.WithHead(2, 2, 16, 8, 11)
    torch_step.make_adamw(model, "cuda")
    (_, groups, options), = calls
    assert options == {"lr": 1e-4, "betas": (0.9, 0.95), "fused": True}
    decayed, others = groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0)
    assert {p.dim() for p in decayed["params"]} == {2} and {p.dim() for p in others["params"]} == {1}
    assert len(decayed["params"]) + len(others["params"]) == len(list(model.parameters()))


def test_products_are_in_bf16_and_losses_in_fp32(torch_step):
    model = torch_step.WithHead(2, 2, 16, 8, 11)
    dtypes = []
    for layer in (model.blocks[0].qkv, model.blocks[1].mlp):
        layer.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
    part = torch.randint(11, (3, 9), generator=torch.Generator().manual_seed(1))
    whole, share = (torch_step.mean_loss(model, part, batch, "cpu") for batch in (3, 6))
    assert dtypes == [torch.bfloat16] * 4 and whole.dtype == torch.float32
    assert share.item() == whole.item() / 2
