"""./train_gpt configure: questions, a plan, and a config.toml."""

import subprocess

import pytest

import program
from planned import plan


def configure(*answers, options=()):
    text = "".join(f"{answer}\n" for answer in answers)
    return subprocess.run([program.PROGRAM, "configure", *options], cwd=program.ROOT, input=text, capture_output=True, text=True,
                          timeout=60 * program.PATIENCE)


def test_a_run_on_processors(tmp_path):
    """The file starts the run that was asked for."""
    book, file = tmp_path / "book.txt", tmp_path / "run.toml"
    book.write_text("It was a dark and stormy night. " * 200)
    result = configure("tiny", book, 32, 3, "", 2, file)
    assert result.returncode == 0 and "2 processes" in result.stdout and f"--config {file} reads them" in " ".join(result.stdout.split())
    run = program.train(tmp_path / "run", f"--config={file}", ranks=2)
    assert len(run.losses) == 3 and run.record["configuration"]["seq-len"] == 32
    assert run.record["configuration"]["train-data"] == str(book)


@pytest.mark.parametrize("model, context", [("gpt2", 1024), ("qwen3-0.6b", 512)])
def test_a_search_on_gpus(model, context, tmp_path):
    """The file has the mesh that the search found, and a plan with it is that plan."""
    file = tmp_path / "run.toml"
    result = configure(model, "", context, "", 4, 4090, 131072, file)
    assert result.returncode == 0 and "the best runs:" in result.stdout
    assert f"context {context}" in result.stdout
    best = plan(f"--model={model}", f"--seq-len={context}", "--gpus=4", "--gpu=4090", "--global-batch-tokens=131072", "--search")[0]
    again = plan(f"--config={file}", "--gpus=4", "--gpu=4090")[0]
    assert again["memory"]["bytes"] == best["memory"]["bytes"] and again["mesh"] == best["mesh"]


def test_a_wrong_answer_is_asked_again(tmp_path):
    there, file = tmp_path / "there.toml", tmp_path / "run.toml"
    there.write_text("")
    result = configure("gpt9", "mixtral-8x7b", "gpt2", tmp_path / "no.txt", "", "many", -5, 128, 0, "", "few", "", 2, there, tmp_path / "no/x.toml", file)
    assert result.returncode == 0 and file.exists() and there.read_text() == ""
    for line in ("unknown", "mixtral-8x7b is planned here, not trained", "no.txt: there is no such file", "--seq-len -5 is no context",
                 "--steps 0 trains nothing", "no/x.toml: there is no folder", "'many' is not a whole number", "--gpus 'few' is not a whole number", "there is such a file; choose another name"):
        assert line in result.stdout, line


@pytest.mark.parametrize("answers, options, line", [
    ([], [], "configure: the answers end before the last question"),
    (["gpt2"], [], "configure: the answers end before the last question"),
    ([], ["--model=gpt2"], "configure asks at a terminal: it takes no options"),
])
def test_what_is_refused(answers, options, line):
    result = configure(*answers, options=options)
    assert result.returncode == 1 and line in result.stderr and result.stderr.count("error:") == 1
