"""PEFT and bitsandbytes for long_adapters.py, which runs this file by an interpreter that has them. Prints JSON.

    torch_peft.py losses FOLDER TOKENS B T [ADAPTER]          of a model, or of one with an adapter
    torch_peft.py make FOLDER ADAPTER RANK ALPHA              writes an adapter whose B is not zero
    torch_peft.py steps FOLDER TOKENS B T ADAPTER STEPS LR    the losses of AdamW's steps on one batch
    torch_peft.py nf4 FILE DTYPE OUT                          a safetensors file as numbers in 4 bits give it
"""

import json
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy


def model_of(folder, adapter=None, trains=False):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is None:
        return model
    adapted = PeftModel.from_pretrained(model, adapter, is_trainable=trains)
    saved = {name.replace(".weight", ".default.weight") for name in load_file(f"{adapter}/adapter_model.safetensors")}
    own = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert saved == own, f"missing {own - saved}, unexpected {saved - own}"
    return adapted


def batch_of(tokens, B, T):
    whole = torch.tensor(json.loads(open(tokens).read()))
    return [whole[first:first + B * T].view(B, T) for first in (0, 1)]


def loss_of(model, inputs, targets):
    return cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())


def losses(folder, tokens, B, T, adapter=None):
    with torch.no_grad():
        return loss_of(model_of(folder, adapter), *batch_of(tokens, int(B), int(T))).item()


def make(folder, adapter, rank, alpha):
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(1)
    modules = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    model = get_peft_model(model_of(folder), LoraConfig(r=int(rank), lora_alpha=float(alpha), target_modules=modules, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    model.save_pretrained(adapter)


def steps(folder, tokens, B, T, adapter, count, rate):
    model = model_of(folder, adapter, trains=True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=float(rate), betas=(0.9, 0.95), weight_decay=0.0)
    found = []
    for _ in range(int(count)):
        loss = loss_of(model, *batch_of(tokens, int(B), int(T)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def nf4(file, dtype, out):
    from bitsandbytes import functional
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            kept, state = functional.quantize_4bit(tensor.float().contiguous(), blocksize=64, quant_type="nf4")
            state.dtype = getattr(torch, dtype)
            tensors[name] = functional.dequantize_4bit(kept, state).float()
        else:
            tensors[name] = tensor.to(getattr(torch, dtype)).float()
    save_file(tensors, out)


if __name__ == "__main__":
    print(json.dumps({"losses": losses, "make": make, "steps": steps, "nf4": nf4}[sys.argv[1]](*sys.argv[2:])))
