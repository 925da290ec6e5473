"""What GGUF and a folder in Hugging Face's format call the same things. Not run by itself: from_gguf.py and
to_gguf.py use it.

Names are those of transformers and of llama.cpp. Both know the architectures by the same names.
"""

import dataclasses

import numpy as np

from bpe_files import GPT2_WORDS

# ---- Sizes and choices: the keys of config.json, and those of GGUF behind "llama." and so on.

KEYS = {"vocab_size": "vocab_size", "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
        "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv", "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base"}
GPT2_KEYS = {"vocab_size": "vocab_size", "n_embd": "embedding_length", "n_inner": "feed_forward_length",
             "n_layer": "block_count", "n_head": "attention.head_count", "n_positions": "context_length",
             "layer_norm_epsilon": "attention.layer_norm_epsilon"}
# GGUF says the size of a head three times.
HEAD_SIZES = ["attention.key_length", "attention.value_length", "rope.dimension_count"]
# What GGUF does not say, because llama.cpp computes nothing else: what config.json gets, and what it may not say.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
QWEN2_FIXED = {"hidden_act": "silu"}  # it has biases, whatever the key says
GPT2_FIXED = {"activation_function": "gelu_new"}
FIXED_FOR_ALL = {"partial_rotary_factor": 1.0, "use_sliding_window": False, "scale_attn_weights": True,
                 "scale_attn_by_inverse_layer_idx": False}

# ---- Tensors: the folder's name, GGUF's, and the shape in the folder.

# V tokens, C channels, F of the MLP, H and K heads of queries and of keys, D elements of a head, T positions; Q is H D,
# and X is K D.
ENDS = [("model.embed_tokens.weight", "token_embd.weight", "V C"), ("model.norm.weight", "output_norm.weight", "C")]
HEAD = ("lm_head.weight", "output.weight", "V C")
PRODUCTS = [("self_attn.q_proj.weight", "attn_q.weight", "Q C"), ("self_attn.k_proj.weight", "attn_k.weight", "X C"),
            ("self_attn.v_proj.weight", "attn_v.weight", "X C"), ("self_attn.o_proj.weight", "attn_output.weight", "C Q"),
            ("mlp.gate_proj.weight", "ffn_gate.weight", "F C"), ("mlp.up_proj.weight", "ffn_up.weight", "F C"),
            ("mlp.down_proj.weight", "ffn_down.weight", "C F")]
LAYER = [("input_layernorm.weight", "attn_norm.weight", "C"), *PRODUCTS, ("post_attention_layernorm.weight", "ffn_norm.weight", "C")]
BIASES = [("self_attn.q_proj.bias", "attn_q.bias", "Q"), ("self_attn.k_proj.bias", "attn_k.bias", "X"),
          ("self_attn.v_proj.bias", "attn_v.bias", "X")]
HEAD_NORMS = [("self_attn.q_norm.weight", "attn_q_norm.weight", "D"), ("self_attn.k_norm.weight", "attn_k_norm.weight", "D")]
NORMS_BEHIND = [("self_attn.q_norm.weight", "attn_q_norm.weight", "Q"), ("self_attn.k_norm.weight", "attn_k_norm.weight", "X"),
                ("post_attention_layernorm.weight", "post_attention_norm.weight", "C"),
                ("post_feedforward_layernorm.weight", "post_ffw_norm.weight", "C")]
GPT2_ENDS = [("transformer.wte.weight", "token_embd.weight", "V C"), ("transformer.wpe.weight", "position_embd.weight", "T C"),
             ("transformer.ln_f.weight", "output_norm.weight", "C"), ("transformer.ln_f.bias", "output_norm.bias", "C")]
GPT2_LAYER = [("ln_1.weight", "attn_norm.weight", "C"), ("ln_1.bias", "attn_norm.bias", "C"),
              ("attn.c_attn.weight", "attn_qkv.weight", "C 3C"), ("attn.c_attn.bias", "attn_qkv.bias", "3C"),
              ("attn.c_proj.weight", "attn_output.weight", "C C"), ("attn.c_proj.bias", "attn_output.bias", "C"),
              ("ln_2.weight", "ffn_norm.weight", "C"), ("ln_2.bias", "ffn_norm.bias", "C"),
              ("mlp.c_fc.weight", "ffn_up.weight", "C F"), ("mlp.c_fc.bias", "ffn_up.bias", "F"),
              ("mlp.c_proj.weight", "ffn_down.weight", "F C"), ("mlp.c_proj.bias", "ffn_down.bias", "C")]
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3.1's scaling


@dataclasses.dataclass(frozen=True)
class Tensor:
    theirs: str  # name in the folder
    name: str  # in GGUF
    shape: tuple  # in the folder
    heads: int = 0  # Llama's q and k: GGUF has the rows of each head in another order
    transposed: bool = False  # GPT-2's products: GGUF has their transpose

    @property
    def gguf_shape(self):
        return self.shape[::-1] if self.transposed else self.shape

    def to_gguf(self, array):
        """Llama's rotary positions turn the elements i and i + D/2 of a head; in GGUF those are 2i and 2i + 1."""
        if self.heads:
            return array.reshape(self.heads, 2, -1, *self.shape[1:]).swapaxes(1, 2).reshape(self.shape)
        return np.ascontiguousarray(array.T) if self.transposed else array

    def from_gguf(self, array):
        if self.heads:
            return array.reshape(self.heads, -1, 2, *self.shape[1:]).swapaxes(1, 2).reshape(self.shape)
        return np.ascontiguousarray(array.T) if self.transposed else array


@dataclasses.dataclass(frozen=True)
class Architecture:
    name: str  # GGUF's, and config.json's model_type
    its_class: str
    keys: dict
    fixed: dict
    defaults: dict  # of keys that config.json may lack
    ends: list
    layer: list

    def tensors(self, config, tied):
        """The tensors of a model with all the keys in its config.json."""
        sizes = self.sizes(config)
        yield from (Tensor(theirs, name, shape_of(text, sizes)) for theirs, name, text in self.ends + [HEAD] * (not tied))
        for number in range(config[self.key_of("block_count")]):
            for theirs, name, text in self.layer:
                shape = shape_of(text, sizes)
                prefix = f"transformer.h.{number}." if self.name == "gpt2" else f"model.layers.{number}."
                heads = {"attn_q.weight": sizes["H"], "attn_k.weight": sizes["K"]}.get(name, 0) if self.name == "llama" else 0
                yield Tensor(prefix + theirs, f"blk.{number}.{name}", shape, heads, self.name == "gpt2" and len(shape) == 2)

    def key_of(self, name):
        return next(key for key, gguf_key in self.keys.items() if gguf_key == name)

    def sizes(self, config):
        V, C, F = config["vocab_size"], config[self.key_of("embedding_length")], config[self.key_of("feed_forward_length")]
        H = config[self.key_of("attention.head_count")]
        K, D, T = config.get("num_key_value_heads", H), config.get("head_dim", C // H), config.get("n_positions", 0)
        return {"V": V, "C": C, "F": F, "H": H, "K": K, "D": D, "T": T, "Q": H * D, "X": K * D, "3C": 3 * C}


def shape_of(text, sizes):
    return tuple(sizes[letter] for letter in text.split())


def kind_of(name):
    """The type of a key's numbers."""
    return float if name.endswith(("epsilon", "base")) else int


EPS, THETA = "rms_norm_eps", "rope_theta"
ARCHITECTURES = {architecture.name: architecture for architecture in [
    Architecture("llama", "LlamaForCausalLM", KEYS, FIXED, {EPS: 1e-6, THETA: 1e4}, ENDS, LAYER),
    Architecture("qwen2", "Qwen2ForCausalLM", KEYS, QWEN2_FIXED, {EPS: 1e-6, THETA: 1e4}, ENDS, LAYER + BIASES),
    Architecture("qwen3", "Qwen3ForCausalLM", KEYS, FIXED, {EPS: 1e-6, THETA: 1e4, "head_dim": 128}, ENDS, LAYER + HEAD_NORMS),
    Architecture("olmo2", "Olmo2ForCausalLM", KEYS, FIXED, {EPS: 1e-5, THETA: 1e4}, ENDS, PRODUCTS + NORMS_BEHIND),
    Architecture("gpt2", "GPT2LMHeadModel", GPT2_KEYS, GPT2_FIXED, {"layer_norm_epsilon": 1e-5}, GPT2_ENDS, GPT2_LAYER)]}
KNOWN = f"{', '.join(list(ARCHITECTURES)[:-1])} and {list(ARCHITECTURES)[-1]}"

# ---- Llama 3.1's scaling of rotary positions

ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}


def rope_factors(scaling, theta, head_size):
    """What llama.cpp divides the frequency of each pair by."""
    factor, low, high, original = (float(scaling[key]) for key in list(LLAMA3)[1:])
    if not (factor > 0 and low > 0 and high > low and original > 0):
        raise ValueError("these are no factors of Llama 3.1's scaling")
    lengths = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    unscaled = np.clip((original / lengths - low) / (high - low), 0, 1)
    return (1 / (unscaled + (1 - unscaled) / factor)).astype(np.float32)


# ---- Words: what `tokenizer.ggml.pre` means

DIGITS = r"\p{N}"
LLAMA3_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
                r"\s+(?!\S)|\s+")
QWEN2_WORDS = LLAMA3_WORDS.replace("{1,3}", "")
TEKKEN_WORDS = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
                r"\s*[\r\n]+|\s+(?!\S)|\s+")
DEEPSEEK_WORDS = [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
                  "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
                  " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]


@dataclasses.dataclass(frozen=True)
class Words:
    patterns: list  # the text is split by one after the other
    nfc: bool = False  # (llama.cpp does not normalise text)
    ignore_merges: bool = False  # a word that is a token is taken whole
    begins: bool = False  # what llama.cpp does if add_bos_token is not given


# A tokenizer gets the first name that fits it.
PRE = {"gpt-2": Words([GPT2_WORDS]), "olmo": Words([GPT2_WORDS]), "smollm": Words([DIGITS, GPT2_WORDS]),
       "llama-bpe": Words([LLAMA3_WORDS], ignore_merges=True, begins=True), "dbrx": Words([LLAMA3_WORDS]),
       "qwen2": Words([QWEN2_WORDS], nfc=True), "tekken": Words([TEKKEN_WORDS], ignore_merges=True, begins=True),
       "deepseek-v3": Words(DEEPSEEK_WORDS)}

# GGUF's kinds of tokens. A model may have more rows than its tokenizer has tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
BEGIN_KEY, PAD_KEY = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.padding_token_id"
# The tokens that end an answer: of the text, of a turn, of a message.
END_KEYS = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
