"""Our models in PyTorch against Hugging Face's library, where it is installed: logits, loss and every gradient of random models.

That library computes norms, angles and the softmax of attention in fp32, also in models that are fp64. So the two differ by
fp32's roundings, some 1e-7 of a tensor's norm, and more beyond a context of 64 tokens, where fp32's angles are worse.
"""

import os

import pytest
import torch

import reference_model
from reference_llama import MODELS, Nanochat

transformers = pytest.importorskip("transformers", reason="Hugging Face's library transformers is not installed")

SEED = int(os.environ.get("SEED", int.from_bytes(os.urandom(4), "little")))
TOLERANCE = 1e-5  # share of a tensor's norm


def their_model(model_type, model, weights):
    rope = {"rope_type": "default", "rope_theta": model.rope_theta}
    options = {"vocab_size": model.vocab_size, "hidden_size": model.channels, "intermediate_size": model.mlp_size,
               "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
               "rms_norm_eps": model.norm_eps, "pad_token_id": None, "attn_implementation": "eager", "rope_parameters": rope}
    if isinstance(model, Nanochat):
        options |= {"final_logit_softcapping": model.logit_cap}
    else:
        options |= {"tie_word_embeddings": model.tied_head, "head_dim": model.head_size}
        if model.rope_scaling != "none":
            factor, low, high, positions = map(float, model.rope_scaling.split(","))
            rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                     "original_max_position_embeddings": int(positions)}
        if model_type == "mistral":
            options |= {"sliding_window": model.window or None}
    config = transformers.AutoConfig.for_model(model_type, **options)
    theirs = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    assert dict(theirs.named_parameters()).keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(weights[name])
    return theirs


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_loss_and_every_gradient(model_type):
    print(f"SEED={SEED}")
    model = MODELS[model_type]
    generator = torch.Generator().manual_seed(SEED)
    weights = reference_model.random_weights(model, generator, torch.float64)
    tokens = reference_model.random_tokens(model, 3, generator)
    theirs = their_model(model_type, model, weights)
    logits = theirs(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()

    own_loss, expected = reference_model.loss_and_gradients(weights, model, tokens)
    expected |= {"logits": model.logits(weights, tokens[:, :-1]), "loss": torch.tensor(own_loss, dtype=torch.float64)}
    found = {name: parameter.grad for name, parameter in theirs.named_parameters()} | {"logits": logits, "loss": loss}
    shares = {name: ((found[name] - tensor).norm() / tensor.norm()).item() for name, tensor in expected.items()}
    worst = max(shares, key=shares.get)
    print(f"the worst is {worst}, {shares[worst]:.1e} of its norm")
    assert shares[worst] <= TOLERANCE, worst
