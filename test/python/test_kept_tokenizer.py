"""A checkpoint holds its model's tokenizer, chat template, chat format and end tokens, so that nothing after the training needs the
folder that it began from."""

import json
import shutil

import pytest

import chat_models
import program
from chat_models import chat
from dataset_scripts import run_here
from refused import one_error

import chat_format  # noqa: E402  (of data/, where dataset_scripts looks)

pytest.importorskip("jinja2", reason="jinja2 is not installed (Debian has python3-jinja2)")

FILES = ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
TALKS = [[{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is the number {i}."}] for i in range(20)]
GREEDY = [*chat_models.QUIET, "--sample-tokens=20"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on conversations, whose model's folder is gone, in a folder with what the tokenizer's files were and an export."""
    folder = tmp_path_factory.mktemp("kept")
    chat_models.write(folder / "model", generation_config={"eos_token_id": [chat_models.IM_END, 60]}, with_format=False)
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    run_here("chat.py", folder / "talks.jsonl", "--tokenizer", folder / "model", "--out", folder / "rows")
    shutil.copytree(folder / "model", folder / "before")
    program.train(folder / "run", f"--init={folder}/model", f"--train-data={folder}/rows/train_*.bin", f"--val-data={folder}/rows/val_*.bin",
                  "--seq-len=128", "--global-batch-tokens=512", "--steps=2", f"--export={folder}/exported")
    shutil.rmtree(folder / "model")
    return folder


def files_in(folder):
    return {name: (folder / name).read_bytes() for name in [*FILES, "chat_format.json"]}


def test_exports_have_the_files_as_they_were(trained):
    kept = {name: (trained / "before" / name).read_bytes() for name in FILES}
    said = program.run(f"--resume={trained}/run", "--steps=3", f"--export={trained}/later", "--sample-tokens=0", f"--out-dir={trained}/other").stdout
    assert f"talk to the model with\n  {program.PROGRAM} --chat --resume {trained}/other" in said, said
    for folder in (trained / "exported", trained / "later", trained / "run/checkpoint-00000002/tokenizer"):
        found = files_in(folder)
        # That of the rows, which the model's folder lacked.
        assert json.loads(found.pop("chat_format.json"))["user"] == ["<|im_start|>user\n", "<|im_end|>\n"]
        assert found == kept


def test_text_needs_no_folder(trained):
    texts = [program.run("--generate", of, "--prompt=What is it?", *GREEDY).stdout
             for of in (f"--resume={trained}/run", f"--init={trained}/exported")]
    assert texts[0] == texts[1] and texts[0].startswith("What is it?") and len(texts[0]) > 15
    lines = ["What is 3?", "And the cat?"]
    expected = chat(trained / "exported", lines, "--seq-len=128", "--sample-tokens=20")
    done = program.run("--chat", f"--resume={trained}/run", *GREEDY, input="\n".join(lines))
    assert done.stdout == expected.stdout and done.stdout
    reference = chat_models.Reference(trained / "exported", 128, most=20, ends=[chat_models.IM_END, 60])
    assert done.stdout == "".join(reference.answer(line)[0] for line in lines)


def test_the_format_of_the_rows_wins(trained, tmp_path):
    """Over that of the model's folder, as where they are written in another template."""
    folder = chat_models.write(tmp_path / "model", chat_models.TRIMMED)
    (tmp_path / "t.jinja").write_text(chat_models.CHATML)
    run_here("chat.py", trained / "talks.jsonl", "--tokenizer", folder, "--template", tmp_path / "t.jinja", "--out", tmp_path / "rows")
    options = ["--seq-len=128", "--global-batch-tokens=512", "--steps=1"]
    program.train(tmp_path / "run", f"--init={folder}", f"--train-data={tmp_path}/rows/train_*.bin", *options)
    kept = tmp_path / "run/checkpoint-00000001/tokenizer/chat_format.json"
    assert kept.read_bytes() == (tmp_path / "rows/chat_format.json").read_bytes() != (folder / "chat_format.json").read_bytes()
    # And so does the template of the rows, for whoever reads the folder.
    assert (kept.parent / "chat_template.jinja").read_text() == chat_models.CHATML
    # A template that puts more around texts than a format can say leaves none, not the folder's.
    (tmp_path / "t.jinja").write_text("{{ messages[0].content | length }}" + chat_models.CHATML)
    run_here("chat.py", trained / "talks.jsonl", "--tokenizer", folder, "--template", tmp_path / "t.jinja", "--out", tmp_path / "more")
    program.train(tmp_path / "more/run", f"--init={folder}", f"--train-data={tmp_path}/more/train_*.bin", *options)
    assert "the model's chat template is not known here" in program.run("--chat", f"--resume={tmp_path}/more/run", check=False, input="").stderr
    # Rows in the folder's own template replace both again; an export without a step takes none of them.
    run_here("chat.py", trained / "talks.jsonl", "--tokenizer", folder, "--out", tmp_path / "own")
    program.train(tmp_path / "again", f"--resume={tmp_path}/run", f"--train-data={tmp_path}/own/train_*.bin", "--new-data", "--steps=2", *options[:2])
    for of, template in ((kept.parent, chat_models.CHATML), (tmp_path / "again/checkpoint-00000002/tokenizer", chat_models.TRIMMED)):
        assert (of / "chat_template.jinja").read_text() == template
        assert json.loads((of / "chat_format.json").read_text())["template"] == chat_format.checksum(template)
    program.run(f"--resume={tmp_path}/run", f"--train-data={tmp_path}/own/train_*.bin", "--steps=0", f"--export={tmp_path}/exported", "--sample-tokens=0")
    assert (tmp_path / "exported/chat_template.jinja").read_text() == chat_models.CHATML
    # What validates is not taught.
    program.train(tmp_path / "validated", f"--init={folder}", f"--train-data={tmp_path}/rows/train_*.bin", f"--val-data={tmp_path}/own/val_*.bin", *options)
    assert (tmp_path / "validated/checkpoint-00000001/tokenizer/chat_template.jinja").read_text() == chat_models.CHATML
    done = program.run(f"--init={folder}", f"--train-data={tmp_path}/[ro]*/train_*.bin", *options, f"--out-dir={tmp_path}/both", check=False)
    assert "are written in different chat templates; train on one after the other" in one_error(done.stderr)
    # Other data say nothing about conversations.
    tokens = tmp_path / "rows/plain.bin"
    program.write_token_file(tokens, [5, 6, 7] * 400)
    program.train(tmp_path / "plain", f"--init={folder}", f"--train-data={tokens}", *options)
    kept = tmp_path / "plain/checkpoint-00000001/tokenizer/chat_format.json"
    assert kept.read_bytes() == (folder / "chat_format.json").read_bytes()


def spoil(path, old, new):
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, 1))


DAMAGES = {
    "cut off": lambda folder: (folder / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes()[:-50]),
    "another token": lambda folder: spoil(folder / "tokenizer.json", b'"HEL"', b'"HOL"'),
    "missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "other ends": lambda folder: spoil(folder / "generation_config.json", b"60", b"61"),
    "another template": lambda folder: spoil(folder / "tokenizer_config.json", b"assistant", b"Assistant"),
    "another format": lambda folder: spoil(folder / "chat_format.json", b"assistant", b"Assistant"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused(trained, tmp_path, damage):
    shutil.copytree(trained / "run", tmp_path / "run")
    DAMAGES[damage](tmp_path / "run/checkpoint-00000002/tokenizer")
    for options in (["--generate"], ["--chat"], ["--steps=2", f"--export={tmp_path}/out", "--sample-tokens=0"]):
        done = program.run(f"--resume={tmp_path}/run", *options, check=False, input="a\n")
        assert done.returncode == 1 and done.stdout == ""
        assert one_error(done.stderr).startswith(f"the checkpoint is damaged: {tmp_path}/run/checkpoint-00000002/tokenizer/")
    assert not (tmp_path / "out").exists()


def test_a_run_goes_on_without_the_folder_of_its_configuration(trained, tmp_path):
    shutil.copytree(trained / "before", tmp_path / "tokens")
    options = ["--model=llama-tiny", "--vocab-size=512", f"--tokenizer={tmp_path}/tokens", f"--train-data={trained}/rows/train_*.bin", "--seq-len=128",
               "--global-batch-tokens=256"]
    program.train(tmp_path / "run", *options, "--steps=1")
    shutil.rmtree(tmp_path / "tokens")
    again = [f"--config={tmp_path}/run/config.toml", "--resume", "--steps=2", "--sample-tokens=0"]
    assert f"note: there is no {tmp_path}/tokens any more; the checkpoint's own tokenizer is used" in program.run(*again).stdout
    assert "--tokenizer" in one_error(program.run(*again, f"--tokenizer={tmp_path}/tokens", check=False).stderr)


def test_shards_cannot_be_compared_with_an_unusable_tokenizer(trained, tmp_path):
    shutil.copytree(trained / "exported", tmp_path / "model")
    DAMAGES["cut off"](tmp_path / "model")
    done = program.run(f"--init={tmp_path}/model", f"--train-data={trained}/rows/train_*.bin", "--seq-len=128", "--steps=1", f"--out-dir={tmp_path}/run", check=False)
    assert "says by which tokenizer it was made, and that of the model's folder cannot be used" in one_error(done.stderr) and not (tmp_path / "run").exists()
    # Files of ids that say nothing are the user's own affair.
    program.write_token_file(tmp_path / "plain.bin", [5, 6, 7] * 400)
    program.train(tmp_path / "run", f"--init={tmp_path}/model", f"--train-data={tmp_path}/plain.bin", "--seq-len=128", "--global-batch-tokens=256", "--steps=1")
