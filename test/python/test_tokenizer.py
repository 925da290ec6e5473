"""The program's tokenizer: ids, texts and checksums are those of PyPI's `tokenizers` and of data/, for tokenizers trained
here with the rules of well-known models, and for GPT-2's two files."""

import json
import shutil
import subprocess

import pytest

import bpe_corpus
import gpt2_bpe
import made_tokenizers
import probed_tokenizers
import program

import bpe_files
import tokenizer_checksum

PARTS = {
    "llama3": {"ignore_merges": True},
    "qwen": {"normalizer": {"type": "NFC"}},
}


def parts_of(name):
    parts = made_tokenizers.made(name, special=["<|endoftext|>", "<|im_start|>"], texts=[
        text.decode(errors="replace") for group in ("prose", "code", "blocks") for text in bpe_corpus.documents(group)][:60], size=900)
    changes = PARTS.get(name, {})
    parts["model"]["ignore_merges"] = changes.get("ignore_merges", False)
    parts["normalizer"] = changes.get("normalizer")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    more = [{"content": "<tag>", "normalized": True}, {"content": "<tag> x"}, {"content": "<mask>", "lstrip": True, "rstrip": True}]
    parts["added_tokens"] += [{**plain, **token, "id": number} for number, token in enumerate(more, len(parts["model"]["vocab"]))]
    return parts


@pytest.mark.parametrize("name", [name for name in made_tokenizers.PATTERNS if name != "single letters"])  # it has a .
def test_ids_and_texts_are_those_of_tokenizers(tmp_path, seed, name):
    parts = parts_of(name)
    made_tokenizers.write(tmp_path, parts)
    probed_tokenizers.compare(tmp_path, 300, seed)
    assert probed_tokenizers.checksum(tmp_path) == tokenizer_checksum.checksum(parts)


def test_bytes_without_a_token_are_dropped(tmp_path, seed):
    """As SmolLM2 lacks some."""
    parts = parts_of("smollm")
    for character in "ĀāĂÁõ":
        number = parts["model"]["vocab"].pop(character)
        parts["model"]["vocab"][f"nothing {number}"] = number
    parts["model"]["merges"] = [merge for merge in parts["model"]["merges"] if not set("".join(merge)) & set("ĀāĂÁõ")]
    made_tokenizers.write(tmp_path, parts)
    assert probed_tokenizers.encoded(tmp_path, [(b"\x00a\x01", True)])[0][1] == b"a"
    probed_tokenizers.compare(tmp_path, 200, seed)


@pytest.mark.more
def test_gpt2s_files(tmp_path, seed):
    """Every code point between others, so that its class shows. And the checksum is that of GPT-2's tokenizer.json."""
    made_tokenizers.require()
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, decoders
    folder = gpt2_bpe.require_files()
    reference = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    reference.pre_tokenizer, reference.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    reference.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=True)])
    reference.save(str(tmp_path / "tokenizer.json"))
    probed_tokenizers.compare(tmp_path, 300, seed, more=bpe_corpus.all_code_points())
    texts = [(text, True) for text in probed_tokenizers.texts(["<|endoftext|>"], 300, seed)]
    assert probed_tokenizers.encoded(folder, texts) == probed_tokenizers.encoded(tmp_path, texts)
    checksum = tokenizer_checksum.checksum(json.loads((tmp_path / "tokenizer.json").read_text()))
    assert probed_tokenizers.checksum(folder) == probed_tokenizers.checksum(tmp_path) == checksum


def test_long_words():
    """A quadratic search for merges would take minutes for them."""
    length = 1_000_000
    (ids, _), = probed_tokenizers.encoded(gpt2_bpe.require_files(), [(b"a" * length, True)])
    assert ids == [24794] * (length // 4)  # "aaaa"


def test_prompts_and_samples_are_text(tmp_path):
    program.write_token_file(tmp_path / "train.bin", [0, 50256] * 50)
    options = ["--layers=1", "--heads=1", "--channels=8", "--seq-len=16", "--vocab-size=50257", f"--train-data={tmp_path}/train.bin",
               "--global-batch-tokens=16", "--steps=1", "--sample-tokens=3", "--temperature=0"]
    note = "note: samples and --prompt are token ids"
    text = program.run(*options, f"--tokenizer={gpt2_bpe.require_files()}", f"--out-dir={tmp_path}/text", "--checkpoint-every=1",
                       "--prompt=Zürich, 東京\\n<|endoftext|>").stdout
    assert "---\nZürich, 東京\n<|endoftext|>" in text and note not in text
    # A checkpoint has the files of its tokenizer.
    program_here = (program.ROOT / program.PROGRAM).resolve()
    done = subprocess.run([program_here, "--generate", "--resume=text", "--sample-tokens=0", "--prompt=Zürich"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "Zürich\n"), done.stderr
    # In a folder without data/gpt2_bpe.
    text = subprocess.run([program_here, *options, "--out-dir=ids", "--prompt=50256 0", "--export=w.safetensors"], cwd=tmp_path,
                          capture_output=True, text=True, check=True).stdout
    assert "---\n50256 0 " in text and note in text and "run `python data/bpe_files.py`" in text
    done = subprocess.run([program_here, *options[:5], "--generate", "--init=w.safetensors", "--sample-tokens=1"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr.startswith(note) and "run `python data/bpe_files.py`" in done.stderr


def change(path, old, new):
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


WRONG_FILES = {
    "no files": (lambda folder: (folder / "encoder.json").unlink(), ["there is no tokenizer.json", "encoder.json", "give the folder"]),
    "no merges": (lambda folder: (folder / "vocab.bpe").unlink(), ["there is no file", "vocab.bpe"]),
    "cut off": (lambda folder: change(folder / "encoder.json", '"!": 0', '"!": '), ["encoder.json", "it is not JSON at byte 7"]),
    "a merge is lost": (lambda folder: change(folder / "vocab.bpe", "Ġg azed\n", ""), ["encoder.json", "49999 merges of vocab.bpe", "50257 ids"]),
    "merges in another order": (lambda folder: change(folder / "vocab.bpe", "Ġ t\nĠ a\n", "Ġ a\nĠ t\n"), ["merges", "do not follow"]),
    "half a merge": (lambda folder: change(folder / "vocab.bpe", "\nĠ t\n", "\nĠt\n"), ["vocab.bpe", "line 2", "two tokens"]),
    "two ids exchanged": (lambda folder: change(folder / "encoder.json", '"!": 0', '"!": 1'), ["two tokens have the id 1"]),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_files(tmp_path, name):
    for file in ("encoder.json", "vocab.bpe"):
        shutil.copyfile(gpt2_bpe.require_files() / file, tmp_path / file)
    spoil, words = WRONG_FILES[name]
    spoil(tmp_path)
    with pytest.raises(probed_tokenizers.Refused) as fault:
        probed_tokenizers.checksum(tmp_path)
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
