"""A run whose data are not the same everywhere is refused: on the machines of a job, and when a run is resumed."""

import json

import numpy as np
import pytest

import program
from refused import one_error
from tcp_job import Job

MODEL = ["--layers=1", "--heads=2", "--channels=16", "--seq-len=16", "--global-batch-tokens=64", "--sample-tokens=0", "--val-batches=1"]
SHARDS = ["--train-data=d/train_*.bin", "--val-data=d/val.txt"]


def write_shard(path, tokens=200, seed=0):
    program.write_token_file(path, np.random.RandomState(seed).randint(0, 256, tokens))


def question(number):
    return json.dumps({"ctx": f"question {number}", "endings": ["one", "two", "three", "four"], "label": number % 4}) + "\n"


def write_data(folder):
    (folder / "d").mkdir(parents=True)
    for i in (1, 2):
        write_shard(folder / f"d/train_{i}.bin", seed=i)
    (folder / "d/val.txt").write_text("A text for validation. " * 10)
    (folder / "d/text.txt").write_text("A text to train on. " * 50)
    (folder / "d/h.jsonl").write_text("".join(map(question, range(4))))


def append(name, text):
    def change(folder):
        with open(folder / name, "a") as file:
            file.write(text)
    return change


# ---- The machines of a job


def train_apart(tmp_path, changes, *options):
    """A job with a process for each change, on machines of their own: in the folder of a rank the change was made."""
    job = Job(len(changes))
    for rank, change in enumerate(changes):
        folder = tmp_path / str(rank)
        write_data(folder)
        change(folder)
        job.start(rank, "env", "-C", folder, program.ROOT / program.PROGRAM, *MODEL, "--steps=2", "--out-dir=run", *options)
    return job.end()


def nothing(folder):
    pass


def refused(tmp_path, ended, words):
    assert set(ended.statuses) == {1} and ended.out == ""
    assert one_error(ended.err) == words
    assert not list(tmp_path.glob("*/run"))


SAME_FILES = "; give all processes the same files"
TEXT, QUESTIONS = ["--train-data=d/text.txt"], [*SHARDS, "--eval-hellaswag=d/h.jsonl"]
# For each case: the change on one machine, the options, and the message. It is about that machine, with two words that
# change places if it is about the other one.
OTHER_DATA = {
    "a shard is missing": (lambda folder: (folder / "d/train_2.bin").unlink(), SHARDS, "--train-data: train_2.bin is {}", ("missing", "additional")),
    "more shards": (lambda folder: [write_shard(folder / f"d/train_{i}.bin") for i in (3, 4)], SHARDS,
                    "--train-data: train_3.bin and 1 more are {}", ("additional", "missing")),
    "a longer shard": (lambda folder: write_shard(folder / "d/train_1.bin", 201), SHARDS,
                       "--train-data: train_1.bin has {} bytes instead of {}", ("1,426", "1,424")),
    "other tokens": (lambda folder: write_shard(folder / "d/train_2.bin", seed=7), SHARDS,
                     "--train-data: train_2.bin has other contents of the same length", ()),
    "a longer text": (append("d/text.txt", "more"), TEXT, "--train-data: text.txt has {} bytes instead of {}", ("1,004", "1,000")),
    "other validation text": (lambda folder: (folder / "d/val.txt").write_text("A text for Validation. " * 10), SHARDS,
                              "--val-data: val.txt has other contents of the same length", ()),
    "longer validation text": (append("d/val.txt", "more"), SHARDS, "--val-data: val.txt has {} bytes instead of {}", ("234", "230")),
    "more questions": (append("d/h.jsonl", question(4)), QUESTIONS, "--eval-hellaswag: h.jsonl has {} bytes instead of {}", ("390", "312")),
}


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("case", OTHER_DATA)
def test_other_data_on_one_machine(tmp_path, case, other):
    """Rank 1 of two is the one that is named."""
    change, options, what, words = OTHER_DATA[case]
    ended = train_apart(tmp_path, [change if rank == other else nothing for rank in (0, 1)], *options)
    said = what.format(*(words if other == 1 else reversed(words)))
    refused(tmp_path, ended, f"rank 1 reads other data than rank 0: {said}{SAME_FILES}")


LACKS = {
    "text": ("d/text.txt", TEXT, "--train-data: there is no file 'd/text.txt'; "),
    "shards": ("d/train_*.bin", SHARDS, "--train-data: no file matches 'd/train_*.bin'; "),
    "validation": ("d/val.txt", SHARDS, "--val-data: there is no file 'd/val.txt'; "),
    "questions": ("d/h.jsonl", QUESTIONS, "--eval-hellaswag: cannot read d/h.jsonl: No such file or directory"),
}


@pytest.mark.parametrize("other", [0, 1])
@pytest.mark.parametrize("what", LACKS)
def test_a_file_that_one_machine_lacks(tmp_path, what, other):
    pattern, options, words = LACKS[what]

    def remove(folder):
        for path in folder.glob(pattern):
            path.unlink()

    ended = train_apart(tmp_path, [remove if rank == other else nothing for rank in (0, 1)], *options)
    assert one_error(ended.err).startswith(f"rank {other} cannot read the data that rank {1 - other} reads: {words}")
    assert ended.statuses == [1, 1] and not list(tmp_path.glob("*/run"))


def test_the_rank_that_differs_from_most_is_named(tmp_path):
    ended = train_apart(tmp_path, [append("d/text.txt", "more"), nothing, nothing], *TEXT, "--global-batch-tokens=48")
    refused(tmp_path, ended, f"rank 0 reads other data than rank 1: --train-data: text.txt has 1,004 bytes instead of 1,000{SAME_FILES}")


def test_a_file_that_all_machines_lack_is_no_matter_of_one(tmp_path):
    ended = train_apart(tmp_path, [nothing, nothing], "--train-data=none.txt")
    refused(tmp_path, ended, "--train-data: there is no file 'none.txt'; give a text file, or token shards as 'PATTERN*.bin' in quotes")


def test_the_same_data_under_other_names(tmp_path):
    """Names decide nothing: the samples are the same."""
    ended = train_apart(tmp_path, [nothing, lambda folder: (folder / "d/train_2.bin").rename(folder / "d/train_3.bin")], *QUESTIONS)
    assert (ended.statuses, ended.err) == ([0, 0], "")
