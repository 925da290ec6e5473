"""Low-rank adapters for tests: folders as PEFT writes them, and models with adapters in PyTorch."""

import dataclasses
import json
import math

import numpy
import torch

import reference_model
import safetensors_numpy

MATRICES = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj",
            "up": "mlp.up_proj", "down": "mlp.down_proj"}


def file_name(matrix, which):
    """The name of A or B of "model.layers.0.self_attn.q_proj"."""
    return f"base_model.model.{matrix}.lora_{which}.weight"


def random_adapters(shapes, rank, matrices="all", seed=1):
    """{name in the file: array} beside weights of these shapes; B is not zero."""
    random = numpy.random.default_rng(seed)
    chosen = MATRICES if matrices == "all" else matrices.split(",")
    adapters = {}
    for name, shape in sorted(shapes.items()):
        matrix = name.removesuffix(".weight")
        if any(matrix.endswith(MATRICES[of]) for of in chosen):
            adapters[file_name(matrix, "A")] = random.uniform(-1, 1, (rank, shape[1])).astype(numpy.float32) / math.sqrt(shape[1])
            adapters[file_name(matrix, "B")] = random.normal(0, 0.2, (shape[0], rank)).astype(numpy.float32)
    return adapters


def write(folder, adapters, alpha=8, **config):
    """`config` replaces keys of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = next(array.shape[0] for name, array in adapters.items() if "lora_A" in name)
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in adapters})
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "bias": "none",
         "use_rslora": False, "target_modules": targets, "init_lora_weights": True, "base_model_name_or_path": None, **config}))
    safetensors_numpy.save(folder / "adapter_model.safetensors", adapters)
    return folder


def read(folder):
    return (safetensors_numpy.load(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text()))


def merged(weights, adapters, scale):
    """The weights with the products of their adapters, in the dtype of the weights."""
    whole = dict(weights)
    for name in adapters:
        if "lora_A" in name:
            matrix = name.removeprefix("base_model.model.").split(".lora_")[0]
            product = adapters[file_name(matrix, "B")] @ adapters[name]
            whole[f"{matrix}.weight"] = weights[f"{matrix}.weight"] + scale * product
    return whole


@dataclasses.dataclass(frozen=True)
class Adapted(reference_model.Model):
    """A model whose weights are those of its adapters: the frozen ones belong to it."""
    model: reference_model.Model
    frozen: dict
    scale: float

    @property
    def seq_len(self):
        return self.model.seq_len

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def logits(self, weights, inputs, **options):
        return self.model.logits(merged(self.frozen, weights, self.scale), inputs, **options)


def as_tensors(adapters):
    return {name: torch.from_numpy(array).double() for name, array in adapters.items()}
