"""Folders in Hugging Face's format with random weights and a byte-level BPE that is trained here, for the tests of
data/from_gguf.py and data/to_gguf.py."""

import json
import runpy
import sys

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import dataset_scripts
import model_folders
import program

Type = gguf.GGMLQuantizationType
# A model has more rows than its tokenizer has tokens. The rows of some matrices are no multiple of 32.
TOKENS, ROWS = 380, 400
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CONFIGS = {name: {**model_folders.CONFIGS[name], "vocab_size": ROWS} for name in ("llama", "qwen2", "qwen3", "olmo2", "gpt2")}
CONFIGS["llama"]["head_dim"] = CONFIGS["qwen3"]["head_dim"] = 20
CONFIGS["llama 3.1"] = {**CONFIGS["llama"], "rope_scaling": LLAMA31, "max_position_embeddings": 131072, "tie_word_embeddings": True}
BEGIN, END, TURN, THOUGHT = "<|first|>", "<|last|>", "<|turn|>", "<think>"  # (llama.cpp knows others as end tokens)
TEMPLATE = "{% for message in messages %}<|turn|>{{ message['content'] }}{% endfor %}"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def tokenizer(patterns=(GPT2_WORDS,), nfc=False, ignore_merges=False, begins=False):
    """A tokenizer of TOKENS tokens."""
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        made.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in patterns]
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS - 1, special_tokens=[BEGIN, END, TURN], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator([(program.ROOT / "README.md").read_text()], trainer)
    made.add_tokens([tokenizers.AddedToken(THOUGHT, special=False, normalized=False)])
    if begins:
        made.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", special_tokens=[(BEGIN, made.token_to_id(BEGIN))])
    return made


def write(folder, config, made=None, weights=None, shards=1, ends=(1, 2)):
    """Writes the folder; returns its weights and its tokenizer."""
    made = made or tokenizer()
    weights = model_folders.write(folder, config, weights, shards)
    made.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", {"chat_template": TEMPLATE}),
                          ("generation_config.json", {"bos_token_id": 0, "eos_token_id": list(ends), "pad_token_id": 1})):
        (folder / name).write_text(json.dumps(content))
    return weights, made


def run(script, *options):
    """Runs a script of data/ in this process."""
    before = sys.argv
    sys.argv = list(map(str, [dataset_scripts.DATA / script, *options]))
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv = before


def refused(script, *options, out):
    """The line with which a script ends; nothing is left behind."""
    before = set(out.parent.iterdir())
    with pytest.raises(SystemExit) as ending:
        run(script, *options, "--out", out)
    line = str(ending.value)
    assert line.startswith("error: ") and "\n" not in line, line
    assert set(out.parent.iterdir()) == before
    return line


def read(path):
    """The values and the tensors of a file."""
    reader = gguf.GGUFReader(path)
    return {key: field.contents() for key, field in reader.fields.items()}, {tensor.name: tensor for tensor in reader.tensors}


def rearranged(config, name, array):
    """A tensor of a folder as GGUF has it."""
    if config["model_type"] == "gpt2" and ".c_" in name and array.ndim == 2:
        return array.T
    if config["model_type"] == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
        D = config["head_dim"]
        return array[[head + half + i for head in range(0, len(array), D) for i in range(D // 2) for half in (0, D // 2)]]
    return array


def check_numbers(tensor, array, kind):
    """A tensor of a file has the numbers of an array, rounded to its type."""
    expected = Type.F32 if array.ndim == 1 else Type.F16 if kind == "q8_0" and array.shape[-1] % 32 else Type[kind.upper()]
    assert tensor.tensor_type == expected and tuple(tensor.shape[::-1]) == array.shape, tensor.name
    found = gguf.dequantize(tensor.data, tensor.tensor_type)
    if expected == Type.Q8_0:  # half a step, and the rounding of its scale to fp16
        largest = np.abs(array.reshape(-1, 32)).max(axis=1, keepdims=True)
        assert (np.abs(found - array).reshape(-1, 32) <= largest * (0.5 / 127 + 2**-11)).all(), tensor.name
    elif expected == Type.BF16:
        assert (np.abs(found - array) <= np.abs(array) * 2**-8).all() and not (found.view(np.uint32) & 0xffff).any(), tensor.name
    else:
        assert (found == array.astype(np.float16 if expected == Type.F16 else np.float32)).all(), tensor.name


def check_tensors(path, config, weights, kind):
    """A file has all weights of a folder. Returns the names of other tensors in it."""
    values, tensors = read(path)
    architecture = values["general.architecture"]
    assert architecture == config["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], values[f"{architecture}.block_count"])
    for theirs, array in weights.items():
        check_numbers(tensors.pop(names.get_name(theirs, (".weight", ".bias"))), rearranged(config, theirs, array), kind)
    return list(tensors)
