"""A Llama of the sizes of SmolLM2-135M with random weights, as a folder and as GGUF files. The speed of generation does not
depend on the weights.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test/python")]

import interpreter  # noqa: E402

interpreter.need("numpy", "gguf")
import gguf  # noqa: E402
import model_folders  # noqa: E402
import numpy  # noqa: E402


def config(layers):
    return model_folders.LLAMA | {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "rope_theta": 1e5, "tie_word_embeddings": True}


def write(folder, sizes, gguf_dtypes):
    """Writes the folder, and in it a file DTYPE.gguf for each dtype. Returns the number of weights."""
    random = numpy.random.default_rng(1)
    tensors = {name: random.standard_normal(shape, numpy.float32) * numpy.float32(0.04)
               for name, shape in model_folders.shapes_of(sizes).items()}
    model_folders.write(folder, sizes, tensors)
    for dtype in gguf_dtypes:
        write_gguf(folder / f"{dtype}.gguf", sizes, tensors, dtype)
    return sum(array.size for array in tensors.values())


def write_gguf(path, sizes, tensors, dtype):
    """Matrices in fp32 or bf16, vectors in fp32. llama.cpp takes no model without a vocabulary, so this one has made-up tokens."""
    layers, tokens = sizes["num_hidden_layers"], sizes["vocab_size"]
    file = gguf.GGUFWriter(path, "llama")
    file.add_block_count(layers)
    file.add_context_length(sizes["max_position_embeddings"])
    file.add_embedding_length(sizes["hidden_size"])
    file.add_feed_forward_length(sizes["intermediate_size"])
    file.add_head_count(sizes["num_attention_heads"])
    file.add_head_count_kv(sizes["num_key_value_heads"])
    file.add_rope_dimension_count(sizes["head_dim"])
    file.add_rope_freq_base(sizes["rope_theta"])
    file.add_layer_norm_rms_eps(sizes["rms_norm_eps"])
    file.add_tokenizer_model("gpt2")
    file.add_token_list([f"<{i}>" for i in range(tokens)])
    file.add_token_types([gguf.TokenType.NORMAL] * tokens)
    file.add_token_merges(["< 0"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    for name, array in tensors.items():
        stored = gguf.GGMLQuantizationType.BF16 if dtype == "bf16" and array.ndim > 1 else gguf.GGMLQuantizationType.F32
        file.add_tensor(names.get_name(name, try_suffixes=(".weight",)), gguf.quants.quantize(array, stored), raw_dtype=stored)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
