"""The scripts of data/: the tokens that they make from documents, and how they go on after an interruption."""

import hashlib
import json
import multiprocessing
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time

import dataset_scripts
import file_server
import gpt2_bpe
import made_tokenizers
import numpy as np
import pytest
from dataset_scripts import (BYTES, hub_of, manifest_of, random_text, read_shard, refused_here, results_in, run, run_dying, run_here,
                             tokens_of)
from file_server import Hang

import program

import common  # noqa: E402  (of data/, where dataset_scripts looks)
import download  # noqa: E402
import encode  # noqa: E402
import shards  # noqa: E402
import tokenizer  # noqa: E402


@pytest.fixture
def texts(tmp_path, seed):
    """Two text files."""
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for i, path in enumerate(paths):
        path.write_bytes(random_text(seed + i, 6000))
    return paths


def require_gpt2():
    """The folder of GPT-2's two files, for the library that reads them."""
    made_tokenizers.require()
    return gpt2_bpe.require_files()


# ---- Tokens and shards


def test_bytes_are_the_text(texts, tmp_path):
    out = tmp_path / "out"
    run_here("text.py", *texts, "--out", out, *BYTES, "--shard-tokens", 1000)
    one, two = (path.read_bytes() for path in texts)
    both, place = one + two, (len(one) + len(two)) * 9 // 10
    while both[place] & 0xC0 == 0x80:
        place += 1
    assert bytes(tokens_of(out, "train").astype(np.uint8)) == one + b"\n" + both[len(one):place]
    assert bytes(tokens_of(out, "val").astype(np.uint8)) == both[place:]
    names = [path.name for path in sorted(out.glob("*.bin"))]
    train = len([name for name in names if name.startswith("train")])
    assert names == [f"train_{i:06}.bin" for i in range(1, train + 1)] + [f"val_{i:06}.bin" for i in range(len(names) - train)]
    assert [len(read_shard(out / name)) for name in names[:train - 1]] == [1000] * (train - 1)
    manifest = manifest_of(out)
    assert manifest["finished"] and manifest["tokens"] == {"train": len(tokens_of(out, "train")), "val": len(tokens_of(out, "val"))}
    assert {entry["file"]: entry["sha256"] for entry in manifest["shards"]} == {
        name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}
    assert [entry["sha256"] for entry in manifest["files"]] == [hashlib.sha256(text).hexdigest() for text in (one, two)]


def test_divided_within_a_document(tmp_path):
    """Not within a character. The end of text is behind the document, not where it is divided."""
    path, out = tmp_path / "text.txt", tmp_path / "out"
    path.write_text("a" + "é" * 33)  # nine tenths of its 67 bytes are 60, in the middle of the 30th é
    run_here("text.py", path, "--out", out, *BYTES)
    assert bytes(tokens_of(out, "val").astype(np.uint8)).decode() == "é" * 3
    folder = require_gpt2()
    run_here("text.py", path, "--out", out, "--tokenizer", folder, "--overwrite")
    assert 50256 not in tokens_of(out, "train") and tokens_of(out, "val").tolist().index(50256) == len(tokens_of(out, "val")) - 1


def test_divided_in_the_last_character_of_a_document(tmp_path):
    path, out = tmp_path / "texts.jsonl", tmp_path / "out"
    path.write_text('{"text": "一"}\n' * 11)  # nine tenths of 33 bytes are 29, in the tenth character
    run_here("text.py", path, "--out", out, *BYTES)
    assert [bytes(tokens_of(out, split).astype(np.uint8)).decode() for split in ("train", "val")] == ["\n".join("一" * 10), "一"]


def test_a_text_of_one_character_has_no_validation(tmp_path):
    (tmp_path / "text").write_text("一")
    run_here("text.py", tmp_path / "text", "--out", tmp_path / "out", *BYTES)
    assert manifest_of(tmp_path / "out")["tokens"] == {"train": 3, "val": 0}


def test_a_byte_order_mark_is_no_text(tmp_path, capsys):
    """At the beginning of a file. In a .jsonl file it is no part of the first object."""
    mark, text = b"\xef\xbb\xbf", b"a text of some letters" * 5
    for name, content in (("one.txt", mark + text), ("two.txt", text + mark), ("three.jsonl", mark + b'{"text": "line"}\n')):
        (tmp_path / name).write_bytes(content)
    files = [tmp_path / name for name in ("one.txt", "two.txt", "three.jsonl")]
    run_here("text.py", *files, "--out", tmp_path / "out", *BYTES, "--val-fraction", 0)
    assert bytes(tokens_of(tmp_path / "out", "train").astype(np.uint8)) == text + b"\n" + text + mark + b"\nline"
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: {tmp_path}/{name} begins with a UTF-8 byte order mark, which is skipped" for name in ("one.txt", "three.jsonl")]


def test_documents_of_gpt2(tmp_path, seed):
    folder = require_gpt2()
    out, path = tmp_path / "out", tmp_path / "texts.jsonl"
    documents = [random_text(seed + i, 300).decode() for i in range(20)] + ["", "a \ud800 b <|endoftext|>"]
    path.write_text("".join(json.dumps({"body": text}) + "\n\n" for text in documents))
    run_here("text.py", path, "--field", "body", "--out", out, "--tokenizer", folder, "--val-fraction", 0)
    documents[-1] = documents[-1].replace("\ud800", "\ufffd")
    library = tokenizer.read_folder(folder).library
    wanted = [np.array([*library.encode(text).ids, 50256]) for text in documents if text]
    assert np.array_equal(tokens_of(out, "train"), np.concatenate(wanted))
    assert not list(out.glob("val*")) and max(library.encode("<|endoftext|>").ids) < 50256


def test_names_need_not_be_utf8(texts, tmp_path):
    """Also where the system's encoding is strict, as in most languages' locales."""
    odd = os.fsdecode(b"caf\xe9")
    folder = tmp_path / odd
    folder.mkdir()
    texts[0].rename(folder / odd)
    strict = {"env": os.environ | {"PYTHONIOENCODING": "utf-8:strict"}, "errors": "surrogateescape"}
    first = run("text.py", folder / odd, "--out", folder / "out", *BYTES, **strict)
    assert f"--train-data '{folder}/out/train_*.bin'" in first.stdout
    # The names in the manifest are UTF-8 for every reader. One of an earlier version, with halves of surrogate pairs, is
    # accepted too.
    manifest = folder / "out/manifest.json"
    json.loads(manifest.read_bytes())["settings"]["source"].encode()
    assert json.loads(manifest.read_bytes())["files"][0]["file"].endswith("/caf\\xe9/caf\\xe9")
    for written in (manifest.read_text(), manifest.read_text().replace("\\\\xe9", "\\udce9")):
        manifest.write_text(written)
        assert "is already complete" in run("text.py", folder / odd, "--out", folder / "out", *BYTES, **strict).stdout
    refused = run("text.py", folder / "none", *BYTES, check=False, **strict)
    assert refused.stderr == f"error: cannot read {folder}/none: No such file or directory\n"


def test_any_number_of_processes(tmp_path, seed, monkeypatch):
    path = tmp_path / "text.jsonl"
    text = random_text(seed, 300_000).decode()
    path.write_text("".join(json.dumps({"text": text[i:] + text[:i]}) + "\n" for i in range(12)))
    encode_in_order, at_work = encode.encode_in_order, {}

    def counted(*arguments):
        for each in encode_in_order(*arguments):
            at_work[arguments[-1]] = max(at_work.get(arguments[-1], 0), len(multiprocessing.active_children()))
            yield each

    monkeypatch.setattr(encode, "encode_in_order", counted)
    outs = [tmp_path / str(processes) for processes in (1, 2)]
    for out in outs:
        run_here("text.py", path, "--out", out, *BYTES, "--shard-tokens", 1_000_000, processes=int(out.name))
    assert at_work == {1: 0, 2: 2}
    assert results_in(outs[0]) == results_in(outs[1])
    assert [entry["tokens"] for entry in manifest_of(outs[0])["shards"][:2]] == [1_000_000] * 2


def test_standard_input(texts, tmp_path):
    out, text = tmp_path / "out", texts[0].read_bytes()
    with open(texts[0]) as stdin:
        run("text.py", "-", "--out", out, *BYTES, "--val-fraction", "0.5", stdin=stdin)
    assert bytes(np.concatenate([tokens_of(out, "train"), tokens_of(out, "val")]).astype(np.uint8)) == text
    assert abs(len(tokens_of(out, "val")) - len(text) / 2) <= 4


@pytest.mark.parametrize("tokenizer, fraction", [("bytes", "0.1"), ("bytes", "0.5"), ("gpt2", "0.1")])
def test_standard_input_is_read_as_far_as_the_limit(tmp_path, tokenizer, fraction):
    """The input never ends."""
    options = ["--tokenizer", require_gpt2()] if tokenizer == "gpt2" else BYTES
    with subprocess.Popen(["yes", "It was a dark and stormy night."], stdout=subprocess.PIPE) as endless:
        run("text.py", "-", "--out", tmp_path / "out", *options, "--limit-tokens", 20_000, "--val-fraction", fraction, stdin=endless.stdout)
        endless.stdout.close()
    assert manifest_of(tmp_path / "out")["tokens"] == {"train": 18_000, "val": 2_000}
    assert (tmp_path / "out/download/stdin.txt").stat().st_size <= 20_000 * 16 / 0.9 + 1


def test_a_limit_without_validation_is_for_training(tmp_path):
    (tmp_path / "text").write_text(1000 * "a")
    for fraction, tokens in ((0, {"train": 100, "val": 0}), (0.5, {"train": 90, "val": 10})):
        run_here("text.py", tmp_path / "text", "--out", tmp_path / "out", *BYTES, "--limit-tokens", 100, "--val-fraction", fraction, "--overwrite")
        assert manifest_of(tmp_path / "out")["tokens"] == tokens


def test_ctrl_c_during_the_imports_is_one_line(texts, tmp_path):
    (tmp_path / "tqdm.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    done = run("text.py", texts[0], "--out", tmp_path / "out", check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "\ninterrupted\n")


def test_trained_on(texts, tmp_path, capsys):
    """Bytes in shards train like the text itself. GPT-2's tokens fit its vocabulary."""
    text = texts[0]
    text.write_bytes(text.read_bytes().decode().encode("ascii", "replace"))
    run_here("text.py", text, "--out", tmp_path / "bytes", *BYTES)
    options = [*program.SMALL, "--steps=2", "--val-every=2", "--global-batch-tokens=64"]
    of_text = program.train(tmp_path / "of-text", f"--train-data={text}", *options)
    data = lambda name: [f"--train-data={tmp_path / name}/train_*.bin", f"--val-data={tmp_path / name}/val_*.bin"]  # noqa: E731
    of_shards = program.train(tmp_path / "of-shards", *data("bytes"), *options)
    assert of_text.losses == of_shards.losses and of_text.lines[-1]["val_loss"] == of_shards.lines[-1]["val_loss"]
    folder = shutil.copytree(require_gpt2(), tmp_path / "bpe")
    run_here("text.py", text, "--out", tmp_path / "gpt2", "--tokenizer", folder)
    last = capsys.readouterr().out.rstrip().splitlines()[-1]
    assert last.startswith(f"train with: ./train_gpt --model gpt2 --tokenizer {shlex.quote(str(folder.resolve()))} --train-data ")
    run = program.train(tmp_path / "of-gpt2", *data("gpt2"), *options, "--vocab-size=50257")
    assert len(run.losses) == 2 and abs(run.losses[0] - np.log(50257)) < 0.5


# ---- Resuming


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(tokenizer, "PIECE", 300)
    monkeypatch.setattr(encode, "BATCH", 500)


@pytest.mark.parametrize("where", ["sync_folder", "append"])
def test_killed_anywhere(texts, tmp_path, small_pieces, monkeypatch, where):
    """Killed at every place where something was just written, and started again: the result has the same bytes."""
    options = [*texts, *BYTES, "--shard-tokens", 1500]
    run_here("text.py", *options, "--out", tmp_path / "whole")
    whole = results_in(tmp_path / "whole")
    target = shards if where == "sync_folder" else shards.ShardWriter
    original = getattr(target, where)

    def die_at(count):
        def die():
            calls = iter(range(count))

            def dying(*arguments):
                original(*arguments)
                if next(calls, None) is None:
                    os._exit(9)
            setattr(target, where, dying)
        return die

    count, finished = 0, False
    while not finished:
        out = tmp_path / f"killed-{count}"
        finished = run_dying(die_at(count), "text.py", *options, "--out", out)
        for name, data in results_in(out).items():
            assert name.startswith(".") or name == "manifest.json" or data == whole[name]  # whole or absent
        if count % 3 == 0:  # killed twice
            run_dying(die_at(count // 2), "text.py", *options, "--out", out)
        run_here("text.py", *options, "--out", out)
        assert results_in(out) == whole
        shutil.rmtree(out)
        count += 1
    assert count > len(whole)


def children_of(process):
    with open(f"/proc/{process}/task/{process}/children") as file:
        return [int(child) for child in file.read().split()]


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds * program.PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_while_downloading(tmp_path, seed, parquet_of_lines, number):
    """A signal arrives while the second file is downloaded and tokenizing processes wait. Then the rest is downloaded."""
    text = random_text(seed, 200_000).decode()
    tokens_of_first = sum(len(text[i:].encode()) + 1 for i in range(10)) - 1
    files = {"000_00000.parquet": parquet_of_lines([text[i:] for i in range(10)]), "001_00000.parquet": parquet_of_lines([text[:100_000]] * 2)}
    arrived = 2 * download.BLOCK
    out, hang = tmp_path / "out", Hang(arrived)
    with file_server.serving(hub_of("HuggingFaceFW/fineweb-edu", files, "sample/10BT/")) as server:
        options = ["--mirror", server.url, *BYTES, "--shard-tokens", 400_000]
        server.files["/store/001_00000.parquet"].faults = [hang]
        process = dataset_scripts.start("fineweb.py", *options, "--out", out, "--processes", 2, start_new_session=True)
        assert hang.reached.wait(60 * program.PATIENCE)
        wait_until(lambda: (out / "download/001_00000.parquet.part").exists() and
                   (out / "download/001_00000.parquet.part").stat().st_size == arrived)
        children = children_of(process.pid)
        assert len(children) >= 2
        # A terminal sends Ctrl-C to all of them; a user's `kill` sends its signal to one.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        errors = process.communicate(timeout=60 * program.PATIENCE)[1]
        hang.released.set()
        assert process.returncode == {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}[number]
        if number != signal.SIGKILL:  # after which Python's own helper may print something
            assert errors.strip() == ("interrupted; the same command continues from here" if number == signal.SIGINT else "")
        wait_until(lambda: not any(map(is_alive, children)))
        assert number == signal.SIGKILL or not list(out.glob(".*.tmp"))
        assert not manifest_of(out)["finished"] and len(manifest_of(out)["shards"]) == tokens_of_first // 400_000
        server.requests.clear()
        run_here("fineweb.py", *options, "--out", out)
        assert ("/store/001_00000.parquet", f"bytes={arrived}-") in server.requests
        assert not any("000_00000" in path or "/api/" in path for path, _ in server.requests)
        run_here("fineweb.py", *options, "--out", tmp_path / "whole")
    assert results_in(out) == results_in(tmp_path / "whole")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_while_processes_start(tmp_path, seed, number):
    """None of them prints anything about it."""
    path = tmp_path / "text.txt"
    path.write_bytes(random_text(seed, 100_000) * 40)
    process = dataset_scripts.start("text.py", path, "--out", tmp_path / "out", *BYTES, "--processes", 2, start_new_session=True)
    wait_until(lambda: len(children_of(process.pid)) >= 2)  # one is Python's own helper
    os.killpg(process.pid, number)
    errors = process.communicate(timeout=60 * program.PATIENCE)[1]
    says = "interrupted; the same command continues from here" if number == signal.SIGINT else ""
    assert (process.returncode, errors.strip()) == (128 + number, says)


def test_finished_and_damaged(texts, tmp_path, capsys):
    out, options = tmp_path / "out", [*texts, *BYTES, "--shard-tokens", 1000, "--out", tmp_path / "out"]
    run_here("text.py", *options)
    whole = results_in(out)
    changed = (out / "train_000001.bin").stat().st_mtime_ns
    run_here("text.py", *options)
    assert "already complete, and its checksums are right" in capsys.readouterr().out
    assert (out / "train_000001.bin").stat().st_mtime_ns == changed
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"),
                   lambda path: path.write_bytes(path.read_bytes()[:-2])):
        damage(out / "train_000003.bin")
        run_here("text.py", *options)
        assert "train_000003.bin is missing or damaged: writing it and the later shards again" in capsys.readouterr().out
        assert results_in(out) == whole
        assert (out / "train_000001.bin").stat().st_mtime_ns == changed
    run_here("text.py", *texts, *BYTES, "--out", out, "--overwrite")
    assert sorted(path.name for path in out.glob("*.bin")) == ["train_000001.bin", "val_000000.bin"]


def test_refused(texts, tmp_path, monkeypatch, capsys):
    out, options = tmp_path / "out", [*texts, *BYTES, "--out", tmp_path / "out"]
    run_here("text.py", *options)
    assert "with shard_tokens 100000000 instead of 5000" in refused_here("text.py", *options, "--shard-tokens", 5000)
    assert "with limit_tokens None instead of 500" in refused_here("text.py", *options, "--limit-tokens", 500)
    texts[1].write_bytes(b"other")
    assert f"{texts[0]}, {texts[1]}: the text has changed since the first shards in {out}; give --overwrite" in refused_here("text.py", *options)
    assert "with source " in refused_here("text.py", texts[0], *options[2:])
    # The same files under other folder names are the same text.
    run_here("text.py", *options, "--overwrite")
    monkeypatch.chdir(tmp_path)
    run_here("text.py", *(os.path.relpath(path) for path in texts), *options[2:])
    assert "is already complete" in capsys.readouterr().out.splitlines()[-3]
    (out / "manifest.json").write_text('{"settings": 1}')
    assert "manifest.json is damaged; give --overwrite" in refused_here("text.py", *options)
    (out / "manifest.json").unlink()
    assert "has train_000001.bin, which is not listed in manifest.json" in refused_here("text.py", *options)
    with shards.locked(out):
        assert "another run is writing into" in refused_here("text.py", *options)


def test_the_printed_folder_is_one_to_the_trainer_too(texts, tmp_path, capsys):
    """The trainer treats brackets as a pattern."""
    run_here("text.py", *texts, "--out", tmp_path / "a [6] * ?", *BYTES)
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("train with: ./train_gpt"))
    assert "  validation  " in program.run(*command, "--steps=0", "--device=cpu").stdout


def test_a_pipe_is_refused_before_it_is_read(tmp_path):
    ours, theirs = os.pipe()
    os.write(theirs, b"A text.")
    os.close(theirs)
    path = f"/dev/fd/{ours}"  # bash makes this from <(cat text)
    assert f"{path} can be read only once" in refused_here("text.py", path, "--out", tmp_path / "out", *BYTES)
    with open(ours, "rb") as pipe:
        assert pipe.read() == b"A text."


@pytest.mark.parametrize("root, shown", [(".", "out of mine"), ("elsewhere", "{}/out of mine")])
def test_the_command_that_is_printed_works_in_the_root(texts, tmp_path, monkeypatch, capsys, root, shown):
    """In any current folder, and for any name of its folder there."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(common, "ROOT", (tmp_path / root).resolve())
    run_here("text.py", *texts, "--out", "../out of mine", *BYTES)
    folder = shown.format(tmp_path)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"train with: ./train_gpt --model mini --train-data '{folder}/train_*.bin' --val-data '{folder}/val_*.bin'"


@pytest.mark.parametrize("options, line", [
    ([], "FILE; --help lists the options"),
    # Before the search for the vocabulary, which would be downloaded.
    (["nowhere.txt", "--tokenizer", "FOLDER"], "cannot read nowhere.txt: No such file or directory"),
    (["FOLDER"], "Is a directory"),
    (["-", "-"], "standard input (-) is given twice"),
    (["EMPTY"], "the files have no text"),
    (["BAD.jsonl"], "line 2: not JSON"),
    (["DEEP.jsonl"], "line 2: not JSON"),
    (["ONE"], "and none are left to train on; give more text"),
    (["TEXT", "--val-fraction", "0.9999"], "and none are left to train on; give more text, or --overwrite and a smaller --val-fraction"),
    (["/dev/null"], "/dev/null can be read only once, but files are read several times; give -"),
    (["GOOD.jsonl", "--field", "body"], "line 1: no text in the field 'body' (its fields: text)"),
    (["NULL.jsonl"], "line 2: the field 'text' is not text but null"),
    (["TEXT", "--shard-tokens", "3e9"], "'3e9' is not a whole number of 16 to 2,147,483,647"),
    (["TEXT", "--shard-tokens", "1e99999999999"], "is not a whole number"),
    (["TEXT", "--limit-tokens", "1.5"], "'1.5' is not a whole number of 20 or more"),
    (["TEXT", "--processes", "0"], "is not a whole number of 1 to 1,024"),
    (["TEXT", "--val-fraction", "1"], "is not a fraction from 0 to less than 1"),
    (["TEXT", "--out", "TEXT/x"], "cannot write into this folder (Not a directory); give another one"),
    (["TEXT", "--tokenizer", "FOLDER"], "the folder has no tokenizer.json, and not both of encoder.json and vocab.bpe"),
    (["TEXT", "--tokenizer", "BPE"], "is not GPT-2's"),
    (["TEXT", "--tokenizer", "word"], "--tokenizer word: the folder has no tokenizer.json"),
])
def test_wrong_options(tmp_path, options, line):
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "EMPTY").touch()
    (tmp_path / "ONE").write_text("1")
    (tmp_path / "TEXT").write_text("a text of some letters")
    (tmp_path / "BAD.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "DEEP.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000 + "\n")
    (tmp_path / "GOOD.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "NULL.jsonl").write_text('{"text": "a"}\n{"text": null}\n')
    (tmp_path / "BPE").mkdir()
    for name in ("encoder.json", "vocab.bpe"):
        (tmp_path / "BPE" / name).write_text("{}")
    options = [str(tmp_path / option) if option.split("/")[0].split(".")[0].isupper() else option for option in options]
    out = [] if "--out" in options else ["--out", tmp_path / "out"]
    assert line in refused_here("text.py", *BYTES, *out, *options)


def test_full_disk(texts, tmp_path):
    """No file may exceed 8 KiB. This acts like a full disk: one line, and no half-written file is visible."""
    out = tmp_path / "out"
    limited = run("text.py", *texts, *BYTES, "--out", out, "--processes", 1, "--shard-tokens", 10_000, check=False,
                  preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192)))
    assert limited.returncode == 1
    assert limited.stderr == f"error: {out / 'train_000001.bin'}: File too large; after fixing that, the same command continues from here\n"
    assert list(results_in(out)) == ["manifest.json"]
    run_here("text.py", *texts, *BYTES, "--out", out, "--shard-tokens", 10_000)


def test_python_without_the_modules(tmp_path):
    """Another interpreter has them, and the script continues with that one."""
    result = subprocess.run([sys.executable, "-S", dataset_scripts.DATA / "text.py", "--help"], capture_output=True, text=True)
    assert result.returncode == 0 and "--val-fraction" in result.stdout, result.stderr


def test_wide_tokens_are_not_cut(tmp_path):
    with shards.ShardWriter(tmp_path / "train_000001.bin", 10) as writer:
        writer.append(np.array([65_535], np.uint16))
        with pytest.raises(AssertionError):
            writer.append(np.array([65_536], np.int32))


def test_what_is_no_text_is_refused_and_capitals_are_json_lines_too(tmp_path):
    for name, text in (("wide.txt", "A story.".encode("utf-16")), ("a.gz", b"\x1f\x8b\x08\0\0")):
        (tmp_path / name).write_bytes(text)
        assert "has NUL bytes" in refused_here("text.py", tmp_path / name, "--out", tmp_path / "out", *BYTES)
    (tmp_path / "A.JSONL").write_text('{"text": "one"}\n{"text": "two"}\n')
    run_here("text.py", tmp_path / "A.JSONL", "--out", tmp_path / "lines", *BYTES, "--val-fraction", 0)
    assert bytes(tokens_of(tmp_path / "lines", "train").astype("uint8")) == b"one\ntwo"
