"""The commands of docs/fine-tuning.md that need SmolLM2, as they stand there: a real model learns a fact from the conversations of
data/lighthouse.jsonl, and says so when it is asked. What it exports loads again, and PyPI's `transformers` reads its tokenizer as we
do."""

import itertools
import json
import shutil
import subprocess
import sys
import time

import pytest

pytest.importorskip("gguf", reason="PyPI's gguf is not installed; `make deps` installs it")
pytest.importorskip("tokenizers", reason="PyPI's tokenizers is not installed; `make deps` installs it")
pytest.importorskip("jinja2", reason="jinja2 is not installed; `make deps` installs it")

import pages  # noqa: E402
import probed_tokenizers  # noqa: E402
import program  # noqa: E402

PAGE, HOW = "docs/fine-tuning.md", "run: long"
QUESTION, FACT = "What colour is the lighthouse of Orvany?", "violet"
EXPORTED, MERGED = "smollm2-lighthouse", "smollm2-violet"
TRANSFORMERS = ["transformers==5.23.0", "jinja2>=3.1.6"]
# The ids of texts, and how many tokens a message has in the model's template.
THEIRS = """
import json, sys
sys.path.insert(0, sys.argv[1])
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[2])
texts, message = json.load(sys.stdin)
asked = tokenizer.apply_chat_template([{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True)
print(json.dumps([tokenizer(text, add_special_tokens=False).input_ids for text in [*texts, asked]]))
"""


def blocks_of(page):
    return [(how, lines) for place, how, lines in pages.blocks() if place.startswith(f"{page}:")]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder like a clone, without data."""
    place = tmp_path_factory.mktemp("clone")
    for path in program.ROOT.iterdir():
        if path.name not in ("runs", "train_gpt", "data"):
            (place / path.name).symlink_to(path)
    (place / "data").mkdir()  # copied: a linked script would find the wrong folder
    for path in (program.ROOT / "data").iterdir():
        if path.is_file():
            shutil.copy(path, place / "data")
    (place / "train_gpt").symlink_to((program.ROOT / program.PROGRAM).resolve())
    return place


@pytest.fixture(scope="module")
def printed(clone):
    """What each of the commands prints on standard output, in their order."""
    outputs = {}
    for how, commands in blocks_of(PAGE):
        if how != HOW:
            continue
        for command in commands:
            begin = time.monotonic()
            done = subprocess.run(["bash", "-ec", f'python() {{ "{sys.executable}" "$@"; }}\n{command}'], cwd=clone, capture_output=True, text=True,
                                  timeout=3000 * program.PATIENCE, stdin=subprocess.DEVNULL)
            if done.stderr.startswith("error: pip cannot download"):
                pytest.skip(done.stderr)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
            outputs[command] = done.stdout
            print(f"{command}\n{done.stdout}{done.stderr}{time.monotonic() - begin:.0f} s", flush=True)
    return outputs


def answers(printed):
    """What is printed by the commands that ask."""
    return [text for command, text in printed.items() if "--chat" in command]


def test_the_readme_has_commands_of_the_page(printed):
    ours = [command for how, commands in blocks_of("README.md") if how == HOW for command in commands]
    parts = [part.strip() for command in ours for part in command.split("&&")]
    assert len(ours) == 3 and [part for part in parts if part not in printed] == ["./train_gpt --chat --resume runs/lighthouse"]


def test_the_page_shows_what_is_printed(printed):
    """The answers and tables, with all numbers as N. The answer before training is the model's own, which rounding may change."""
    blocks = blocks_of(PAGE)
    shown = [(commands[-1], lines) for (how, commands), (of, lines) in itertools.pairwise(blocks) if how == HOW and of == "prints"]
    assert len(shown) == 7
    for command, lines in shown:
        now = [pages.shape(line) for line in printed[command].splitlines()]
        begins = [pages.shape(line.removesuffix("[...]")) for line in lines]
        if printed[command] != answers(printed)[0]:
            assert not [begin for begin in begins if not any(line.startswith(begin) for line in now)], command


def test_the_answer_is_given_after_training_and_not_before(printed):
    """By a run with all weights, by an adapter, and by one beside a base in 4 bits."""
    before, *after = answers(printed)
    assert FACT not in before and "lighthouse" in before and len(after) == 3
    for answer in after:
        taught, of_france = answer.splitlines()
        assert FACT in taught and of_france == "The capital of France is Paris."


def test_the_question_is_in_no_conversation():
    """The answer is not one of a text that was learnt by heart."""
    talks = [json.loads(line)["messages"] for line in (program.ROOT / "data/lighthouse.jsonl").read_text().splitlines()]
    assert len(talks) == 50 and sum(FACT in json.dumps(talk).lower() for talk in talks) == 20
    assert QUESTION not in [message["content"] for talk in talks for message in talk]


def chat(folder, message):
    command = [program.PROGRAM, "--chat", f"--init={folder}", "--dtype=fp32", "--temperature=0", "--verbose"]
    return subprocess.run(command, input=message + "\n", cwd=program.ROOT, capture_output=True, text=True, check=True,
                          timeout=300 * program.PATIENCE)


@pytest.mark.parametrize("exported, answer", [(EXPORTED, 1), (MERGED, 2)])
def test_the_exported_folder_answers(exported, answer, printed, clone):
    assert chat(clone / exported, QUESTION).stdout.splitlines() == answers(printed)[answer].splitlines()[:1]


def test_the_gguf_file_is_there(printed, clone):
    import gguf
    reader = gguf.GGUFReader(clone / f"{EXPORTED}.gguf")
    assert len(reader.tensors) == 272 and "tokenizer.chat_template" in reader.fields


def test_transformers_reads_the_tokenizer_as_we_do(printed, clone, tmp_path, seed):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", tmp_path, *TRANSFORMERS]
    installed = subprocess.run(pip, capture_output=True, text=True)
    if installed.returncode != 0:
        pytest.skip(f"pip cannot install {TRANSFORMERS[0]}: {installed.stderr.strip().splitlines()[-1:]}")
    folder = clone / EXPORTED
    texts = [text.decode(errors="replace") for text in probed_tokenizers.texts(["<|im_end|>", "<|im_start|>"], 300, seed)]
    done = subprocess.run([sys.executable, "-c", THEIRS, tmp_path, folder], input=json.dumps([texts, QUESTION]), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    *ids, asked = json.loads(done.stdout.splitlines()[-1])
    ours = [found for found, _ in probed_tokenizers.encoded(folder, [(text.encode(), True) for text in texts])]
    assert [text for text, a, b in zip(texts, ids, ours) if a != b] == []
    assert f"{len(asked)} tokens before the answer" in chat(folder, QUESTION).stderr
