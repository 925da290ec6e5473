"""SmolLM2 from PyPI in a chat, and taught on conversations: the same run on every mesh."""

import json
import re
import shutil
import sys

import numpy as np
import pytest

pytest.importorskip("gguf", reason="PyPI's gguf is not installed; `make deps` installs it")
tokenizers = pytest.importorskip("tokenizers", reason="PyPI's tokenizers is not installed; `make deps` installs it")
pytest.importorskip("jinja2", reason="jinja2 is not installed; `make deps` installs it")

import dataset_scripts  # noqa: E402
import program  # noqa: E402
import smollm2_folder  # noqa: E402

import chat_format  # noqa: E402  (of data/, where dataset_scripts looks)
import chat_template  # noqa: E402
import pypi  # noqa: E402

sys.path.append(str(program.ROOT / "dev/data"))

import make_chat_formats  # noqa: E402

QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
DATE = "2024-07-26"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return smollm2_folder.make(tmp_path_factory)


@pytest.fixture(scope="module")
def template(folder):
    return chat_template.read_template(folder), chat_template.special_texts(folder)


def test_the_known_formats_are_what_the_templates_write():
    """Each is found again, and proved on drawn conversations."""
    try:
        assert make_chat_formats.FILE.read_text() == make_chat_formats.source()
    except pypi.CannotGet as error:
        pytest.skip(str(error))


def test_the_begin_token_of_the_folder_changes_no_text(template):
    """It is also that of each message."""
    text, special = template
    known, of_folder = (chat_format.find(text, tokens, DATE, chat_template.Renderer) for tokens in ({}, special))
    for roles in ("U", "SU", "UAU", "SUAU"):
        messages = chat_format.conversation(roles)
        assert chat_format.joined(known, messages) == chat_format.joined(of_folder, messages)


def test_a_chat(folder, template):
    done = program.run("--chat", f"--init={folder}", "--temperature=0", "--dtype=fp32", "--seq-len=256", "--verbose",
                       input=f"{QUESTION}\n/reset\n{QUESTION}\n")
    assert done.stdout == f"{ANSWER}\n" * 2
    (text, _), = chat_template.Renderer(*template, DATE).render(([{"role": "user", "content": QUESTION}], True, None))
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    turns = re.findall(r"^(\d+) tokens before the answer, (\d+) in it, (\d+) rows computed$", done.stderr, re.MULTILINE)
    answer = int(turns[0][1])
    # The second time only the last token's row is new, and those of the answer.
    assert [tuple(map(int, turn)) for turn in turns] == [(len(ids), answer, len(ids) + answer), (len(ids), answer, 1 + answer)]


MESHES = {
    "tensor parallelism 3": (3, ["--tensor-parallel=3"]),
    "ZeRO-3 with two stages": (4, ["--pipeline-parallel=2", "--zero-stage=3"]),
    "an offloaded optimizer": (1, ["--offload-optimizer=nvme", "--nvme-dir={}"]),
}


@pytest.fixture(scope="module")
def taught(folder, tmp_path_factory):
    """Returns train(name, ranks, options): three steps of 1,024 tokens of conversations."""
    place = tmp_path_factory.mktemp("taught")
    talks = [[{"role": "user", "content": f"How many legs have {count} cats?"},
              {"role": "assistant", "content": f"{count} cats have {4 * count} legs." + " Each has four." * (count % 7)}] for count in range(2, 40)]
    (place / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    dataset_scripts.run("chat.py", place / "talks.jsonl", "--tokenizer", folder, "--out", place / "rows", "--max-tokens", 128)

    def train(name, ranks, options):
        run = program.train(place / name, f"--init={folder}", f"--train-data={place}/rows/train_*.bin", "--seq-len=128",
                            "--global-batch-tokens=1024", "--micro-batch-size=2", "--steps=3", "--lr=1e-4", "--warmup-steps=0", "--dtype=fp32",
                            *(option.replace("{}", str(place)) for option in options), ranks=ranks, timeout=1800)
        shutil.rmtree(place / name)  # a checkpoint takes 1.6 GB
        return run
    return train


@pytest.fixture(scope="module")
def single(taught):
    run = taught("single", 1, [])
    print("one process:", run.losses, run.column("targets"))
    assert run.losses[2] < run.losses[0] - 0.1
    return run


@pytest.mark.parametrize("name", MESHES)
def test_teaching_on_a_mesh(single, taught, name):
    run = taught(name, *MESHES[name])
    difference = np.abs(np.array(run.losses) - single.losses).max()
    print(f"{name}: {run.losses}, largest difference {difference:.2e}")
    assert run.column("targets") == single.column("targets")
    # What the project promises in fp32; offloading changes no bit.
    assert difference <= (0 if "offloaded" in name else 1e-5)
