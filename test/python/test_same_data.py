"""A run is refused if its processes have other options or other data, or if the data have changed when it is resumed."""

import json
import re
import subprocess

import numpy as np
import pytest

import program
from model_folders import LLAMA
from old_checkpoint import sealed, write_sealed
from refused import ENVIRONMENT, one_error
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


# ---- The options of a job


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data, configurations and a run."""
    folder = tmp_path_factory.mktemp("options")
    write_data(folder)
    for name, beta in (("a", 0.9), ("b", 0.99)):
        (folder / f"{name}.toml").write_text(f"beta1 = 0.8\nbeta2 = {beta}\nsteps = 3\n")
    program.train(folder / "old", *MODEL, "--steps=1")
    return folder


def end_of(place, *options_of_ranks):
    """The end of a job with a process for each list of options. `place` is its folder, or a list with one for each process."""
    job = Job(len(options_of_ranks))
    for rank, options in enumerate(options_of_ranks):
        folder = place[rank] if isinstance(place, list) else place
        job.start(rank, "env", "-C", folder, program.ROOT / program.PROGRAM, *options)
    return job.end()


def message(rank, has, other, other_has):
    return f"rank {rank} has {has}, and rank {other} has {other_has}; give all processes the same options"


RUN = [*MODEL, "--steps=2", "--out-dir=run"]
TEXT_OF = ["--generate", "--init=old", "--sample-tokens=1"]
# For each case: the options of two ranks, and what the message says that they have.
OTHER_OPTIONS = {
    "lr": ([*RUN, "--lr=1e-3"], [*RUN, "--lr=1e-4"], "--lr 0.001", "--lr 0.0001"),
    "seed": (RUN, [*RUN, "--seed=7"], "--seed 1", "--seed 7"),
    "dtype": ([*RUN, "--dtype=bf16"], [*RUN, "--dtype=fp32"], "--dtype bf16", "--dtype fp32"),
    "precision": ([*RUN, "--precision=bf16"], RUN, "--precision bf16", "no --precision"),
    "weight decay": ([*RUN, "--weight-decay=0"], [*RUN, "--weight-decay=0.2"], "--weight-decay 0", "--weight-decay 0.2"),
    "configurations": ([*RUN, "--config=a.toml"], [*RUN, "--config=b.toml"], "--beta2 0.9", "--beta2 0.99"),
    "an option beside a configuration": ([*RUN, "--config=a.toml"], [*RUN, "--config=a.toml", "--beta1=0.7"], "--beta1 0.8", "--beta1 0.7"),
    "steps": (RUN, [*RUN, "--steps=3"], "--steps 2", "--steps 3"),
    "ZeRO": (RUN, [*RUN, "--zero-stage=3"], "--zero-stage 0", "--zero-stage 3"),
    "strategies of FSDP": ([*RUN, "--zero-stage=FULL_SHARD"], [*RUN, "--zero-stage=HYBRID_SHARD"], "--zero-stage 3", "--zero-stage HYBRID_SHARD"),
    "a switch": (RUN, [*RUN, "--overlap-grad-reduce=false"], "--overlap-grad-reduce", "--overlap-grad-reduce=false"),
    "a text": ([*RUN, "--prompt=A cat"], [*RUN, "--prompt=A dog"], "--prompt 'A cat'", "--prompt 'A dog'"),
    "a time limit": (RUN, [*RUN, "--comm-timeout=5"], "--comm-timeout 600", "--comm-timeout 5"),
    "models": ([*RUN, "--model=gpt2"], RUN, "--model gpt2", "--model tiny"),
    "sizes": (RUN, [*RUN, "--layers=2"], "--layers 1", "--layers 2"),
    "weights": (RUN, [*RUN, "--init=old"], "no --init", "--init FILE"),
    "a checkpoint": (RUN, [*RUN, "--resume=old"], "no --resume", "--resume"),
    "the newest checkpoint": ([*RUN, "--resume=old"], [*RUN, "--resume-if-any"], "--resume", "no --resume"),
    "a run to replace": (RUN, [*RUN, "--overwrite"], "no --overwrite", "--overwrite"),
    "generation": (RUN, TEXT_OF, "no --generate", "--generate"),
    "a model to print": (RUN, [*RUN, "--print-model"], "no --print-model", "--print-model"),
    "help": (RUN, ["--help"], "no --help or --version", "--help or --version"),
}


@pytest.mark.parametrize("case", OTHER_OPTIONS)
def test_other_options_of_a_process(place, case):
    first, second, *have = OTHER_OPTIONS[case]
    ended = end_of(place, first, second)
    assert (ended.statuses, ended.out, one_error(ended.err)) == ([1, 1], "", message(1, have[1], 0, have[0]))
    assert not (place / "run").exists()


@pytest.mark.parametrize("case", ["weights", "generation", "a model to print", "help"])
def test_other_options_of_rank_0(place, case):
    first, second, *have = OTHER_OPTIONS[case]
    ended = end_of(place, second, first)
    assert (ended.statuses, ended.out, one_error(ended.err)) == ([1, 1], "", message(1, have[0], 0, have[1]))


def test_other_models_in_folders_of_one_name(tmp_path):
    for layers in (1, 2):
        (tmp_path / f"{layers}/m").mkdir(parents=True)
        (tmp_path / f"{layers}/m/config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": layers}))
    ended = end_of([tmp_path / "1", tmp_path / "2"], *[["--model=m", "--steps=1", "--seq-len=16"]] * 2)
    assert (ended.statuses, one_error(ended.err)) == ([1, 1], message(1, "--layers 2", 0, "--layers 1"))


def test_the_rank_whose_options_differ_from_most_is_named(place):
    ended = end_of(place, [*RUN, "--steps=3"], RUN, RUN)
    assert (ended.statuses, one_error(ended.err)) == ([1, 1, 1], message(0, "--steps 3", 1, "--steps 2"))


@pytest.mark.skipif(not program.HAS_MPI, reason="make MPI=0")
@pytest.mark.parametrize("case", ["lr", "steps", "help"])
def test_other_options_under_mpirun(place, case):
    first, second, *have = OTHER_OPTIONS[case]
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", 1, program.ROOT / program.PROGRAM, *first,
               ":", "-np", 1, program.ROOT / program.PROGRAM, *second]
    ended = subprocess.run(list(map(str, command)), cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=60 * program.PATIENCE)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert message(1, have[1], 0, have[0]) == one_error(ended.stderr)


@pytest.mark.parametrize("more, resume", [("--lr=0.05", ["--resume"]), ("--dtype=bf16", ["--resume-if-any"]), ("--layers=2", ["--resume=run"])])
def test_checkpoints_of_other_options(tmp_path, more, resume):
    """On machines of their own, of the same step: their runs had other options, which nobody gives now."""
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        program.run("-C", tmp_path / str(rank), program.ROOT / program.PROGRAM, *RUN, *([more] if rank else []), program="env")
    ended = end_of([tmp_path / "0", tmp_path / "1"], *[["--out-dir=run", *resume, "--steps=4", "--sample-tokens=0"]] * 2)
    name, _, value = more.partition("=")
    assert ended.statuses == [1, 1]
    assert re.fullmatch(rf"rank 1 has {name} {value}, and rank 0 has (no {name}|{name} \S+); give all processes the same options", one_error(ended.err))


def test_a_wrong_option_of_a_process(place):
    ended = end_of(place, RUN, [*RUN, "--lr=high"])
    assert (ended.statuses, ended.out, one_error(ended.err)) == ([1, 1], "", "--lr: 'high' is not a number; give a number such as 0.001")


def test_what_may_differ(place, tmp_path):
    """Names of files that are the same, the place and the form of a value, a default that is given, and what is printed."""
    (tmp_path / "text").write_bytes((place / "d/text.txt").read_bytes())
    ended = end_of(place, [*MODEL, "--config=a.toml", "--lr=1e-3", f"--out-dir={tmp_path}/run", "--train-data=d/text.txt", "--verbose",
                    "--seed=1", "--model=tiny", "--tf32=false", "--pipeline-parallel=1"],
                   [*MODEL, "--beta1=0.80", "--beta2=9e-1", "--steps=3", "--lr=0.001", f"--out-dir={tmp_path}/other", f"--train-data={tmp_path}/text",
                    "--log-every=1", f"--metrics={tmp_path}/metrics.jsonl"])
    assert (ended.statuses, ended.err) == ([0, 0], "")
    assert program.Run(tmp_path / "run").column("step") == [1, 2, 3] and not (tmp_path / "other").exists()


# ---- The machines of a job


def train_apart(tmp_path, changes, *options):
    """A job with a process for each change, on machines of their own, which share the folder of results: in the folder of a rank
    the change was made."""
    job = Job(len(changes))
    for rank, change in enumerate(changes):
        folder = tmp_path / str(rank)
        write_data(folder)
        change(folder)
        job.start(rank, "env", "-C", folder, program.ROOT / program.PROGRAM, *MODEL, "--steps=2", f"--out-dir={tmp_path}/run", *options)
    return job.end()


def nothing(folder):
    pass


def refused(tmp_path, ended, words):
    assert set(ended.statuses) == {1} and ended.out == ""
    assert one_error(ended.err) == words
    assert not list(tmp_path.glob("**/run"))


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


# ---- A run that is resumed


@pytest.fixture
def run(tmp_path):
    """Starts the program in a folder with data; returns its output, or the line of its error."""
    write_data(tmp_path)

    def start(*options, steps=None, ranks=1, fails=False):
        result = program.run("-C", tmp_path, program.ROOT / program.PROGRAM, *(["--processes", ranks] if ranks > 1 else []), *options,
                             *([f"--steps={steps}"] if steps else []), program="env", check=not fails)
        assert not fails or (result.returncode, result.stdout) == (1, "")
        return one_error(result.stderr) if fails else " ".join(result.stdout.split())

    return start


BEGIN, RESUME = [*MODEL, "--checkpoint-every=2", "--out-dir=run"], ["--sample-tokens=0", "--out-dir=run", "--resume"]
REMEDY = "; give the same data, or --new-data to go on with these"
# For each case: the options of the run, what changes after two steps, and the message.
CHANGES = {
    "a longer text": (TEXT, append("d/text.txt", "more"), "--train-data: text.txt has 1,004 bytes instead of 1,000"),
    "a shard more": (SHARDS, lambda folder: write_shard(folder / "d/train_3.bin"), "--train-data: train_3.bin is additional"),
    "a shard less": (SHARDS, lambda folder: (folder / "d/train_2.bin").unlink(), "--train-data: train_2.bin is missing"),
    "a shorter shard": (SHARDS, lambda folder: write_shard(folder / "d/train_1.bin", 100), "--train-data: train_1.bin has 1,224 bytes instead of 1,424"),
    "other tokens": (SHARDS, lambda folder: write_shard(folder / "d/train_1.bin", seed=9), "--train-data: train_1.bin has other contents of the same length"),
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CHANGES)
def test_changed_data_are_refused_and_accepted(run, case, ranks, tmp_path):
    options, change, what = CHANGES[case]
    run(*BEGIN, *options, steps=2)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    change(tmp_path)
    for how in (RESUME, [*BEGIN, *options, "--resume-if-any"]):
        assert run(*how, steps=4, ranks=ranks, fails=True) == f"run/checkpoint-00000002 was trained on other data: {what}{REMEDY}"
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    note = f"note: {what}; training goes on after 8 samples, in the order of the new data"
    assert note in run(*RESUME, "--new-data", steps=4, ranks=ranks)
    # From then on these are the run's data.
    assert "samples, in the order" not in run(*RESUME, steps=6)
    resumed = program.Run(tmp_path / "run").losses
    run("--sample-tokens=0", "--out-dir=again", "--resume=run/checkpoint-00000004", steps=6)
    assert len(resumed) == 6 and (ranks > 1 or program.Run(tmp_path / "again").losses == resumed[4:])


def test_the_order_of_new_data_is_that_of_their_sample_numbers(run, tmp_path):
    """With weights that do not change, the losses tell the samples."""
    still = ["--lr=0", "--weight-decay=0"]
    run(*BEGIN, *TEXT, *still, steps=2)
    append("d/text.txt", "Other words at the end. " * 9)(tmp_path)
    run(*RESUME, "--new-data", steps=6)
    run(*BEGIN[:-1], "--out-dir=whole", *TEXT, *still, steps=6)
    assert program.Run(tmp_path / "run").losses[2:] == program.Run(tmp_path / "whole").losses[2:]
    assert program.Run(tmp_path / "run").losses[:2] != program.Run(tmp_path / "whole").losses[:2]


def test_the_same_files_elsewhere_are_the_same_data(run, tmp_path):
    run(*BEGIN, *SHARDS, steps=2)
    (tmp_path / "d").rename(tmp_path / "e")
    for i in (1, 2):
        (tmp_path / f"e/train_{i}.bin").rename(tmp_path / f"e/part_{i}.bin")
    text = run(*RESUME, "--train-data=e/part_*.bin", "--val-data=e/val.txt", steps=4)
    assert "--train-data" not in text and "the order of the new data" not in text
    assert "other data" in run(*RESUME, "--train-data=e/val.txt", steps=6, fails=True)


def test_a_text_is_divided_as_before(run):
    run(*BEGIN, *TEXT, steps=2)
    what = "--train-data: text.txt: 1,000 tokens instead of 900 (without --val-data, the last tenth of a training text is for validation)"
    assert run(*RESUME, "--val-data=d/val.txt", steps=4, fails=True) == f"run/checkpoint-00000002 was trained on other data: {what}{REMEDY}"


def test_the_stories_are_data_too(run):
    run(*BEGIN, steps=2)
    words = run(*RESUME, *TEXT, steps=4, fails=True)
    assert words == f"run/checkpoint-00000002 was trained on other data: --train-data: text.txt instead of the embedded stories{REMEDY}"
    assert "after 8 samples" in run(*RESUME, *TEXT, "--new-data", steps=4)


def test_other_validation_data(run, tmp_path):
    """They are refused only if they would decide which checkpoint is the best."""
    run(*BEGIN, *SHARDS, "--val-every=1", "--keep-best", steps=2)
    append("d/val.txt", "more")(tmp_path)
    what = "--val-data: val.txt has 234 bytes instead of 230"
    assert run(*RESUME, steps=4, fails=True) == f"run/checkpoint-00000002 was validated on other data: {what}{REMEDY}"
    note = f"note: {what}; validation losses before and after are not comparable"
    assert note in run("--sample-tokens=0", "--out-dir=two", "--resume=run", "--keep-best=false", steps=4)
    assert note in run(*RESUME, "--new-data", steps=4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_finished_run_says_that_its_validation_data_have_changed(run, ranks, tmp_path):
    run(*BEGIN, *SHARDS, "--val-every=1", "--keep-best", steps=2)
    note = "note: --val-data: val.txt has 234 bytes instead of 230; validation losses before and after are not comparable"
    assert "not comparable" not in run(*RESUME, steps=2, ranks=ranks)
    append("d/val.txt", "more")(tmp_path)
    assert note in run(*RESUME, steps=2, ranks=ranks)
    assert note in run(*RESUME, "--steps=0", ranks=ranks)


def test_data_matter_only_to_training(run, tmp_path):
    run(*BEGIN, *TEXT, steps=2)
    append("d/text.txt", "more")(tmp_path)
    assert "validation after step 2" in run(*RESUME, "--steps=0")
    text = run(*RESUME, steps=2)
    assert "nothing to train" in text
    assert f"note: {CHANGES['a longer text'][2]}; to train on with these, give --new-data and more --steps" in text
    run("--generate", "--resume=run", "--sample-tokens=1")


def test_a_checkpoint_without_a_record_of_its_data(run, tmp_path):
    """Earlier programs wrote such checkpoints."""
    run(*BEGIN, *TEXT, steps=2)
    manifest = tmp_path / "run/checkpoint-00000002/manifest.json"
    entries = json.loads(manifest.read_text())
    assert sealed(entries) == entries and list(entries["data"]) == ["train-data", "val-data"]
    del entries["data"]
    write_sealed(manifest, entries)
    append("d/text.txt", "more")(tmp_path)
    (tmp_path / "d/text.txt").rename(tmp_path / "d/book.txt")
    assert 'note: --train-data is "d/book.txt", but was "d/text.txt" in the checkpoint' in run(*RESUME, "--train-data=d/book.txt", steps=4)
    assert (tmp_path / "run/checkpoint-00000004").is_dir()


@pytest.mark.parametrize("options, words", [
    (["--new-data"], "--new-data is for --resume and --resume-if-any; leave it out: a new run takes any data"),
    (["--new-data", "--resume=run", "--steps=0"], "--new-data is for training, and --steps 0 trains none; leave one of them out"),
    (["--new-data", "--resume=run", "--generate"], "--new-data"),
])
def test_new_data_is_for_training_on(run, options, words):
    run(*BEGIN, steps=2)
    assert words in run(*options, fails=True)
