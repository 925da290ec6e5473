"""SmolLM2 from PyPI as a folder and as a GGUF file: its answer, its log-probabilities, and what llama.cpp computes from the files
that data/to_gguf.py writes. And llama.cpp on small random models of all architectures, and with all words of tokenizers."""

import json
import subprocess
import sys
import unicodedata

import numpy as np
import pytest

pytest.importorskip("gguf", reason="PyPI's gguf is not installed; `make deps` installs it")
tokenizers = pytest.importorskip("tokenizers", reason="PyPI's tokenizers is not installed; `make deps` installs it")
jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed; `make deps` installs it")

import dataset_scripts  # noqa: E402
import gguf_folders  # noqa: E402
import model_folders  # noqa: E402
import program  # noqa: E402
import safetensors_numpy  # noqa: E402
import smollm2_folder  # noqa: E402
import test_gguf  # noqa: E402

LLAMA_CPP = "xllamacpp==2026.10.11549"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
# Of the first token after the question, computed in fp64 with NumPy.
LOG_PROBABILITIES = {504: -1.8827, 60: -1.9648}
# llama.cpp: at each step the token that it chooses, and the most likely ones, [[[id, log-probability], ..], ..], and the text, for
# each prompt. By default it rounds keys and values to fp16; here it does not. It chooses from the tokens that are not banned.
COMPLETE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import xllamacpp as x
p = x.CommonParams()
p.model.path, p.n_ctx, p.n_parallel, p.cpuparams.n_threads = sys.argv[2], 128, 1, 2
p.cache_type_k = p.cache_type_v = x.ggml_type.GGML_TYPE_F32
p.cache_prompt = False
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server, results = x.Server(p), []
for prompt in json.loads(sys.argv[3]):
    answer = server.handle_completions({"prompt": prompt, "max_tokens": int(sys.argv[4]), "temperature": 0, "logprobs": 3,
                                        "logit_bias": [[id, False] for id in json.loads(sys.argv[5])]})
    choice = (answer if isinstance(answer, dict) else json.loads(answer))["choices"][0]
    steps = [[(token["id"], token["logprob"]) for token in [step, *step["top_logprobs"]]] for step in choice["logprobs"]["content"]]
    results.append((steps, choice["text"]))
print("\\n" + json.dumps(results), flush=True)
"""


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    """Returns complete(file, prompts, tokens, banned)."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, LLAMA_CPP]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"pip cannot install {LLAMA_CPP}: {installed.stderr.strip().splitlines()[-1:]}")

    def complete(file, prompts, tokens=1, banned=()):
        command = [sys.executable, "-c", COMPLETE, folder, file, json.dumps(prompts), str(tokens), json.dumps(banned)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300 * program.PATIENCE)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return complete


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smollm2_folder.make(tmp_path_factory)


@pytest.fixture(scope="module")
def question(folder):
    """The question in the model's template: its text and its tokens."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(settings["chat_template"])
    text = template.render(messages=[{"role": "user", "content": QUESTION}], add_generation_prompt=True)
    return text, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids


class LogProbabilities:
    """Those that the program computes in fp32. The loss of a window is the mean of its tokens' losses, so the loss of one more
    token is a difference."""

    def __init__(self, folder, place):
        self.folder, self.place, self.known = folder, place, {}

    def of_all(self, tokens):
        if tuple(tokens) not in self.known:
            count, out = len(tokens) - 1, self.place / f"run-{len(self.known)}"
            program.write_token_file(self.place / "tokens.bin", tokens)
            program.run(f"--init={self.folder}", "--steps=0", f"--val-data={self.place / 'tokens.bin'}", f"--seq-len={count}",
                        f"--global-batch-tokens={count}", "--dtype=fp32", "--sample-tokens=0", f"--out-dir={out}")
            self.known[tuple(tokens)] = -count * program.Run(out).lines[-1]["val_loss"]
        return self.known[tuple(tokens)]

    def of_next(self, tokens, token):
        return self.of_all([*tokens, token]) - self.of_all(tokens)

    def check(self, tokens, steps):
        """llama.cpp's log-probabilities are ours: of the most likely tokens of the first step, and of the chosen ones."""
        pairs = []
        for number, step in enumerate(steps):
            pairs += [(value, self.of_next(tokens, token)) for token, value in (step if number == 0 else step[:1])]
            tokens = [*tokens, step[0][0]]
        print("llama.cpp's and ours:", *(f"{theirs:.4f} {ours:.4f}," for theirs, ours in pairs))
        assert max(abs(theirs - ours) for theirs, ours in pairs) < 2e-3


def unprintable(made):
    """The tokens that are no ASCII text. For half a character llama.cpp gives no log-probabilities."""
    return [id for id in range(gguf_folders.ROWS) if not (text := made.decode([id])).isascii() or not text.isprintable() or text == ""]


def to_gguf(folder, file, kind):
    dataset_scripts.run("to_gguf.py", folder, "--out", file, "--type", kind)
    return file


def test_answer_and_log_probabilities(folder, question, tmp_path):
    _, tokens = question
    for name in ("config.json", "model.safetensors"):  # without a tokenizer, prompts are ids
        (tmp_path / name).symlink_to(folder / name)
    said = program.run("--generate", f"--init={tmp_path}", "--dtype=fp32", "--temperature=0", "--sample-tokens=8",
                       f"--prompt={' '.join(map(str, tokens))}").stdout
    answer = list(map(int, said.split()))[len(tokens):]
    text = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).decode(answer, skip_special_tokens=False)
    assert text.partition("<|im_end|>")[0] == ANSWER, text
    ours = LogProbabilities(folder, tmp_path)
    found = {token: ours.of_next(tokens, token) for token in LOG_PROBABILITIES}
    print(*(f"token {token}: {value:.4f}" for token, value in found.items()))
    assert found == pytest.approx(LOG_PROBABILITIES, abs=1e-3)


def test_llama_cpp_computes_our_log_probabilities(folder, question, tmp_path, llama_cpp):
    text, tokens = question
    file = to_gguf(folder, tmp_path / "f32.gguf", "f32")
    (steps, answer), (steps_of_text, answer_of_text) = llama_cpp(file, [tokens, text], 8)
    assert answer == answer_of_text == ANSWER and steps == steps_of_text
    LogProbabilities(folder, tmp_path).check(tokens, steps)
    file.unlink()


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
def test_llama_cpp_answers_from_rounded_weights(kind, folder, question, tmp_path, llama_cpp):
    file = to_gguf(folder, tmp_path / f"{kind}.gguf", kind)
    weights = safetensors_numpy.load(folder / "model.safetensors")
    assert gguf_folders.check_tensors(file, json.loads((folder / "config.json").read_text()), weights, kind) == []
    _, answer = llama_cpp(file, [question[1]], 12)[0]
    print(kind, answer)
    assert len(answer.split()) >= 3
    file.unlink()


@pytest.mark.parametrize("name", gguf_folders.CONFIGS)
def test_llama_cpp_computes_each_architecture(name, tmp_path, llama_cpp):
    config = gguf_folders.CONFIGS[name]
    # Larger matrices than at the beginning of training, so that each position matters.
    weights = {key: (array * 2 if array.ndim == 2 else array).astype(np.float32) for key, array in model_folders.weights_of(config).items()}
    _, made = gguf_folders.write(tmp_path / "a", config, weights=weights, ends=())
    tokens = made.encode("Train a model in three commands, then 1234 of them.").ids
    for kind in ("f32", "q8_0"):
        (steps, _), = llama_cpp(to_gguf(tmp_path / "a", tmp_path / f"{kind}.gguf", kind), [tokens], 3, unprintable(made))
        if kind == "f32":
            LogProbabilities(tmp_path / "a", tmp_path).check(tokens, steps)


@pytest.mark.parametrize("pre", test_gguf.WORDS)
def test_llama_cpp_splits_text_as_we_do(pre, tmp_path, llama_cpp):
    """A text as a prompt gives what its tokens give."""
    _, made = gguf_folders.write(tmp_path / "a", gguf_folders.CONFIGS["qwen2"], gguf_folders.tokenizer(**test_gguf.WORDS[pre][0]), ends=())
    texts = [*test_gguf.TEXTS, test_gguf.SENTENCE, "x 12345  67\n\n\n  'S can't  \t东京ÀÉ!?\r\nend "]
    texts = [text for text in texts if text == unicodedata.normalize("NFC", text) != ""]  # llama.cpp normalises no text
    tokens = [made.encode(text).ids for text in texts]
    results = llama_cpp(to_gguf(tmp_path / "a", tmp_path / "a.gguf", "f32"), [*texts, *tokens], 1, unprintable(made))
    assert results[:len(texts)] == results[len(texts):]
