#!/usr/bin/env python3
"""A GGUF file, which llama.cpp runs, from a folder in Hugging Face's format.

    python data/to_gguf.py model --out model.gguf --type q8_0

The file has the weights, the tokenizer, the chat template and the tokens that end an answer. The model_type is llama,
qwen2, qwen3, olmo2 or gpt2, the tokenizer a byte-level BPE whose words llama.cpp knows. Vectors become fp32, matrices
--type. With q8_0, a matrix whose rows 32 does not divide becomes fp16.
"""

import json
import math
import pathlib

from modules import need

need("numpy", "tqdm", "gguf", "tokenizers", "xxhash")

import gguf  # noqa: E402
import numpy as np  # noqa: E402
import tokenizers  # noqa: E402

import gguf_names as names  # noqa: E402
import model_folder  # noqa: E402
from chat_template import template_in  # noqa: E402
from model_folder import AGAIN, read_json  # noqa: E402
from terminal import Parser, fail, plain_endings, progress, reason, say  # noqa: E402
from tokenizer_checksum import members  # noqa: E402

Type = gguf.GGMLQuantizationType
TYPES = {"f32": Type.F32, "f16": Type.F16, "bf16": Type.BF16, "q8_0": Type.Q8_0}
FILE_TYPES = {Type.F32: gguf.LlamaFileType.ALL_F32, Type.F16: gguf.LlamaFileType.MOSTLY_F16,
              Type.BF16: gguf.LlamaFileType.MOSTLY_BF16, Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0}
# Parts of files that no model needs: masks, and the angles of rotary positions.
PASSED_OVER = (".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")


class Model:
    """What a folder says, checked."""

    def __init__(self, folder):
        self.folder = folder
        config = read_json(folder / "config.json")
        name = str(config.get("model_type"))
        self.architecture = names.ARCHITECTURES.get(name) or fail(
            f"{folder} has the model_type {name}, but only {names.KNOWN} are written; give another model")
        self.weights = model_folder.Weights(folder)
        self.config = self.complete(config)
        self.tensors = self.find_tensors()

    def refuse(self, what):
        fail(f"{self.folder / 'config.json'}: {what}")

    def complete(self, config):
        """The values of config.json for all keys of the architecture."""
        kind = self.architecture
        self.rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(self.rope, dict):
            self.refuse(f"rope_scaling is {self.rope}; {AGAIN}")
        given = {**kind.defaults, **{key: value for key, value in {**config, **self.rope}.items() if value is not None}}
        for key, value in {**names.FIXED_FOR_ALL, **kind.fixed}.items():
            if given.get(key, value) != value:
                self.refuse(f"{key} is {given[key]}, but GGUF has only {value}; give another model")
        layers = given.get("layer_types", [])
        if not isinstance(layers, list) or any(layer != "full_attention" for layer in layers) or "quantization_config" in given:
            self.refuse("layer_types or quantization_config is given, and GGUF has no such model; give another model")
        self.tied = given.get("tie_word_embeddings", kind.name == "gpt2")
        if kind.name == "gpt2":
            given.setdefault("n_inner", 4 * self.number(given, "n_embd"))
        else:
            H = self.number(given, "num_attention_heads")
            given.setdefault("num_key_value_heads", H)
            given.setdefault("head_dim", self.number(given, "hidden_size") // H)
            if kind.name in ("qwen2", "olmo2") and H * self.number(given, "head_dim") != given["hidden_size"]:
                self.refuse(f"its {H} heads of {given['head_dim']} are not as wide as its {given['hidden_size']} channels, and llama.cpp knows "
                            f"no such {kind.name}; give another model")
        self.original_positions = config.get(names.ORIGINAL) or self.rope.get(names.ORIGINAL) or config.get("max_position_embeddings")
        return {key: self.number(given, key, names.kind_of(name)) for key, name in kind.keys.items()}

    def number(self, given, key, kind=int):
        value = given.get(key, "missing")
        if type(value) not in (int, kind) or not 0 < value < 2**31:
            self.refuse(f"{key} is {value}; {AGAIN}")
        return kind(value)

    def find_tensors(self):
        """[(tensor, its name in the folder)]. Fails if they are not those of the model."""
        # Files of GPT-2 have the prefix or lack it.
        there = {name.removeprefix("transformer."): name for name in self.weights.tensors if not name.endswith(PASSED_OVER)}
        found = []
        for tensor in self.architecture.tensors(self.config, self.tied):
            name = there.pop(tensor.theirs.removeprefix("transformer."), None) or fail(f"{self.folder} has no tensor {tensor.theirs}; {AGAIN}")
            if self.weights.shape(name) != tensor.shape:
                fail(f"{self.folder} has {name} of the shape {self.weights.shape(name)}, but its config.json says {tensor.shape}; {AGAIN}")
            found.append((tensor, name))
        head, table = there.pop(names.HEAD[0], None), found[0][1]
        if there:
            fail(f"{self.folder} has the tensor {min(there)}, which {self.architecture.its_class} does not have; give another model")
        if head and not np.array_equal(self.weights.read(head), self.weights.read(table)):
            fail(f"{self.folder}: {head} differs from {table}, but this model's head shares that table; set "
                 "tie_word_embeddings to false in its config.json")
        return found

    def rope_factors(self):
        """The factors of Llama 3.1's scaling, or None."""
        kind = self.rope.get("rope_type", self.rope.get("type", "default"))
        if kind == "default":
            return None
        if kind != "llama3" or self.architecture.name != "llama":
            self.refuse(f"the rope_type is {kind}, but GGUF has only llama3, for the model_type llama; give another model")
        try:
            scaling = {**self.rope, names.ORIGINAL: self.original_positions}
            return names.rope_factors(scaling, self.config["rope_theta"], self.config["head_dim"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            self.refuse(f"the scaling of rotary positions is {self.rope}, which is not Llama 3.1's; {AGAIN}")


class Tokenizer:
    """What GGUF says of a folder's tokenizer."""

    def __init__(self, model):
        self.path, self.model = model.folder / "tokenizer.json", model
        read_json(self.path)  # fails if there is none
        try:
            self.json = json.loads(tokenizers.Tokenizer.from_file(str(self.path)).to_str())  # which has all the keys
        except Exception as error:  # the library raises nothing more specific
            fail(f"{self.path} is damaged ({reason(error)}); {AGAIN}")
        bpe = self.json["model"]
        if bpe["type"] != "BPE" or bpe["byte_fallback"] or bpe["continuing_subword_prefix"] or bpe["end_of_word_suffix"]:
            self.refuse("is not a byte-level BPE")
        self.added = {token["id"]: token for token in self.json["added_tokens"]}
        self.texts = {id: text for text, id in bpe["vocab"].items()} | {id: token["content"] for id, token in self.added.items()}
        if (last := max(self.texts, default=0)) >= model.config["vocab_size"]:
            fail(f"{self.path} has the token {last}, but the model has only {model.config['vocab_size']}; {AGAIN}")
        if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in self.added.values()):
            self.refuse("has added tokens that take spaces or words around them (lstrip, rstrip, single_word)")
        self.pre = self.find_pre()

    def refuse(self, what):
        fail(f"{self.path} {what}, which llama.cpp would compute in another way; give another model")

    def find_pre(self):
        words = names.Words(list(self.patterns()), self.has_nfc(), self.json["model"]["ignore_merges"])
        for pre, known in names.PRE.items():
            if (known.patterns, known.nfc, known.ignore_merges) == (words.patterns, words.nfc, words.ignore_merges):
                return pre
        self.refuse(f"splits text into words by {words.patterns}{' after NFC' * words.nfc}{' with ignore_merges' * words.ignore_merges}")

    def has_nfc(self):
        kinds = [step["type"] for step in members(self.json["normalizer"], "normalizers")]
        if kinds not in ([], ["NFC"]):
            self.refuse(f"normalises text by {', '.join(kinds)}")
        return bool(kinds)

    def patterns(self):
        """The patterns by which text is split. The last step makes bytes."""
        steps = members(self.json["pre_tokenizer"], "pretokenizers")
        if not steps or steps[-1]["type"] != "ByteLevel":
            self.refuse("is not a byte-level BPE")
        for step in steps:
            kind = step["type"]
            if kind == "Split" and "Regex" in step["pattern"] and step["behavior"] == "Isolated" and not step["invert"]:
                yield step["pattern"]["Regex"]
            elif kind == "Digits" and step["individual_digits"]:
                yield names.DIGITS
            elif kind == "ByteLevel" and not step["add_prefix_space"]:
                if step["use_regex"]:
                    yield names.GPT2_WORDS
            else:
                self.refuse(f"has the step {step}")

    def begin(self):
        """The token that the post-processor puts before a text, or None."""
        steps = [step for step in members(self.json["post_processor"], "processors") if step["type"] != "ByteLevel"]
        single = steps[0].get("single", []) if steps else [{"Sequence": "A"}]
        parts = [next(iter(part)) for part in single]
        if parts == ["Sequence"]:
            return None
        if parts != ["SpecialToken", "Sequence"] or len(steps) > 1:
            self.refuse("puts other tokens around a text than one before it")
        ids = steps[0]["special_tokens"].get(single[0]["SpecialToken"]["id"], {}).get("ids", [])
        return ids[0] if ids and ids[0] in self.texts else fail(f"{self.path} puts an unknown token before a text; {AGAIN}")

    def write(self, writer):
        size = self.model.config["vocab_size"]
        kinds = {id: names.CONTROL if token["special"] else names.USER_DEFINED for id, token in self.added.items()}
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list([self.texts.get(id, f"[PAD{id}]") for id in range(size)])
        writer.add_token_types([kinds.get(id, names.NORMAL if id in self.texts else names.UNUSED) for id in range(size)])
        writer.add_token_merges([" ".join(merge) for merge in self.json["model"]["merges"]])
        for key, id in self.named_tokens():
            writer.add_uint32(key, id)
        writer.add_add_bos_token(self.begin() is not None)
        if (template := template_in(self.model.folder)) is not None:
            writer.add_chat_template(template)

    def named_tokens(self):
        """(key, id) of the begin token, the end tokens and the one that pads."""
        begins, ends, pads = (model_folder.token_ids(self.model.folder, f"{name}_token_id") for name in ("bos", "eos", "pad"))
        if not ends:
            say(f"note: {self.model.folder} names no end token (eos_token_id), so answers will not end")
        if len(ends) > len(names.END_KEYS):
            say(f"note: GGUF has keys for {len(names.END_KEYS)} end tokens; left out are {ends[len(names.END_KEYS):]}")
        begins = begins if self.begin() is None else [self.begin()]
        for key, id in [*zip([names.BEGIN_KEY], begins), *zip(names.END_KEYS, ends), *zip([names.PAD_KEY], pads)]:
            yield (key, id) if id in self.texts else model_folder.refuse_token(self.model.folder, id)


def stored_type(shape, kind):
    if len(shape) == 1:
        return Type.F32
    return Type.F16 if kind == Type.Q8_0 and shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] else kind


def quantized(array, kind, name):
    if not np.isfinite(array).all():
        fail(f"{name} is not finite; {AGAIN}")
    with np.errstate(over="ignore"):
        stored = gguf.quants.quantize(np.ascontiguousarray(array), kind)
    if kind == Type.F16 and not np.isfinite(stored).all():
        fail(f"{name} has numbers that fp16 does not hold; give --type bf16 or f32")
    return stored


def convert(folder, out, kind):
    """Makes the file `out`."""
    model_folder.fail_if_there(out)
    model = Model(folder)
    tokenizer, factors = Tokenizer(model), model.rope_factors()
    with model_folder.partial(out) as path:
        writer = gguf.GGUFWriter(path, model.architecture.name)
        try:
            write(writer, model, tokenizer, factors, kind)
        finally:
            writer.close()
    say(f"{out}: {out.stat().st_size:,} bytes")


def write(writer, model, tokenizer, factors, kind):
    writer.add_type("model")
    writer.add_name(model.folder.resolve().name)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    values = {name: model.config[key] for key, name in model.architecture.keys.items()}
    if "head_dim" in model.config:
        values |= dict.fromkeys(names.HEAD_SIZES, model.config["head_dim"])
    for name, value in values.items():
        add = writer.add_float32 if type(value) is float else writer.add_uint32
        add(f"{model.architecture.name}.{name}", value)
    tokenizer.write(writer)
    if factors is not None:
        writer.add_tensor_info(names.ROPE_FACTORS, factors.shape, factors.dtype, factors.nbytes)
    for tensor, _ in model.tensors:
        stored = stored_type(tensor.gguf_shape, kind)
        shape = gguf.quant_shape_to_byte_shape(tensor.gguf_shape, stored)
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    with progress("converting", " weights", sum(math.prod(tensor.shape) for tensor, _ in model.tensors)) as bar:
        for tensor, name in model.tensors:
            array = tensor.to_gguf(model.weights.read(name))
            writer.write_tensor_data(quantized(array, stored_type(tensor.gguf_shape, kind), name))
            bar.update(math.prod(tensor.shape))


def main():
    parser = Parser(__doc__)
    parser.add_argument("folder", type=pathlib.Path, metavar="FOLDER", help="folder in Hugging Face's format")
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE", help="make this file")
    parser.add_argument("--type", choices=TYPES, default="f16", help="store matrices in this format (default: f16)")
    arguments = parser.parse_args()
    with plain_endings("begins again"):
        convert(arguments.folder, arguments.out, TYPES[arguments.type])


if __name__ == "__main__":
    main()
