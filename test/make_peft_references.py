#!/usr/bin/env python3
"""Makes the adapter of PEFT's that the suite `adapters` reads, and the losses of PyTorch's training from there:

    test/reference/saved_by_peft/     adapter_config.json, adapter_model.safetensors, losses.json

    python3 -m venv VENV && VENV/bin/pip install torch==2.15.0 transformers==5.24.0 peft==0.21.0 numpy
    VENV/bin/python test/make_peft_references.py
"""

import json
import pathlib
import sys
import tempfile

import numpy
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

TEST = pathlib.Path(__file__).resolve().parent
FOLDER = TEST / "reference/saved_by_peft"
sys.path.insert(0, str(TEST / "python"))

import model_folders

CONFIG = {**model_folders.LLAMA, "num_hidden_layers": 1}
BATCH, TOKENS, STEPS, RATE = 4, 16, 20, 1e-3


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as place:
        model_folders.write(pathlib.Path(place, "base"), CONFIG)
        model = AutoModelForCausalLM.from_pretrained(pathlib.Path(place, "base"), dtype=torch.float32)
    # Half of the matrices, by a regular expression, so that the tensors say which.
    model = get_peft_model(model, LoraConfig(r=3, lora_alpha=5, target_modules=r".*\.(q_proj|v_proj|o_proj|down_proj)", lora_dropout=0.1,
                                             task_type="CAUSAL_LM"))
    model.eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    model.save_pretrained(FOLDER)
    (FOLDER / "README.md").unlink(missing_ok=True)
    config = json.loads((FOLDER / "adapter_config.json").read_text())
    (FOLDER / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "base"}, indent=2) + "\n")
    tokens = numpy.random.default_rng(3).integers(0, CONFIG["vocab_size"], BATCH * TOKENS + 1)
    inputs, targets = (torch.tensor(tokens[first:first + BATCH * TOKENS]).view(BATCH, TOKENS) for first in (0, 1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        loss = torch.nn.functional.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    options = [f"--seq-len={TOKENS}", f"--global-batch-tokens={BATCH * TOKENS}", f"--steps={STEPS}", f"--lr={RATE}", "--lr-schedule=constant",
               "--grad-clip=0", "--dtype=fp32", "--val-every=0"]
    (FOLDER / "losses.json").write_text(json.dumps({"tokens": tokens.tolist(), "options": options, "losses": losses}) + "\n")


main()
