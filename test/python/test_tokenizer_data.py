"""The scripts of data/ with a model's own tokenizer: the same tokens as the library makes of whole documents, the tokens
around documents, the checksum in the header, and folders that are refused."""

import json
import random

import numpy as np
import pytest

import bpe_corpus
import gpt2_bpe
import made_tokenizers
import program
from dataset_scripts import BYTES, manifest_of, read_shard, refused_here, results_in, run_here, tokens_of

import cuts  # noqa: E402  (of data/, where dataset_scripts looks)
import modules  # noqa: E402
import tokenizer  # noqa: E402
import tokenizer_checksum  # noqa: E402
import tokenizer_training  # noqa: E402

PIECES = ["a", "b", "Hello", " world", ",", " the", "\n", "\n\n", "  ", " naïve", "東京", "、", "。", "'s", "'S", " 1234", "7", "\t", "\r\n", "é",
          "e\u0301", "\u0301", "\u0316", "\u1100", "\u1161", "\u11a8", "\u1100\u1161\u11a8", ".", ". ", "x", "zz", "Q", "\u3000", "\xa0", "<|endoftext|>", "/", "🦔", "ſ", "ʰ",
          "क्", "\u0bbe"]
ADDED = [("a b", {}), ("  ", {}), (". T", {}), ("x\n", {"rstrip": True}), ("Q", {"lstrip": True}), ("zz", {"single_word": True})]


def drawn_text(numbers):
    """Some of the pieces, often several times in a row, and now and then bytes that are not UTF-8."""
    chosen = numbers.sample(PIECES, numbers.randint(3, len(PIECES)))
    text = "".join(numbers.choice(chosen) * numbers.choice([1, 1, 1, 3, 9]) for _ in range(numbers.randint(1, 120))).encode()
    return bytes(numbers.randrange(256) if numbers.random() < 0.1 else byte for byte in text) if numbers.random() < 0.25 else text


@pytest.mark.parametrize("added", [[], ADDED], ids=["", "added tokens"])
@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}], ids=["", "NFC"])
@pytest.mark.parametrize("name", made_tokenizers.PATTERNS)
def test_pieces_have_the_tokens_of_the_whole(seed, monkeypatch, name, normalizer, added):
    parts = made_tokenizers.made(name, normalizer=normalizer)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True, "special": False}
    parts["added_tokens"] += [{"id": 400 + i, "content": content, **flags, **own} for i, (content, own) in enumerate(added)]
    own, numbers, count = tokenizer.BpeTokenizer(name, parts, [0]), random.Random(seed), 0
    for _ in range(60):
        text = drawn_text(numbers)
        monkeypatch.setattr(tokenizer, "PIECE", numbers.randint(1, 50))
        pieces = list(tokenizer.cut(memoryview(text), own))
        assert b"".join(pieces) == text
        whole = own.library.encode(text.decode(errors="replace"), add_special_tokens=False).ids
        assert np.concatenate([*own.encode(pieces), []]).tolist() == whole, pieces
        count += len(pieces)
    assert count > 100


@pytest.mark.parametrize("pattern, added, text", [
    (r"e{2,}|t{0,2}[^\P{Cs}一-龥x\S]|\s+(?!\S)|\s+", [], " The"), (r"e{2}|\s+", [], " The"), (r"(?:e{2})+|\s+", [], " The"),
    (r"\p{L}+|[<>]|\s+", [("<tok>", True), ("tok", False)], " <tok>"), (r"\p{L}+|[<>]|\s+", [("a<", True), ("<b", False)], " a<b"),
], ids=["at least two", "two", "a group of two", "a name in a name", "names that overlap"])
def test_no_cut_where_several_characters_begin_a_match_or_within_names(monkeypatch, pattern, added, text):
    parts = made_tokenizers.made("only letters")
    parts["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    parts["added_tokens"] += [{"id": 400 + i, "content": content, **flags, "special": special} for i, (content, special) in enumerate(added)]
    own = tokenizer.BpeTokenizer("own", parts, [0])
    whole = own.library.encode(text * 9, add_special_tokens=False).ids
    for size in range(1, 9):
        monkeypatch.setattr(tokenizer, "PIECE", size)
        assert np.concatenate(own.encode(list(tokenizer.cut((text * 9).encode(), own)))).tolist() == whole, size


@pytest.mark.parametrize("text, most", [
    ("One sentence.\nAnother one, of 12 words.\n\n" * 200, 120), ("word " * 2000, 120), ("東京、大阪。" * 1000, 120), ("Так, вот. " * 1000, 130),
    (" " * 9000 + "x", 10_000), ("ab" * 5000, 10_000), ("1234567" * 1000, 10_000)], ids=["lines", "words", "chinese", "russian", "spaces", "one word", "digits"])
def test_texts_are_cut_where_they_have_words(monkeypatch, text, most):
    own = tokenizer.BpeTokenizer("llama3", made_tokenizers.made("llama3"), [0])
    monkeypatch.setattr(tokenizer, "PIECE", 100)
    assert max(map(len, tokenizer.cut(text.encode(), own))) <= most


def test_what_is_no_word_of_a_pattern_has_no_place_to_cut():
    """Lazy quantifiers, looking behind, anchors, and anything with a name."""
    for pattern in (r"\S+|\s+?", r"(?<=a)b|\s+", r"^a|\s+", r"\bX", r"(?<x>a)\k<x>", r"a{2}?", r"(?x) a", r"(a", r"a)", r"*a", r"\x41", "[[a]&&[b]]"):
        assert cuts.alternatives(pattern) is None, pattern
    assert cuts.alternatives(tokenizer_checksum.GPT2_WORDS)


def test_a_document_of_one_endless_word_is_refused(monkeypatch):
    monkeypatch.setattr(tokenizer, "LARGEST_PIECE", 100_000)
    own = tokenizer.BpeTokenizer("gpt2", made_tokenizers.made("gpt2"), [0])
    with pytest.raises(SystemExit, match="error: a document has 100,001 bytes in a row in which the tokenizer's words may have no end; "):
        list(tokenizer.cut(b"a" * 100_001, own))


@pytest.mark.parametrize("group", bpe_corpus.GROUPS)
def test_ids_of_gpt2_are_the_recorded_ones(group):
    made_tokenizers.require()
    folder = gpt2_bpe.require_files()
    own = tokenizer.read_folder(folder)
    references = json.loads((program.ROOT / "test/reference/gpt2_bpe.json").read_text())["groups"]
    assert gpt2_bpe.summary(bpe_corpus.documents(group), lambda text: own.encode([text])[0].astype(np.int32)) == references[group]


# ---- Folders


def documents_of(folder, path, tokens, out, *options):
    """The tokens that text.py makes of the documents."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in tokens))
    run_here("text.py", path, "--tokenizer", folder, "--out", out, "--val-fraction", 0, "--overwrite", *options)
    return tokens_of(out, "train").tolist()


def test_tokens_around_documents(tmp_path):
    """Once each, and not where a document is cut. Special tokens in the text are text."""
    special = ["<s>", "</s>", "<|endoftext|>"]
    parts = made_tokenizers.made("llama3", special, post_processor=made_tokenizers.begins_with("<s>", 0))
    folder = made_tokenizers.write(tmp_path / "model", {**parts, "truncation": {
        "direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}}, tokenizer_config={"eos_token": {"content": "</s>"}})
    texts = ["It is. " * 9000, "", "a </s><s> b", "é"]
    own = tokenizer.read_folder(folder)
    assert (own.begin, own.end, own.vocabulary) == ([0], [1], len(parts["model"]["vocab"]))
    wanted = [id for text in texts if text for id in [0, *own.library.encode(text, add_special_tokens=False).ids, 1]]
    assert documents_of(folder, tmp_path / "texts.jsonl", texts, tmp_path / "out") == wanted
    assert wanted.count(0) == wanted.count(1) == 3
    settings = manifest_of(tmp_path / "out")["settings"]
    assert {key: settings[key] for key in ("tokenizer", "vocabulary", "checksum", "begin", "end")} == {
        "tokenizer": "model", "vocabulary": own.vocabulary, "checksum": f"{own.checksum:016x}", "begin": [0], "end": [1]}
    # Divided within a document, which begins in the one part and ends in the other.
    (tmp_path / "one.txt").write_text("It is. " * 100)
    run_here("text.py", tmp_path / "one.txt", "--tokenizer", folder, "--out", tmp_path / "two")
    train, val = (tokens_of(tmp_path / "two", split).tolist() for split in ("train", "val"))
    assert (train[0], train.count(0), train.count(1), val.count(0), val.count(1), val[-1]) == (0, 1, 0, 0, 1, 1)


@pytest.mark.parametrize("files, number", [
    ({"generation_config": {"eos_token_id": [2, 1]}, "config": {"eos_token_id": 1}}, 2), ({"generation_config": {}, "config": {"eos_token_id": 1}}, 1),
    ({"generation_config": {"eos_token_id": []}, "tokenizer_config": {"eos_token": "<s>"}}, 0), ({"config": {"eos_token_id": None}}, 2),
    ({"tokenizer_config": {"eos_token": {"content": "</s>"}}}, 1), ({}, 2)])
def test_the_end_token(tmp_path, files, number):
    parts = made_tokenizers.made("gpt2", ["<s>", "</s>", "<|endoftext|>"])
    assert tokenizer.read_folder(made_tokenizers.write(tmp_path / "model", parts, **files)).end == [number]


def test_as_many_bits_as_the_ids_need(tmp_path):
    """The header has the version and the checksum."""
    parts = made_tokenizers.made("gpt2")
    for most, width in ((65_535, 2), (65_536, 4)):
        last = {**parts["added_tokens"][0], "id": most, "content": "<last>"}
        folder = made_tokenizers.write(tmp_path / str(most), {**parts, "added_tokens": [*parts["added_tokens"], last]}, config={"eos_token_id": most})
        tokens = documents_of(folder, tmp_path / "texts.jsonl", ["some text"], tmp_path / "out")
        data = (tmp_path / "out/train_000001.bin").read_bytes()
        header, checksum = np.frombuffer(data[:1024], "<u4"), tokenizer.read_folder(folder).checksum
        assert header.tolist() == [*{2: (20240520, 1), 4: (20240801, 7)}[width], len(tokens), checksum % 2**32, checksum >> 32] + [0] * 251
        assert len(data) == 1024 + width * len(tokens) and tokens[-1] == most
        # The trainer reads it.
        assert program.run("--model=mini", "--layers=1", f"--vocab-size={most + 1}", f"--train-data={tmp_path}/out/train_*.bin", "--device=cpu",
                           "--seq-len=4", "--steps=0", "--global-batch-tokens=4", f"--out-dir={tmp_path}/run").returncode == 0


def test_the_checksum_is_of_what_the_tokenizer_computes():
    parts = {"added_tokens": [{"id": 3, "content": "<end>", "special": True, "normalized": True}, {"id": 1, "content": "ü", "lstrip": True, "single_word": True}],
             "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
             "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                 {"type": "Split", "pattern": {"Regex": r"\p{N}"}, "behavior": "Isolated", "invert": False},
                 {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"String": "é"}, "behavior": "Isolated", "invert": False}]},
                 {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]},
             "post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, made_tokenizers.begins_with("<end>", 3)]},
             "model": {"type": "BPE", "vocab": {"Ġa": 2, "Ġ": 0, "ü": 1, "a": 4, "東": 5}, "merges": ["Ġ a"], "ignore_merges": True}}
    words = tokenizer_checksum.GPT2_WORDS
    text = (b"tokens\n0 t 1  \n1 alw 2 \xc3\xbc\n2 t 2  a\n3 sn 5 <end>\n4 t 1 a\n5 t 3 \xe6\x9d\xb1\nmerges\n0 4\nignore_merges\nwords\nnfc\n"
            b"split 5 \\p{N}\nstring 2 \xc3\xa9\ndigits 1\n" + f"split {len(words)} {words}\nbegin 3\n".encode())
    assert tokenizer_checksum.text(parts) == text
    # Written in another way.
    other = {**parts, "version": "1.0", "normalizer": {"type": "NFC"}, "model": {**parts["model"], "merges": [["Ġ", "a"]], "dropout": None}}
    assert tokenizer_checksum.checksum(other) == tokenizer_checksum.checksum(parts)
    other["model"]["merges"] = []
    assert tokenizer_checksum.checksum(other) != tokenizer_checksum.checksum(parts)


def test_gpt2s_files_are_its_tokenizer(tmp_path):
    """Both have the checksum of the program's tests (of XXH3-64, so it does not change)."""
    made_tokenizers.require()
    own = tokenizer.read_folder(gpt2_bpe.require_files())
    assert (own.name, f"{own.checksum:016x}", own.vocabulary, own.begin, own.end) == ("gpt2", "6164ebef8f263408", 50257, [], [50256])
    folder = made_tokenizers.write(tmp_path / "other", own.parts)
    assert tokenizer.read_folder(folder).checksum == own.checksum


def test_any_number_of_processes_and_another_start(tmp_path, seed):
    parts, numbers = made_tokenizers.made("llama3"), random.Random(seed)
    folder = made_tokenizers.write(tmp_path / "model", parts)
    path = tmp_path / "text.txt"
    path.write_bytes(b"".join(drawn_text(numbers) for _ in range(4_000)).replace(b"\0", b"0"))
    options = [path, "--tokenizer", folder, "--shard-tokens", 300_000]
    for processes in (1, 2):
        run_here("text.py", *options, "--out", tmp_path / str(processes), processes=processes)
    assert results_in(tmp_path / "1") == results_in(tmp_path / "2")
    (tmp_path / "1/train_000002.bin").unlink()
    run_here("text.py", *options, "--out", tmp_path / "1")
    assert results_in(tmp_path / "1") == results_in(tmp_path / "2")
    # Another tokenizer in the folder.
    del parts["model"]["merges"][-1]
    made_tokenizers.write(folder, parts)
    assert "has shards of another run, with checksum " in refused_here("text.py", *options, "--out", tmp_path / "1")


def changed(**changes):
    return lambda parts: json.dumps({**parts, **changes})


@pytest.mark.parametrize("spoil, line", [
    (lambda parts: json.dumps(parts)[:-100], "is not a JSON object; get the folder again"),
    (lambda parts: "[]", "is not a JSON object; get the folder again"),
    (lambda parts: "{}", "is damaged ("),
    (lambda parts: json.dumps({**parts, "model": {**parts["model"], "merges": [["no", "token"]]}}), "is damaged ("),
    (lambda parts: json.dumps({**parts, "model": {"type": "Unigram", "vocab": []}}), "has a model of type Unigram, but the trainer knows byte-level BPE alone"),
    (lambda parts: json.dumps({**parts, "model": {**parts["model"], "byte_fallback": True}}), "has a BPE with byte_fallback"),
    (changed(normalizer={"type": "Lowercase"}), "has a normalizer of type Lowercase"),
    (changed(pre_tokenizer={"type": "Metaspace"}), "has a pre-tokenizer of type Metaspace"),
    (changed(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True}), "has a pre-tokenizer of type ByteLevel with add_prefix_space"),
    (lambda parts: json.dumps({**parts, "model": {**parts["model"], "vocab": {**parts["model"]["vocab"], "a": 0}}}), "is damaged (two tokens have one id); get it again"),
    (changed(pre_tokenizer=None), "has no pre-tokenizer of type ByteLevel"),
    (lambda parts: json.dumps(parts).replace("<|endoftext|>", "<s>"), 'names no end token, which stands behind each document; write {"eos_token_id": ID} into its'),
])
def test_wrong_tokenizers(tmp_path, spoil, line):
    folder = made_tokenizers.write(tmp_path / "model", made_tokenizers.made("gpt2"))
    (folder / "tokenizer.json").write_text(spoil(json.loads((folder / "tokenizer.json").read_text())))
    (tmp_path / "text.txt").write_text("some text")
    assert line in refused_here("text.py", tmp_path / "text.txt", "--out", tmp_path / "out", "--tokenizer", folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("files, line", [
    ({"generation_config": {"eos_token_id": 999}}, "model names the token 999, which its tokenizer does not have"),
    ({"config": {"eos_token_id": [2.0]}}, "config.json: eos_token_id is [2.0], which is no token and no list of them"),
    ({"generation_config": {"eos_token_id": True}}, "generation_config.json: eos_token_id is true, which is no token and no list of them"),
    ({"tokenizer_config": {"eos_token": "<eos>"}}, "tokenizer_config.json: eos_token is <eos>, which is no token of the tokenizer"),
    ({"config": []}, "config.json is not a JSON object"),
    ({"config": {"vocab_size": 100}}, "config.json is 100; give the model's own tokenizer"),
])
def test_wrong_end_tokens(tmp_path, files, line):
    folder = made_tokenizers.write(tmp_path / "model", made_tokenizers.made("gpt2"), **files)
    (tmp_path / "text.txt").write_text("some text")
    assert line in refused_here("text.py", tmp_path / "text.txt", "--out", tmp_path / "out", "--tokenizer", folder)
    assert not (tmp_path / "out").exists()


def test_without_the_library(tmp_path, monkeypatch):
    """Bytes need none."""
    (tmp_path / "text.txt").write_text("some text, enough for a tenth")
    monkeypatch.setattr(tokenizer, "why_not", lambda module: f"is not installed; {modules.REMEDY}")
    monkeypatch.setattr(tokenizer_training, "why_not", tokenizer.why_not)
    for option in (["--tokenizer", "gpt2"], ["--tokenizer", tmp_path], ["--train-tokenizer", "300"]):
        assert "needs the Python module tokenizers, which is not installed; run `make deps`" in refused_here(
            "text.py", tmp_path / "text.txt", "--out", tmp_path / "out", *option)
    assert not (tmp_path / "out").exists()
    run_here("text.py", tmp_path / "text.txt", "--out", tmp_path / "out", *BYTES)


# ---- Training one


def test_a_tokenizer_is_trained_on_the_training_part(tmp_path, capsys):
    made_tokenizers.require()
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_text("the king and the queen said what they said. " * 90 + "QQZZ" * 110)  # the last tenth is for validation
    options = [path, "--train-tokenizer", 280, "--out", out]
    run_here("text.py", *options)
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith(f"train with: ./train_gpt --model mini --vocab-size 280 --tokenizer {out} ")
    parts = json.loads((out / "tokenizer.json").read_text())
    assert len(parts["model"]["vocab"]) == 280 and len(parts["model"]["merges"]) == 280 - 257
    assert "the" in parts["model"]["vocab"] and not any("Q" in token and len(token) > 1 for token in parts["model"]["vocab"])
    own = tokenizer.read_folder(out)
    text = path.read_text()
    assert own.library.decode([*tokens_of(out, "train"), *tokens_of(out, "val")], skip_special_tokens=True) == text
    assert own.end == [parts["model"]["vocab"]["<|endoftext|>"]] and len(own.encode([bytes(range(128))])[0]) == 128
    first = results_in(out)
    # The same command continues with the same tokenizer, and a second time makes the same.
    (out / "val_000000.bin").unlink()
    run_here("text.py", *options)
    assert results_in(out) == first
    run_here("text.py", *options, "--overwrite", processes=2)
    assert results_in(out) == first
    assert "with train_tokenizer 280 instead of 270" in refused_here("text.py", *options[:2], 270, *options[3:])
    assert results_in(out) == first
    # In another folder it is a tokenizer like any other.
    run_here("text.py", path, "--tokenizer", out, "--out", tmp_path / "other")
    assert (tmp_path / "other/train_000001.bin").read_bytes() == first["train_000001.bin"]
    assert read_shard(out / "train_000001.bin").max() < 280


def test_tokenizers_that_cannot_be_trained(tmp_path):
    made_tokenizers.require()
    (tmp_path / "text.txt").write_text("a text of some letters")
    options = ["text.py", tmp_path / "text.txt", "--out", tmp_path / "out"]
    assert "'256' is not a whole number of 257 to 16,777,216" in refused_here(*options, "--train-tokenizer", 256)
    assert "and --tokenizer bytes names another; give one of them" in refused_here(*options, "--train-tokenizer", 300, *BYTES)
    assert not (tmp_path / "out").exists()
    assert "the text to train on gives only 257 tokens; give a smaller number or more text" in refused_here(*options, "--train-tokenizer", 300)
    assert not [name for name in results_in(tmp_path / "out") if not name.startswith(".")]
