"""Makes folders in Hugging Face's format with random weights: config.json, safetensors, an index if there are shards."""

import json

import numpy

import safetensors_numpy

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 150, "hidden_size": 64, "intermediate_size": 96,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 24, "hidden_act": "silu",
         "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None,
         "tie_word_embeddings": False, "torch_dtype": "float32", "attention_bias": False, "mlp_bias": False}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "head_dim": 16, "tie_word_embeddings": True,
         "rms_norm_eps": 1e-6}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": True}
OLMO2 = {**LLAMA, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "head_dim": 16, "num_key_value_heads": 4}
NANOCHAT = {"architectures": ["NanoChatForCausalLM"], "model_type": "nanochat", "vocab_size": 150, "hidden_size": 64,
            "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "hidden_act": "relu2", "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "final_logit_softcapping": 15.0, "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "float32"}
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 150, "n_embd": 64, "n_layer": 2, "n_head": 4,
        "n_positions": 64, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "torch_dtype": "float32"}
CONFIGS = {"llama": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "olmo2": OLMO2, "nanochat": NANOCHAT, "gpt2": GPT2}


def shapes_of(config):
    """The shape of each tensor, by Hugging Face's names."""
    kind = config["model_type"]
    if kind == "gpt2":
        V, C, L, T = (config[key] for key in ("vocab_size", "n_embd", "n_layer", "n_positions"))
        shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
        for i in range(L):
            for name, rows, columns in (("attn.c_attn", C, 3 * C), ("attn.c_proj", C, C), ("mlp.c_fc", C, 4 * C),
                                        ("mlp.c_proj", 4 * C, C)):
                shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
            shapes |= {f"h.{i}.{name}.{what}": (C,) for name in ("ln_1", "ln_2") for what in ("weight", "bias")}
        return shapes
    V, C, F, L, H, K = (config[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                                                "num_attention_heads", "num_key_value_heads"))
    D = config.get("head_dim") or C // H
    shapes = {"model.embed_tokens.weight": (V, C)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (V, C)
    if kind != "nanochat":
        shapes["model.norm.weight"] = (C,)
    for i in range(L):
        layer = f"model.layers.{i}."
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (heads * D, C) for name, heads in (("q", H), ("k", K), ("v", K))}
        shapes[f"{layer}self_attn.o_proj.weight"] = (C, H * D)
        if kind == "qwen2":
            shapes |= {f"{layer}self_attn.{name}_proj.bias": (heads * D,) for name, heads in (("q", H), ("k", K), ("v", K))}
        if kind == "qwen3":
            shapes |= {f"{layer}self_attn.{name}_norm.weight": (D,) for name in "qk"}
        if kind == "olmo2":
            shapes |= {f"{layer}self_attn.q_norm.weight": (H * D,), f"{layer}self_attn.k_norm.weight": (K * D,)}
        if kind == "nanochat":
            shapes |= {f"{layer}mlp.fc1.weight": (F, C), f"{layer}mlp.fc2.weight": (C, F)}
            continue
        norms = ("post_attention_layernorm", "post_feedforward_layernorm" if kind == "olmo2" else "input_layernorm")
        shapes |= {f"{layer}{norm}.weight": (C,) for norm in norms}
        shapes |= {f"{layer}mlp.gate_proj.weight": (F, C), f"{layer}mlp.up_proj.weight": (F, C), f"{layer}mlp.down_proj.weight": (C, F)}
    return shapes


def weights_of(config, seed=1):
    random = numpy.random.default_rng(seed)
    return {name: (random.normal(1 if "norm" in name or "ln_" in name else 0, 0.1, shape)).astype(numpy.float32)
            for name, shape in shapes_of(config).items()}


def write(folder, config, weights=None, shards=1):
    """Writes the folder and returns its weights."""
    weights = weights_of(config) if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    names = sorted(weights)
    if shards == 1:
        safetensors_numpy.save(folder / "model.safetensors", weights)
        return weights
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(files.values())):
        safetensors_numpy.save(folder / file, {name: weights[name] for name in names if files[name] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return weights
