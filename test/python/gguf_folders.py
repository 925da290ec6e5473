"""Folders in Hugging Face's format with random weights and a byte-level BPE that is trained here, for the tests of
data/from_gguf.py and data/to_gguf.py."""

import json
import runpy
import sys

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import dataset_scripts
import model_folders
import program

# A model has more rows than its tokenizer has tokens. The rows of some matrices are no multiple of 32.
TOKENS, ROWS = 380, 400
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
CONFIGS = {name: {**model_folders.CONFIGS[name], "vocab_size": ROWS} for name in ("llama", "qwen2", "qwen3", "olmo2", "gpt2")}
CONFIGS["llama"]["head_dim"] = CONFIGS["qwen3"]["head_dim"] = 20
CONFIGS["llama 3.1"] = {**CONFIGS["llama"], "rope_scaling": LLAMA31, "max_position_embeddings": 131072, "tie_word_embeddings": True}
BEGIN, END, TURN, THOUGHT = "<|begin|>", "<|end|>", "<|turn|>", "<think>"
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


def write(folder, config, made=None, weights=None, shards=1):
    """Writes the folder; returns its weights and its tokenizer."""
    made = made or tokenizer()
    weights = model_folders.write(folder, config, weights, shards)
    made.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", {"chat_template": TEMPLATE}),
                          ("generation_config.json", {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 1})):
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
