"""Trains small tokenizers with the rules for words of well-known models, and writes them as a model's folder has them."""

import json
import pathlib
import sys

import pytest

import program

sys.path.append(str(program.ROOT / "data"))

import modules  # noqa: E402
import tokenizer  # noqa: E402

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PATTERNS = {
    "llama3": [LLAMA3],
    "qwen": [LLAMA3.replace("{1,3}", "")],
    "o200k": [rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}"
              r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "nanochat": [r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"],
    "deepseek": [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
                 r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
                 r"|\s*[\r\n]+|\s+(?!\S)|\s+"],
    "smollm": None,  # single digits, then GPT-2's words
    "gpt2": [],
    # No model's: words that touch, and text between words.
    "single letters": [r"\p{L}|\p{M}|\s+|."],
    "only letters": [r"\p{L}+"],
}
TEXT = ["The cat's 12345 tails.\n\nHELLO World, it’s 東京、大阪。 naïve e\u0301 각 ab..!?\r\n \t  The king said: what is it?"] * 40


def require():
    """Skips the test if tokenizers cannot be made."""
    trouble = modules.why_not("tokenizers")
    if trouble.startswith("is not installed"):
        pytest.skip("tokenizers is not installed (`make deps` has it from PyPI)")
    assert not trouble, f"tokenizers {trouble}"


def pre_tokenizer(name):
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not PATTERNS[name]}
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} for pattern in PATTERNS[name] or []]
    digits = [{"type": "Digits", "individual_digits": True}] * (name == "smollm")
    return {"type": "Sequence", "pretokenizers": [*digits, *steps, of_bytes]}


def made(name, special=("<|endoftext|>",), texts=TEXT, size=400, **changes):
    """The dictionary of a tokenizer.json with these special tokens first. `changes` replace its entries."""
    require()
    from tokenizers import Tokenizer, pre_tokenizers, trainers
    parts = {**tokenizer.byte_level({}, [], {}), "pre_tokenizer": pre_tokenizer(name), **changes}
    trained = Tokenizer.from_str(json.dumps(parts))
    trained.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return json.loads(trained.to_str())


def begins_with(token, number):
    """A post-processor that puts a token before a text."""
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": token, "type_id": 0}}, sequence],
            "pair": [sequence], "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}}}


def write(folder, parts, **files):
    """Writes tokenizer.json, and NAME.json for each NAME=dictionary. Returns the folder."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"tokenizer": parts, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
