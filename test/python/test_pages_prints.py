"""Text that the pages show as printed is what is printed: character by character if it does not depend on the machine.
Otherwise every number is replaced by N first.

The blocks of text, by their first lines:
    train_gpt             the quickstart's header and table
    step                  some lines of that table
    data/tinyshakespeare  the first dataset
    link train_gpt        the Makefile's line (its content depends on the machine)
    train_gpt ...: runs/  a text that is continued
    a frame               the live view
    1f1b                  a schedule's drawing
    layernorm_forward     the kernel lab (tested in test_pages.py, which builds it)
    one step              the list of a step
    train_gpt.cu          how the code is laid out
long_fine_tuning.py has the tests of docs/fine-tuning.md.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from made_runs import ABOUT, SCRIPTS, falling, full_lines, write_lines

import file_server
import gpt2_bpe
import made_tokenizers
import program
from pages import TEXTS, blocks, printed, shape

ROOT = program.ROOT
TESTED = ("train_gpt 0.1.0 (commit ", "step       loss ", "data/tinyshakespeare/", "link train_gpt with ", "train_gpt 0.1.0: runs/", "╭─ quickstart ",
          "1f1b, 4 stages, ", "layernorm_forward in ", "one step of this rank: ", "train_gpt.cu ")


def rows_of(lines):
    """A header's rows by name, each in one line."""
    rows, name = {}, ""
    for line in lines:
        if re.match("  [a-z]", line):
            name, text = line.split(maxsplit=1)
            rows[name] = text
        elif name and line.startswith("     "):
            rows[name] += " " + line.strip()
        else:
            name = ""
    return rows


def test_every_block_of_printed_text_has_a_test():
    untested = [f"{place}: {lines[0]}" for place, how, lines in blocks() if how == "prints" and not lines[0].startswith(TESTED)
                and not place.startswith("docs/fine-tuning.md:")]
    assert not untested, "\n".join(untested)


def test_the_quickstart(tmp_path):
    block = printed("train_gpt 0.1.0 (commit ")
    out = program.run("--steps=1", "--val-batches=1", "--sample-tokens=0", f"--out-dir={tmp_path}", "--device=cpu", ranks=2, env={"OMP_NUM_THREADS": "1"}).stdout
    shown, now = ({name: text for name, text in rows_of(lines).items() if "/" not in name} for lines in (block, out.splitlines()))
    assert list(shown) == list(now)
    exact = ["model", "parameters", "memory", "sends", "training", "baseline", "batch"]  # (memory: with a thread each)
    assert {name: shown[name] for name in exact} == {name: now[name] for name in exact}
    assert "   ".join(next(line for line in block if line.startswith("step ")).split()) in ["   ".join(line.split()) for line in out.splitlines()]


def test_the_first_lines_are_those_of_the_whole_log():
    whole = printed("train_gpt 0.1.0 (commit ")
    assert [line for line in printed("step       loss ") if line not in whole] == []


def test_the_drawing_of_a_schedule():
    block = printed("1f1b, 4 stages, ")
    [command] = [commands[0] for _, _, commands in blocks() if commands[0].endswith("--steps 0 --pipeline-timeline")]
    lines = [line for line in program.run(*shlex.split(command)[1:], "--device=cpu").stdout.splitlines() if line.strip()]
    first = lines.index(block[0])
    assert lines[first:first + len(block)] == block


def test_the_memory_of_recomputation():
    rows = re.findall(r"^\| `(none|selective|block)` \|.*?\| ([\d.]+ MiB) \|", TEXTS["docs/memory.md"], re.MULTILINE)
    assert [name for name, _ in rows] == ["none", "selective", "block"]
    for name, memory in rows:
        out = program.run("--model=gpt2", "--dtype=bf16", "--micro-batch-size=4", "--global-batch-tokens=4096", f"--recompute={name}", "--steps=0",
                          "--device=cpu").stdout
        in_gib = f"{float(memory.split()[0]) / 1024:.1f} GiB"  # the header shows a GiB and more in this way
        assert re.search(rf"activations ({re.escape(memory)}|{re.escape(in_gib)}),", rows_of(out.splitlines())["memory"])


@pytest.mark.parametrize("ranks, stage", [(1, 0), (4, 2), (4, 3)])
def test_the_memory_of_gradients(ranks, stage):
    sentence = " ".join(TEXTS["docs/memory.md"].split()).split("For GPT-2 124M, a third of which is `wte`, ")[1]
    numbers = re.match(r"stage 0 keeps (\d+) MiB of gradients in place of (\d+), and stages 2 and 3 on four processes (\d+) in place of (\d+)\.", sentence)
    for dtype, said in zip(("bf16", "fp32"), numbers.group(1, 2) if stage == 0 else numbers.group(3, 4)):
        out = program.run("--model=gpt2", "--dtype=bf16", f"--gradient-dtype={dtype}", f"--zero-stage={stage}", "--micro-batch-size=1",
                          f"--global-batch-tokens={1024 * ranks}", "--steps=0", "--device=cpu", ranks=ranks).stdout
        kept = re.search(r"gradients ([\d.]+) MiB", rows_of(out.splitlines())["memory"]).group(1)
        assert round(float(kept)) == int(said), dtype


def test_a_text_that_is_continued(tmp_path):
    block = printed("train_gpt 0.1.0: runs/")
    folder = tmp_path / "runs/quickstart"
    program.run("--steps=1", "--val-batches=1", "--sample-tokens=0", f"--out-dir={folder}", "--device=cpu")
    done = program.run("--generate", "--prompt=Anna saw", "--resume", f"--out-dir={folder}", "--sample-tokens=150", "--device=cpu")
    first, last = done.stderr.replace(f"{tmp_path}/", "").splitlines()

    def without_device(line):
        return re.sub(r"(fpN), .*, N threads?$", r"\1", shape(line))

    assert without_device(first) == without_device(block[0]) and shape(last) == shape(block[-1])
    assert "834,304 parameters" in first and "834,304 parameters" in block[0]
    assert done.stdout.startswith("Anna saw") and block[1].startswith("Anna saw")


def test_the_first_dataset(tmp_path):
    made_tokenizers.require()
    for name in ("data", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=lambda folder, names: [name for name in names if os.path.isdir(f"{folder}/{name}")])
    (tmp_path / ".python").symlink_to(ROOT / ".python")
    (tmp_path / "data/gpt2_bpe").symlink_to(gpt2_bpe.require_files().resolve())
    text = gpt2_bpe.shared_text()
    with file_server.serving() as server:
        server.files["/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"] = file_server.File(text)
        done = subprocess.run([sys.executable, "data/tinyshakespeare.py", "--mirror", server.url], cwd=tmp_path, capture_output=True, text=True, timeout=120 * program.PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed("data/tinyshakespeare/")


def test_the_live_view(tmp_path):
    """The words of its frame, and what there is to see in each of its lines."""
    def words(text):
        return re.findall(r"[a-zA-Z][\w/]*", re.sub(r"\d[\d.,:]*( [kMG](?= |$))?", "", text))

    about = ABOUT | {"configuration": ABOUT["configuration"] | {"steps": 1200}}
    path = write_lines(tmp_path / "quickstart/metrics.jsonl", full_lines(falling(409), val_loss=1.3104), about)
    done = subprocess.run([sys.executable, SCRIPTS / "watch.py", "--once", path], capture_output=True, text=True,
                          env=os.environ | {"COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}, timeout=60 * program.PATIENCE)
    assert done.returncode == 0, done.stderr
    assert words(done.stdout) == words("\n".join(printed("╭─ quickstart ")))


def test_what_is_linked():
    """By the Makefile's own words."""
    [line] = printed("link train_gpt with ")
    parts = re.fullmatch(r"link train_gpt with CUDA [\d.]+ for sm_\w+( sm_\w+)* and later, NCCL, cuDNN", line)
    version = program.run("--version").stdout
    assert parts and ("no CUDA" in version or re.search(r"CUDA [\d.]+ for sm_\w+( sm_\w+)*( and later)?, (no )?NCCL, (no )?cuDNN", version)), version


def test_a_step():
    """Lines that end in ... are the beginnings of longer ones."""
    block = printed("one step of this rank: ")
    [command] = [commands[0] for _, _, commands in blocks() if "--print-step" in commands[0] and "--processes" in commands[0]]
    _, _, ranks, *options = shlex.split(command)
    now = [line for line in program.run(*options, "--device=cpu", ranks=int(ranks)).stdout.splitlines() if line.strip()]
    assert len(block) == len(now) > 15
    for shown, line in zip(block, now):
        assert line.startswith(shown.removesuffix(" ...")) and (shown == line or shown.endswith(" ...")), (shown, line)


def test_the_layout_of_the_code():
    named = {line.split()[0] for line in printed("train_gpt.cu ")}
    assert {path for path in named if path.startswith("llmc/")} == {f"llmc/{path.name}/" for path in (ROOT / "llmc").iterdir() if path.is_dir()}
    assert all((ROOT / path).exists() for path in named)
