"""GPT-2's byte-pair encoder as the Python scripts use it. It is compared with tiktoken's recorded ids, and with
tiktoken itself if that is installed."""

import concurrent.futures
import importlib.util
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

import bpe_corpus
import gpt2_bpe
import program

sys.path.append(str(program.ROOT / "data"))

import bpe_files  # noqa: E402

REFERENCES = json.loads((program.ROOT / "test/reference/gpt2_bpe.json").read_text())["groups"]


@pytest.fixture(scope="module")
def encoder():
    encoder = gpt2_bpe.Encoder(gpt2_bpe.require_files())
    yield encoder
    encoder.close()


@pytest.mark.parametrize("group", bpe_corpus.ALL_GROUPS)
def test_ids_are_tiktokens(encoder, group):
    summary = gpt2_bpe.summary(bpe_corpus.documents(group), encoder.encode)
    assert summary == REFERENCES[group]


def require_tiktoken():
    if importlib.util.find_spec("tiktoken") is None:
        pytest.skip("tiktoken is not installed (`make deps` has it from PyPI); its recorded ids are compared all the same")


def test_ids_of_new_texts_are_tiktokens(encoder, seed):
    require_tiktoken()
    encoding = gpt2_bpe.tiktoken_encoding(gpt2_bpe.require_files())
    for group in bpe_corpus.GROUPS:
        for text in bpe_corpus.documents(group, seed):
            assert encoder.encode(text).tolist() == gpt2_bpe.tiktoken_ids(encoding, text).tolist(), text


def test_character_classes_are_tiktokens():
    require_tiktoken()
    path = program.ROOT / "dev/data/make_unicode_classes.py"
    spec = importlib.util.spec_from_file_location("make_unicode_classes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.FILE.read_text().splitlines()[1:] == module.source().splitlines()[1:]


def test_one_encoder_serves_many_threads(encoder):
    texts = [text for group in bpe_corpus.GROUPS for text in bpe_corpus.documents(group)]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for ids, text in zip(threads.map(encoder.encode, texts), texts):
            assert np.array_equal(ids, encoder.encode(text))


def test_long_words(encoder):
    """A quadratic search for merges would take minutes for them."""
    length = 1_000_000
    assert encoder.encode(b"a" * length).tolist() == [24794] * (length // 4)  # "aaaa"


def test_too_little_room(encoder):
    assert encoder.encode(b"one two three", capacity=3).tolist() == [505, 734, 1115]
    assert encoder.encode(b"one two three", capacity=2) is None
    assert encoder.encode(b"", capacity=0).tolist() == []


def test_prompts_and_samples_are_text(tmp_path):
    program.write_token_file(tmp_path / "train.bin", [0, 50256] * 50)
    options = ["--layers=1", "--heads=1", "--channels=8", "--seq-len=16", "--vocab-size=50257", f"--train-data={tmp_path}/train.bin",
               "--global-batch-tokens=16", "--steps=1", "--sample-tokens=3", "--temperature=0"]
    note = "note: samples and --prompt are token ids"
    text = program.run(*options, f"--bpe-dir={gpt2_bpe.require_files()}", f"--out-dir={tmp_path}/text", "--checkpoint-every=1",
                       "--prompt=Zürich, 東京\\n<|endoftext|>").stdout
    assert "---\nZürich, 東京\n<|endoftext|>" in text and note not in text
    # A checkpoint records where the files of its tokens are.
    done = subprocess.run([(program.ROOT / program.PROGRAM).resolve(), "--generate", "--resume=text", "--sample-tokens=0", "--prompt=Zürich"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Zürich\n"), done.stderr
    # In a folder without data/gpt2_bpe.
    text = subprocess.run([(program.ROOT / program.PROGRAM).resolve(), *options, "--out-dir=ids", "--prompt=50256 0", "--export=w.safetensors"], cwd=tmp_path,
                          capture_output=True, text=True, check=True).stdout
    assert "---\n50256 0 " in text and note in text and "run `python data/bpe_files.py`" in text
    done = subprocess.run([(program.ROOT / program.PROGRAM).resolve(), *options[:5], "--generate", "--init=w.safetensors", "--sample-tokens=1"],
                          cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.startswith(note) and "run `python data/bpe_files.py`" in done.stderr


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


WRONG_FILES = {
    "no files": (lambda folder: (folder / "encoder.json").unlink(), ["there is no file", "encoder.json", "give their directory"]),
    "no merges": (lambda folder: (folder / "vocab.bpe").unlink(), ["there is no file", "vocab.bpe"]),
    "cut off": (lambda folder: change(folder / "encoder.json", '"!": 0', '"!": '), ["encoder.json", "it is not JSON at byte 7"]),
    "a merge is lost": (lambda folder: change(folder / "vocab.bpe", "Ġg azed\n", ""), ["encoder.json", "has 50257 tokens", "vocab.bpe in the same directory has 49999 merges"]),
    "merges in another order": (lambda folder: change(folder / "vocab.bpe", "Ġ t\nĠ a\n", "Ġ a\nĠ t\n"), ["'Ġ", "merges"]),
    "half a merge": (lambda folder: change(folder / "vocab.bpe", "\nĠ t\n", "\nĠt\n"), ["vocab.bpe", "line 2", "two tokens"]),
    "two ids exchanged": (lambda folder: change(folder / "encoder.json", '"!": 0', '"!": 1'), ["'!' is 1"]),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_files(tmp_path, name):
    for file in ("encoder.json", "vocab.bpe"):
        shutil.copyfile(gpt2_bpe.require_files() / file, tmp_path / file)
    spoil, words = WRONG_FILES[name]
    spoil(tmp_path)
    with pytest.raises(ValueError) as fault:
        gpt2_bpe.Encoder(tmp_path)
    line = str(fault.value)
    assert "\n" not in line and str(tmp_path) in line
    assert all(word in line for word in words), line


def ranks_of(folder):
    """The rank of each token, from encoder.json."""
    byte_of = {character: byte for byte, character in enumerate(bpe_files.characters_of_bytes())}
    numbers = json.loads((folder / "encoder.json").read_text())
    return {bytes(map(byte_of.get, token)): rank for token, rank in numbers.items() if rank != bpe_files.END_OF_TEXT}


def test_the_order_of_the_tokens_gives_both_files():
    """As data/bpe_files.py makes them: byte for byte."""
    folder = gpt2_bpe.require_files()
    made = bpe_files.contents(ranks_of(folder))
    assert {name: text.encode() for name, text in made.items()} == {name: (folder / name).read_bytes() for name in bpe_files.FILES}


def test_files_of_bpe_that_cannot_be_made(tmp_path, monkeypatch):
    """Other ranks than GPT-2's, and a package that pip does not find. Nothing is left behind."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"ab": 256}
    monkeypatch.setattr(bpe_files, "downloaded_ranks", lambda folder: ranks)
    assert bpe_files.make(tmp_path / "bpe") == f"{bpe_files.PACKAGE} does not give GPT-2's encoder.json"
    monkeypatch.setattr(bpe_files, "downloaded_ranks", lambda folder: ranks | {b"abc": 256})
    assert bpe_files.make(tmp_path / "bpe").startswith("ValueError: token 256 is not the merge")
    monkeypatch.undo()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setattr(bpe_files, "PACKAGE", "mlx-whisper==0.0.0")
    assert bpe_files.make(tmp_path / "bpe").startswith("pip cannot download mlx-whisper==0.0.0: ")
    assert not (tmp_path / "bpe").exists()
