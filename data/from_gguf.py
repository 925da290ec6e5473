#!/usr/bin/env python3
"""A folder in Hugging Face's format, from a model in a GGUF file.

    python data/from_gguf.py model.gguf --out model

The folder has the weights in fp32, the tokenizer, the chat template and the tokens that end an answer. The architecture
is llama, qwen2, qwen3, olmo2 or gpt2, the tokenizer a byte-level BPE. Quantized weights are those that PyPI's gguf
knows: Q4_0, Q4_1, Q8_0, the K types and others.
"""

import json
import math
import pathlib

from modules import need

need("numpy", "tqdm", "gguf", "tokenizers")

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402

import gguf_names as names  # noqa: E402
import model_folder  # noqa: E402
from terminal import Parser, fail, plain_endings, progress, reason, say  # noqa: E402

MOST_VALUES = 1 << 22  # in an array, which is the tokens or the merges


class Reader(gguf.GGUFReader):
    """Refuses what a damaged file says, before it takes time and memory."""

    def _get(self, offset, dtype, count=1, override_order=None):
        if count < 0 or offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
            raise ValueError("it ends too early")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type == gguf.GGUFValueType.ARRAY and self._get(orig_offs + 4, np.uint64)[0] > MOST_VALUES:
            raise ValueError("an array is too long")
        return super()._get_field_parts(orig_offs, raw_type)


class Model:
    """What a GGUF file says, checked."""

    def __init__(self, path):
        self.path = path
        try:
            reader = Reader(path)
            self.values = {key: field.contents() for key, field in reader.fields.items()}
        except OSError as error:
            fail(f"cannot read {path}: {reason(error)}")
        except Exception as error:  # what the library raises depends on the damage
            self.refuse(f"is damaged, or not a GGUF file ({reason(error)})")
        if reader.byte_order != "I" or self.values.get("split.count", 1) != 1:
            fail(f"{path} is big-endian, or one of several parts; give a whole file (llama-gguf-split --merge)")
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        name = str(self.values.get("general.architecture"))
        self.architecture = names.ARCHITECTURES.get(name) or fail(
            f"{path} has the architecture {name}, but only {names.KNOWN} are read; give another model")
        self.check_types()
        self.config = self.make_config()
        self.weights = self.find_weights()

    def refuse(self, what):
        fail(f"{self.path} {what}; get it again")

    def check_types(self):
        for kind in {found.tensor_type for found in self.tensors.values()}:
            try:
                gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                fail(f"{self.path} has weights of the type {kind.name}, which PyPI's gguf does not convert; give a file of another type")

    def number(self, key, kind, default=None):
        """A number above 0."""
        value = self.values.get(f"{self.architecture.name}.{key}", default)
        if value is None:
            self.refuse(f"has no {self.architecture.name}.{key}")
        if type(value) is not kind or not 0 < value < 2**31:
            self.refuse(f"has the {self.architecture.name}.{key} {str(value)[:40]}")
        # 1e-5 is stored as the fp32 number 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind is float else value

    def make_config(self):
        kind, keys = self.architecture, self.architecture.keys
        embedding = self.tensors.get("token_embd.weight") or self.refuse("has no tensor token_embd.weight")
        defaults = {"vocab_size": len(np.atleast_1d(embedding.data))}
        if kind.name != "gpt2":
            H = self.number("attention.head_count", int)
            defaults |= {"attention.head_count_kv": H, "attention.key_length": self.number("embedding_length", int) // H,
                         "rope.freq_base": 1e4}
        config = {"architectures": [kind.its_class], "model_type": kind.name}
        for key, name in keys.items():
            config[key] = self.number(name, names.kind_of(name), defaults.get(name))
        config |= {"tie_word_embeddings": "output.weight" not in self.tensors, **kind.fixed, "torch_dtype": "float32"}
        if kind.name != "gpt2":
            config["rope_scaling"] = self.rope_scaling(config)
        return config

    def rope_scaling(self, config):
        D, kind = config["head_dim"], self.values.get(f"{self.architecture.name}.rope.scaling.type", "none")
        if D % 2 or any(self.number(key, int, D) != D for key in names.HEAD_SIZES):
            fail(f"{self.path} has heads of several sizes, or rotates a part of them, which is not computed; give another model")
        if kind != "none":
            fail(f"{self.path} has {kind} scaling of rotary positions, but only Llama 3.1's is computed; give another model")
        if names.ROPE_FACTORS not in self.tensors or self.architecture.name != "llama":
            return None
        factors = self.read(names.ROPE_FACTORS)
        scaling = {**names.LLAMA3, "factor": max(1.0, float(factors.max()))}
        if factors.shape != (D // 2,) or not np.allclose(factors, names.rope_factors(scaling, config["rope_theta"], D), rtol=1e-5, atol=0):
            fail(f"{self.path} has other factors in {names.ROPE_FACTORS} than Llama 3.1's scaling of a context of "
                 f"{scaling[names.ORIGINAL]:,} tokens, which is not computed; give another model")
        return scaling

    def find_weights(self):
        """The tensors of the folder, by their names in it. Fails if they are not those of the model."""
        weights, expected = {}, {names.ROPE_FACTORS} if self.config.get("rope_scaling") else set()
        for tensor in self.architecture.tensors(self.config, self.config["tie_word_embeddings"]):
            found = self.tensors.get(tensor.name) or self.refuse(f"has no tensor {tensor.name}")
            if (shape := tuple(map(int, found.shape[::-1]))) != tensor.gguf_shape:
                self.refuse(f"has {tensor.name} of the shape {shape}, not {tensor.gguf_shape}")
            weights[tensor.theirs] = tensor
            expected.add(tensor.name)
        if strange := self.tensors.keys() - expected:
            fail(f"{self.path} has the tensor {min(strange)}, which {self.architecture.its_class} does not have; give another model")
        return weights

    def read(self, name):
        tensor = self.tensors[name]
        with np.errstate(all="ignore"):
            array = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if not np.isfinite(array).all():
            self.refuse(f"has numbers in {name} that are not finite")
        return array

    def weight(self, theirs):
        tensor = self.weights[theirs]
        return tensor.from_gguf(self.read(tensor.name))


class Tokenizer:
    """The tokenizer of a model, as the folder's files have it."""

    def __init__(self, model):
        self.model, self.values = model, model.values
        kind, pre = (str(self.values.get(f"tokenizer.ggml.{key}")) for key in ("model", "pre"))
        if kind != "gpt2":
            fail(f"{model.path} has a tokenizer of the kind {kind}, but only byte-level BPE (gpt2) is read; give another model")
        if pre not in names.PRE:
            fail(f"{model.path} has the tokenizer.ggml.pre {pre}, but only {', '.join(names.PRE)} are read; give another model")
        if self.values.get("tokenizer.ggml.add_eos_token"):
            fail(f"{model.path} has a tokenizer that appends the end token (add_eos_token); give a model that generates text")
        self.words = names.PRE[pre]
        self.tokens, self.types = (self.texts(key, kind) for key, kind in (("tokens", str), ("token_type", int)))
        if len(self.types) != len(self.tokens) or len(self.tokens) > model.config["vocab_size"]:
            model.refuse(f"has {len(self.tokens)} tokens of {len(self.types)} types for a vocabulary of {model.config['vocab_size']}")
        self.begin = self.token(names.BEGIN_KEY)
        self.ends = list(dict.fromkeys(id for id in map(self.token, names.END_KEYS) if id is not None))
        self.pad = self.token(names.PAD_KEY)
        self.begins = bool(self.values.get("tokenizer.ggml.add_bos_token", self.words.begins)) and self.begin is not None
        self.json = self.make_json()
        self.check()

    def texts(self, name, kind):
        values = self.values.get(f"tokenizer.ggml.{name}")
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            self.model.refuse(f"has no tokenizer.ggml.{name}")
        return values

    def token(self, key):
        id = self.values.get(key)
        if id is not None and (type(id) is not int or not 0 <= id < len(self.tokens)):
            self.model.refuse(f"has the {key} {id}, which is none of its {len(self.tokens)} tokens")
        return id

    def make_json(self):
        added = [{"id": id, "content": self.tokens[id], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                  "special": kind != names.USER_DEFINED}
                 for id, kind in enumerate(self.types) if kind in (names.CONTROL, names.UNKNOWN, names.USER_DEFINED)]
        vocabulary = {token: id for id, (token, kind) in enumerate(zip(self.tokens, self.types)) if kind != names.UNUSED}
        if len(vocabulary) + self.types.count(names.UNUSED) != len(self.tokens):
            self.model.refuse("has a token twice")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                 "fuse_unk": False, "byte_fallback": False, "ignore_merges": self.words.ignore_merges, "vocab": vocabulary,
                 "merges": [merge.split(" ") for merge in self.texts("merges", str)]}
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
                "normalizer": {"type": "NFC"} if self.words.nfc else None, "pre_tokenizer": self.pre_tokenizer(byte_level),
                "post_processor": self.post_processor(byte_level), "decoder": byte_level, "model": model}

    def pre_tokenizer(self, byte_level):
        *others, last = self.words.patterns
        has_gpt2 = last == names.GPT2_WORDS  # ByteLevel's own
        steps = [{"type": "Digits", "individual_digits": True} if pattern == names.DIGITS else
                 {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
                 for pattern in (others if has_gpt2 else self.words.patterns)]
        steps.append({**byte_level, "use_regex": has_gpt2})
        return {"type": "Sequence", "pretokenizers": steps} if len(steps) > 1 else steps[0]

    def post_processor(self, byte_level):
        if not self.begins:
            return {**byte_level, "trim_offsets": False}
        text = self.tokens[self.begin]
        begin, (first, second) = {"SpecialToken": {"id": text, "type_id": 0}}, ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        return {"type": "TemplateProcessing", "single": [begin, first], "pair": [begin, first, begin, second],
                "special_tokens": {text: {"id": text, "ids": [self.begin], "tokens": [text]}}}

    def check(self):
        """Fails if the library does not take the tokenizer, or numbers its tokens in another way."""
        try:
            made = tokenizers.Tokenizer.from_str(json.dumps(self.json))
        except Exception as error:  # the library raises nothing more specific
            self.model.refuse(f"has a damaged tokenizer ({reason(error)})")
        if any(made.token_to_id(token["content"]) != token["id"] for token in self.json["added_tokens"]):
            self.model.refuse("has a damaged tokenizer (its special tokens have other ids)")

    def files(self):
        """{name: content} of the files beside the weights and config.json."""
        ids = {"bos_token_id": self.begin, "eos_token_id": self.ends[0] if len(self.ends) == 1 else self.ends or None, "pad_token_id": self.pad}
        ids = {key: id for key, id in ids.items() if id is not None}
        named = {"bos_token": self.begin, "eos_token": self.ends[0] if self.ends else None, "pad_token": self.pad}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": self.begins, "clean_up_tokenization_spaces": False,
                    "model_max_length": self.model.config[self.model.architecture.key_of("context_length")],
                    **{key: self.tokens[id] for key, id in named.items() if id is not None}}
        if isinstance(template := self.values.get("tokenizer.chat_template"), str):
            settings["chat_template"] = template
        return {"config.json": self.model.config | ids, "generation_config.json": ids, "tokenizer.json": self.json,
                "tokenizer_config.json": settings}


def convert(path, out):
    """Makes the folder `out`."""
    model_folder.fail_if_there(out)
    model = Model(path)
    files = Tokenizer(model).files()
    shapes = {name: tensor.shape for name, tensor in model.weights.items()}
    with model_folder.partial(out) as folder, progress("converting", " weights", sum(map(math.prod, shapes.values()))) as bar:
        folder.mkdir()

        def read(name):
            bar.update(math.prod(shapes[name]))
            return model.weight(name)

        for name, content in files.items():
            model_folder.write_json(folder / name, content)
        model_folder.write_weights(folder, shapes, read)
    say(f"{out}: {model.architecture.its_class} with {sum(map(math.prod, shapes.values())):,} weights")


def main():
    parser = Parser(__doc__)
    parser.add_argument("file", type=pathlib.Path, metavar="FILE", help="GGUF file")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="make this folder")
    arguments = parser.parse_args()
    with plain_endings("begins again"):
        convert(arguments.file, arguments.out)


if __name__ == "__main__":
    main()
