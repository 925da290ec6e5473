"""Each script of data/: its requests to its source, and the tokens that it makes from the answers."""

import ast
import hashlib
import importlib.metadata
import json
import re
import shutil
import sys

import dataset_scripts
import file_server
import made_tokenizers
import numpy as np
import pseudo_terminal
import pytest
from dataset_scripts import BYTES, hub_of, manifest_of, random_text, refused_here, run, run_here, tokens_of
from file_server import in_pieces, wrong_bytes
from packaging.requirements import Requirement

import program
import bpe_files  # noqa: E402  (of data/, where dataset_scripts looks)
import common  # noqa: E402
import documents  # noqa: E402
import download  # noqa: E402
import hellaswag  # noqa: E402
import tinyshakespeare  # noqa: E402
from modules import why_not  # noqa: E402


def test_tinyshakespeare(tmp_path, monkeypatch):
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 50
    out = tmp_path / "out"
    with file_server.serving({"/karpathy/char-rnn/master/data/tinyshakespeare/input.txt": text}) as server:
        options = ["tinyshakespeare.py", "--mirror", server.url, "--out", str(out), *BYTES, "--pause", "0"]
        assert "should have" in refused_here(*options)  # it is not the expected text
        monkeypatch.setattr(sys, "argv", options)
        monkeypatch.setattr(tinyshakespeare, "SHA256", hashlib.sha256(text).hexdigest())
        common.main(tinyshakespeare.__doc__, "tinyshakespeare", tinyshakespeare.plan)
    assert bytes(np.concatenate([tokens_of(out, "train"), tokens_of(out, "val")]).astype(np.uint8)) == text
    assert len(tokens_of(out, "train")) == len(text) * 9 // 10
    assert manifest_of(out)["files"] == [{"file": "tinyshakespeare.txt", "sha256": hashlib.sha256(text).hexdigest(), "url": tinyshakespeare.URL}]


def test_stories_lie_across_the_blocks_that_are_read(tmp_path):
    """The separator between two stories also lies across a block boundary, at 4 MiB."""
    texts = [b"x" * ((1 << 22) - 5), *(b"story %d " % number * 500 for number in range(1200))]
    (tmp_path / "stories.txt").write_bytes(b"\n<|endoftext|>\n".join(texts))
    assert list(documents.separated_texts(tmp_path / "stories.txt")) == [text.strip() for text in texts]


@pytest.mark.parametrize("texts", [["一"] * 11, ["a", "é", "", "東京", "🦔", "z"], ["🦔🦔", "é"]], ids=["one character", "all lengths", "few"])
def test_no_place_divides_a_character(texts):
    whole = [text.encode() for text in texts]
    for place in range(sum(map(len, whole)) + 2):
        first, second = ([(bytes(part), begins, ends) for part, begins, ends in pieces(whole, place)] for pieces in (documents.before, documents.after))
        # Each piece is text, none is lost, and each document begins and ends once.
        assert "".join(part.decode() for part, _, _ in first + second) == "".join(texts)
        assert min(place, sum(map(len, whole))) <= sum(len(part) for part, _, _ in first) <= place + 3
        for which in (1, 2):  # begins, ends
            assert sum(piece[which] for piece in first + second if piece[0]) == sum(map(bool, texts))


def test_bytes_that_are_not_utf_8_are_kept_where_documents_are_divided():
    whole = [b"abc", b"\x80\x80abc", b"\x80" * 9]
    for place in range(18):
        assert b"".join(part for part, _, _ in [*documents.before(whole, place), *documents.after(whole, place)]) == b"".join(whole)
        assert [begins for _, begins, _ in documents.after(whole, 3)] == [True] * 2


def test_tinystories(tmp_path):
    files = {"TinyStoriesV2-GPT4-train.txt": b"One day a cat.\n<|endoftext|>\n\nThen a dog.\n\n<|endoftext|>\n <|endoftext|>The end",
             "TinyStoriesV2-GPT4-valid.txt": b"A bird.\n<|endoftext|>\nA fish.\n<|endoftext|>\n", "other.txt": b"x"}
    out = tmp_path / "out"
    with file_server.serving(hub_of("roneneldan/TinyStories", files)) as server:
        server.files["/store/TinyStoriesV2-GPT4-train.txt"].faults = [wrong_bytes]
        run_here("tinystories.py", "--mirror", server.url, "--out", out, *BYTES)
        assert not any("other.txt" in path for path, _ in server.requests)
    assert bytes(tokens_of(out, "train").astype(np.uint8)) == b"One day a cat.\nThen a dog.\nThe end"
    assert bytes(tokens_of(out, "val").astype(np.uint8)) == b"A bird.\nA fish."
    assert manifest_of(out)["settings"]["revision"] == "c0ffee"


def test_progress_on_a_terminal(tmp_path):
    """Bars for the download and for the tokens, which disappear at the end. There are none in a pipe."""
    name = "TinyStoriesV2-GPT4-train.txt"
    with file_server.serving(hub_of("roneneldan/TinyStories", {name: b"A story. " * 43691, name.replace("train", "valid"): b"Another."})) as server:
        server.files[f"/store/{name}"].faults = [in_pieces(download.BLOCK, 0.2), in_pieces(download.BLOCK, 0)]
        options = [sys.executable, dataset_scripts.DATA / "tinystories.py", "--mirror", server.url, *BYTES]
        status, text = pseudo_terminal.run([*options, "--out", tmp_path / "terminal"], 300)
        piped = run("tinystories.py", *options[2:], "--out", tmp_path / "pipe")
    assert status == 0, text
    shares = [int(share) for share in re.findall(rf"\r{name}: +(\d+)%\|[^\r\n]*393k", text)]
    assert shares == sorted(shares) and len({share for share in shares if 0 < share < 100}) >= 2, text
    assert re.search(r"\rtrain: [\d.]+k? tokens \[", text)
    stays = [line for line in pseudo_terminal.screen(text.replace("/terminal", "/pipe")) if line]
    assert stays == piped.stdout.splitlines() and piped.stderr == ""


def web_texts(seed):
    return [[random_text(seed + 10 * part + i, 1000).decode() for i in range(7)] for part in range(3)]


def check_web_texts(script, repository, folder, names, out, make_file, texts, *options):
    files = {name: make_file(part) for name, part in zip(names, texts)}
    with file_server.serving(hub_of(repository, files, folder)) as server:
        options = [script, *options, "--mirror", server.url, *BYTES, "--shard-tokens", 2000]
        run_here(*options, "--out", out)
        every = np.concatenate([tokens_of(out, "val"), tokens_of(out, "train")])
        assert bytes(every.astype(np.uint8)).decode() == "\n".join(text for part in texts for text in part)
        assert len(tokens_of(out, "val")) == 2000 and (out / "train_000002.bin").exists()
        assert [entry["file"] for entry in manifest_of(out)["files"]] == names
        assert manifest_of(out)["settings"]["revision"] == "c0ffee"
        # A small sample, which needs only the first file.
        server.requests.clear()
        small = out.with_name("small")
        run_here(*options, "--out", small, "--limit-tokens", 1500)
        assert np.array_equal(np.concatenate([tokens_of(small, "val"), tokens_of(small, "train")]), every[:1500])
        assert len(tokens_of(small, "val")) == 150
        assert [path for path, _ in server.requests if path.startswith("/store/")] == [f"/store/{names[0]}"]


FINEWEB = ["000_00000.parquet", "001_00000.parquet", "002_00000.parquet"]


@pytest.mark.parametrize("name, repository", [("edu", "HuggingFaceFW/fineweb-edu"), ("classic", "HuggingFaceFW/fineweb")])
def test_fineweb(tmp_path, seed, parquet_of_lines, name, repository):
    check_web_texts("fineweb.py", repository, "sample/100BT/", FINEWEB, tmp_path / "out", parquet_of_lines, web_texts(seed), "--name", name,
                    "--size", "100B")


def test_openwebtext(tmp_path, seed, parquet_of_lines):
    names = [f"train-{i:05}-of-00003.parquet" for i in range(3)]
    check_web_texts("openwebtext.py", "Skylion007/openwebtext", "plain_text/", names, tmp_path / "out", parquet_of_lines, web_texts(seed))


def test_real_parquet(tmp_path, seed):
    if (trouble := why_not("pyarrow")).startswith("is not installed"):
        pytest.skip("pyarrow is not installed (`make deps` has it from PyPI, Debian has not): a stand-in read the files")
    assert not trouble, f"pyarrow {trouble}"
    import pyarrow
    import pyarrow.parquet

    def make_file(texts):
        path = tmp_path / "made.parquet"
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=3, compression="zstd")
        return path.read_bytes()
    check_web_texts("fineweb.py", "HuggingFaceFW/fineweb-edu", "sample/10BT/", FINEWEB, tmp_path / "out", make_file, web_texts(seed))
    with file_server.serving(hub_of("HuggingFaceFW/fineweb-edu", {FINEWEB[0]: b"no parquet"}, "sample/10BT/")) as server:
        assert "is not a parquet file" in refused_here("fineweb.py", "--mirror", server.url, "--out", tmp_path / "bad", *BYTES)


def test_too_little_for_training(tmp_path, parquet_of_lines):
    files = {FINEWEB[0]: parquet_of_lines(["a short text"])}
    with file_server.serving(hub_of("HuggingFaceFW/fineweb-edu", files, "sample/10BT/")) as server:
        text = refused_here("fineweb.py", "--mirror", server.url, "--out", tmp_path / "out", *BYTES)
    assert "all of the 12 tokens are for validation, and none are left to train on; give --overwrite and a smaller --shard-tokens" in text


# The module's content if it is installed, and the message about it.
@pytest.mark.parametrize("module, trouble", [
    (None, "which is not installed; run `make deps`, or `pip install -r "),
    ('raise ImportError("pyarrow requires NumPy 2.0 or newer, found 1.24.2")',
     "which is installed but cannot be imported (pyarrow requires NumPy 2.0 or newer, found 1.24.2); run `pip install -r "),
    ("import pyarrow.lib", "is installed but cannot be imported (No module named 'pyarrow.lib')"),
    ("raise RuntimeError", "is installed but cannot be imported (RuntimeError)"),
], ids=["absent", "another NumPy", "another Python", "any other trouble"])
@pytest.mark.parametrize("script", ["fineweb.py", "openwebtext.py"])
def test_parquet_without_its_module(tmp_path, monkeypatch, script, module, trouble):
    """The message comes before any download."""
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.delitem(sys.modules, name)
    if module is None:
        monkeypatch.setitem(sys.modules, "pyarrow", None)
    else:
        (tmp_path / "modules/pyarrow").mkdir(parents=True)
        (tmp_path / "modules/pyarrow/__init__.py").write_text(module)
        monkeypatch.syspath_prepend(tmp_path / "modules")
    with file_server.serving() as server:
        text = refused_here(script, "--out", tmp_path / "out", "--mirror", server.url)
        assert trouble in text and not server.requests and not (tmp_path / "out").exists(), text


QUESTION = {"ctx": "A man", "endings": ["a", "b", "c", "d"], "label": 2}


def test_hellaswag(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    bodies = {"val": [QUESTION] * 3, "train": [QUESTION, {**QUESTION, "ctx": ""}], "test": [{**QUESTION, "label": ""}]}
    served = {f"/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl": "".join(json.dumps(line) + "\n" for line in lines).encode()
              for split, lines in bodies.items()}
    with file_server.serving(served) as server:
        options = ["hellaswag.py", "--mirror", server.url, "--out", str(out), "--pause", "0"]
        monkeypatch.setattr(sys, "argv", options)
        with pytest.raises(SystemExit, match="should have"):  # results are comparable only on the expected questions
            hellaswag.main()
        monkeypatch.setattr(hellaswag, "SHA256", {})
        hellaswag.main()
        assert "hellaswag_val.jsonl: 3 questions" in capsys.readouterr().out
        assert {entry["file"]: entry["questions"] for entry in manifest_of(out)["files"]} == {
            f"hellaswag_{split}.jsonl": len(lines) for split, lines in bodies.items()}
        for split in bodies:
            assert (out / f"hellaswag_{split}.jsonl").read_bytes() == served[f"/rowanz/hellaswag/master/data/hellaswag_{split}.jsonl"]
        shutil.rmtree(out)
        server.files["/rowanz/hellaswag/master/data/hellaswag_val.jsonl"].body = b"<html>\n"
        with pytest.raises(SystemExit, match="line 1: not a HellaSwag question"):
            hellaswag.main()


@pytest.mark.parametrize("wrong, fault", [
    ({"endings": ["a"]}, '"endings" is not a list of 4 non-empty strings'), ({"endings": "abcd"}, '"endings" is not a list of 4 non-empty strings'),
    ({"endings": ["a", "b", "", "d"]}, '"endings" is not a list of 4 non-empty strings'), ({"endings": ["a", "b", 3, "d"]}, '"endings" is not a list of 4 non-empty strings'),
    ({"label": 4}, '"label" is not 0 to 3'), ({"label": True}, '"label" is not 0 to 3'),
    ({"ctx": 1}, '"ctx" is missing, empty or not a string'), ({"ctx": ""}, '"ctx" is missing, empty or not a string'), (None, "not a JSON object"),
])
def test_hellaswag_refuses_what_the_trainer_does(tmp_path, wrong, fault):
    path = tmp_path / "val.jsonl"
    path.write_text(f"{json.dumps(QUESTION)}\n{json.dumps({**QUESTION, **wrong} if wrong else [])}\n")
    with pytest.raises(SystemExit, match=f"line 2: not a HellaSwag question \\({fault}\\); "):
        hellaswag.count_questions(path, "val")
    done = program.run("--model=mini", f"--eval-hellaswag={path}", "--device=cpu", f"--out-dir={tmp_path}/run", check=False)
    assert done.returncode == 1 and f"line 2: {fault}; " in done.stderr, done.stderr


def test_hellaswag_refuses_what_is_nested_too_deeply():
    assert hellaswag.fault_of("[" * 200_000, "val") == "not a JSON object"


def test_gpt2s_files_that_cannot_be_made(tmp_path, monkeypatch):
    """The message comes before anything is written."""
    made_tokenizers.require()
    (tmp_path / "text.txt").write_text("some text")
    monkeypatch.setattr(bpe_files, "make", lambda: "pip cannot download it: no net")
    text = refused_here("text.py", tmp_path / "text.txt", "--out", tmp_path / "out")
    assert "GPT-2's BPE files cannot be made: pip cannot download it: no net; give a folder that has them with --tokenizer DIR" in text
    assert not (tmp_path / "out").exists()


def test_requirements_are_what_deps_installs_and_the_scripts_import():
    """Names and versions. Each version that deps.sh pins or Debian provides is allowed by requirements.txt."""
    required = {found.name: found.specifier for line in (dataset_scripts.DATA / "requirements.txt").read_text().splitlines()
                if (text := line.partition("#")[0].strip()) for found in [Requirement(text)]}
    trees = [ast.walk(ast.parse(path.read_text())) for path in dataset_scripts.DATA.glob("*.py")]
    named = {name for tree in trees for node in tree for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else
                                                                   [node.module] if isinstance(node, ast.ImportFrom) else [])}
    own = {path.stem for folder in ("data", "scripts") for path in (program.ROOT / folder).glob("*.py")}
    assert {name.partition(".")[0] for name in named} - sys.stdlib_module_names - own == set(required)
    deps = (program.ROOT / "scripts/deps.sh").read_text()
    pins = dict(re.findall(r"([\w-]+)==([\d.]+)", deps))
    for name, versions in required.items():
        assert name in pins or f" python3-{name} " in deps, name
        assert (pins.get(name) or importlib.metadata.version(name)) in versions, name
    # The newest version that works with Debian's NumPy.
    assert str(int(pins["pyarrow"].partition(".")[0]) + 1) not in required["pyarrow"]
