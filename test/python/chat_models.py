"""Small models with a tokenizer and a chat template, and what the program has to answer: the template's own text, encoded by
PyPI's `tokenizers`, and the likeliest token after it."""

import json
import pathlib

import numpy as np

import made_tokenizers
import model_folders
import program

import chat_format
import chat_template
import tokenizer_checksum

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
IM_START, IM_END = 1, 2
CHATML = ("{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
          "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
# White space around messages is left out, and a text begins with bos_token.
TRIMMED = ("{{ bos_token }}{% for message in messages %}{{ '[' + message.role + ']' + message.content | trim + '<|im_end|>' }}{% endfor %}"
           "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}")
DATE = "2024-07-26"
QUIET = ["--temperature=0", "--dtype=fp32"]


def write(folder, template=CHATML, tokens=None, generation_config=None, with_format=True, **config):
    """The folder of a Llama with random weights, which never says a special token, and only `tokens` if two ids are given. `config`
    replaces entries of config.json."""
    parts = made_tokenizers.made("llama3", SPECIAL, size=330, post_processor=made_tokenizers.begins_with("<s>", 3))
    size = len(parts["model"]["vocab"])
    config = {**model_folders.LLAMA, "vocab_size": size, "max_position_embeddings": 256, **config}
    # Larger matrices than at the beginning of training, so that the likeliest token leads.
    weights = {name: array if "norm" in name else 3.5 * array for name, array in model_folders.weights_of(config).items()}
    head = weights["lm_head.weight"]
    head[:len(SPECIAL)] = 0
    if tokens:  # of two opposite rows one gives a positive logit
        first, second = tokens
        row = head[first].copy()
        head[:] = 0
        head[first], head[second] = row, -row
    model_folders.write(folder, config, weights)
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "<|im_end|>"}
    if template:
        settings["chat_template"] = template
    made_tokenizers.write(folder, parts, tokenizer_config=settings)
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    if with_format:
        found = chat_format.find(template, {"bos_token": "<s>"}, DATE, chat_template.Renderer)
        (folder / "chat_format.json").write_text(json.dumps(found))
    return folder


def chat(folder, lines, *options, check=True, **how):
    """The program's CompletedProcess for these lines of input."""
    return program.run("--chat", f"--init={folder}", *QUIET, *options, check=check, input="".join(f"{line}\n" for line in lines), **how)


def shown(answer):
    """Bytes as the program writes them."""
    text = answer.decode(errors="replace")
    return "".join("\ufffd" if ord(c) < 32 and c not in "\n\t" or 0x7F <= ord(c) < 0xA0 else c for c in text)


class Reference:
    """What the program should answer, turn by turn, and how many rows it has to compute for it."""

    def __init__(self, folder, context, most=None, system=None, ends=()):
        from tokenizers import Tokenizer
        self.folder, self.context, self.most, self.ends = pathlib.Path(folder), context, most or context, ends
        self.encoder = Tokenizer.from_file(str(self.folder / "tokenizer.json"))
        parts = json.loads((self.folder / "tokenizer.json").read_text())
        self.bytes_of = {**{id: tokenizer_checksum.bytes_of(token) for token, id in parts["model"]["vocab"].items()},
                         **{added["id"]: added["content"].encode() for added in parts["added_tokens"]}}
        settings = json.loads((self.folder / "tokenizer_config.json").read_text())
        self.renderer = chat_template.Renderer(settings["chat_template"], {"bos_token": "<s>"}, DATE)
        self.system = [{"role": "system", "content": system}] * (system is not None)
        self.turns, self.kept, self.answers = [], [], []
        # Without a tokenizer, prompts and texts are ids. Nothing ends them.
        self.plain = self.folder.with_name(self.folder.name + "-plain")
        self.plain.mkdir(exist_ok=True)
        config = json.loads((self.folder / "config.json").read_text())
        (self.plain / "config.json").write_text(json.dumps({**config, "eos_token_id": None}))
        (self.plain / "model.safetensors").unlink(missing_ok=True)
        (self.plain / "model.safetensors").symlink_to(self.folder / "model.safetensors")

    def ids(self, turns):
        (text, _), = self.renderer.render((self.system + turns, True, None))
        return self.encoder.encode(text, add_special_tokens=False).ids

    def likeliest(self, prompt, count):
        """The next tokens, from --generate."""
        said = program.run("--generate", f"--init={self.plain}", *QUIET, f"--seq-len={self.context}", f"--sample-tokens={count}",
                           f"--prompt={' '.join(map(str, prompt))}").stdout
        return list(map(int, said.split()))[len(prompt):]

    def answer(self, message):
        """(text, tokens of the prompt, tokens of the answer, rows that are computed)."""
        self.turns.append({"role": "user", "content": message})
        room = self.context - min(self.most, self.context // 4)
        while len(prompt := self.ids(self.turns)) > room and len(self.turns) > 1:
            del self.turns[:2]
        count = min(self.most, self.context - len(prompt))
        after = self.likeliest(prompt, count)
        length = next((i for i, token in enumerate(after) if token in self.ends), count)
        answer = after[:length]
        known = int(np.argmin([*(a == b for a, b in zip(prompt[:-1], self.kept)), False]))
        # The last token of an answer that is cut has no row yet.
        computed = [*prompt, *answer][:None if length < count else -1]
        self.kept = computed
        said = b"".join(map(self.bytes_of.get, answer))
        self.turns.append({"role": "assistant", "content": said.decode(errors="replace")})
        text = shown(said)
        self.answers.append((text if text.endswith("\n") else text + "\n", len(prompt), length, len(computed) - known))
        return self.answers[-1]
