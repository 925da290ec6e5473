"""The tables of docs/checkpoints.md say what a start of the program does in a directory. Each cell is a test here."""

import re
import shutil

import pytest

import boxes
import program

MODEL = [*program.SMALL, "--lr=1e-3", "--val-batches=1"]
PAGE = program.ROOT / "docs/checkpoints.md"
STEPS = 8
STARTS = ["neither", "`--resume`", "`--resume-if-any`", "`--overwrite`"]
OTHER_MESH = 2  # processes
OTHER_OPTIONS = ["--weight-decay=0.2"]


def without_marks(text):
    return text.strip().strip("`")


def tables():
    """The rows of the page's two tables: {first cell: the other cells}."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", PAGE.read_text(), re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found.append((rows[0], {row[0]: row[1:] for row in rows[2:]}))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run."""
    return program.train(tmp_path_factory.mktemp("whole") / "x", *MODEL, f"--steps={STEPS}", "--checkpoint-every=4")


def make(folder, whole, state):
    """Puts the run of `whole` into the folder as it was at that time."""
    if state == "does not exist":
        return
    shutil.copytree(whole.out_dir, folder)
    removed = {"holds a stopped run": [STEPS], "holds a run that saved no checkpoint": [4, STEPS]}.get(state, [])
    for step in removed:
        shutil.rmtree(folder / f"checkpoint-{step:08}")


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(folder, how, state, *options):
    """The run `whole`, or what the state compares it with: another mesh, or other options."""
    words = [] if how == "neither" else [without_marks(how)]
    ranks = OTHER_MESH if state == "holds a run of another mesh" else 1
    others = OTHER_OPTIONS if state == "holds a run with other options" else []
    return program.run(*options, *others, f"--out-dir={folder}", "--sample-tokens=0", *words, ranks=ranks, check=False)


def refused(result, folder, before, *words):
    """One line, and nothing was changed."""
    assert (result.returncode, result.stdout) == (1, "") and result.stderr.count("\n") == 1, result.stderr
    for word in words:
        assert word in result.stderr, result.stderr
    assert (files(folder) if folder.exists() else {}) == before
    return True


def begins(folder, how, state):
    """A run from its first step, with the numbers of such a run in a new directory and no other checkpoint."""
    result = start(folder, how, state, *MODEL, f"--steps={STEPS}")
    assert result.returncode == 0, result.stderr
    assert start(folder.parent / "new", "neither", state, *MODEL, f"--steps={STEPS}").returncode == 0
    run = program.Run(folder)
    assert run.losses == program.Run(folder.parent / "new").losses and run.column("step") == list(range(1, STEPS + 1))
    return not any(path.name == "checkpoint-00000099" for path in folder.iterdir())


# Each text of the first table has a function that checks it.
def check_begins(folder, how, state, whole):
    assert begins(folder, how, state)


def check_replaced(folder, how, state, whole):
    shutil.copytree(folder / f"checkpoint-{4:08}", folder / "checkpoint-00000099", dirs_exist_ok=True) \
        if (folder / f"checkpoint-{4:08}").exists() else None
    (folder / "notes.txt").write_text("of the user")
    assert begins(folder, how, state)
    assert (folder / "notes.txt").read_text() == "of the user"
    assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{STEPS:08}"]


def check_error(folder, how, state, whole):
    before = files(folder) if folder.exists() else {}
    result = start(folder, how, state, *MODEL, f"--steps={STEPS}")
    if how == "neither":
        words = [f"--out-dir: {folder} holds a run of {STEPS} steps; ", "choose another --out-dir, or add --overwrite to replace it"]
        assert ("add --resume, " in result.stderr) == (state != "holds a run that saved no checkpoint")
    elif state == "does not exist":
        words = [f"--resume: there is no run in {folder} to resume; leave it out to begin a run, or give --resume-if-any"]
    else:
        words = [f"--resume: the last run in {folder} saved no checkpoint; to begin it again, give --overwrite instead, or"]
    assert refused(result, folder, before, *words)


def check_same_bits(folder, how, state, whole):
    result = start(folder, how, state, *MODEL, f"--steps={STEPS}")
    assert "after step 4" in result.stdout, result.stderr
    assert program.Run(folder).losses == whole.losses
    last = f"checkpoint-{STEPS:08}"
    assert boxes.contents(folder / last) == boxes.contents(whole.out_dir / last)


def check_finished(folder, how, state, whole):
    before = files(folder)
    result = start(folder, how, state, *MODEL, f"--steps={STEPS}")
    assert result.returncode == 0, result.stderr
    assert f"resuming from {folder}/checkpoint-{STEPS:08} after step {STEPS}" in result.stdout
    assert "nothing to train: the earlier run's records are not changed" in result.stdout.replace("\n      ", " ")
    start(folder, how, state, *MODEL, f"--steps={STEPS}", "--lr=0.1")
    assert files(folder) == before
    longer = start(folder, how, state, *MODEL, "--steps=12")
    ends = program.Run(folder)
    assert ends.column("step") == list(range(1, 13)) and ends.losses[:STEPS] == whole.losses
    assert "note: the learning rate rises from" in longer.stdout and "give --lr-schedule constant --lr " in longer.stdout


def check_mesh(folder, how, state, whole):
    shutil.rmtree(folder / f"checkpoint-{STEPS:08}")
    result = start(folder, how, state, *MODEL, f"--steps={STEPS}")
    assert "after step 4" in result.stdout, result.stderr
    run = program.Run(folder)
    assert run.record["mesh"]["world"] == OTHER_MESH and run.losses[:4] == whole.losses[:4]
    # The project promises this for fp32 (docs/parallelism.md).
    assert max(abs(a - b) for a, b in zip(run.losses, whole.losses, strict=True)) <= 1e-5


def check_options(folder, how, state, whole):
    shutil.rmtree(folder / f"checkpoint-{STEPS:08}")
    before = files(folder)
    other = start(folder, how, state, *MODEL, "--layers=3", f"--steps={STEPS}")
    assert refused(other, folder, before, "has another model: its --layers is 2, this run's is 3")
    result = start(folder, how, state, *MODEL, f"--steps={STEPS}")
    assert "note: --weight-decay is 0.2, but was 0.1 in the checkpoint" in result.stdout
    run = program.Run(folder)
    assert run.losses[:5] == whole.losses[:5] and run.losses[6:] != whole.losses[6:]


MEANINGS = {
    "begins a run": check_begins,
    "begins it again": check_begins,
    "error": check_error,
    "replaces it": check_replaced,
    "goes on, the same bits": check_same_bits,
    "nothing to train (1)": check_finished,
    "goes on, within rounding (2)": check_mesh,
    "goes on, with notes (3)": check_options,
}
FIRST, SECOND = tables()


def test_the_table_has_these_columns():
    assert FIRST[0][1:] == STARTS


@pytest.mark.parametrize(("state", "how"), [(state, how) for state in FIRST[1] for how in STARTS])
def test_a_start_in_a_directory(state, how, whole, tmp_path):
    folder = tmp_path / "x"
    make(folder, whole, state)
    MEANINGS[FIRST[1][state][STARTS.index(how)]](folder, how, state, whole)


def elsewhere(tmp_path, whole, *options):
    return program.run(*MODEL, f"--steps={STEPS}", "--sample-tokens=0", f"--out-dir={tmp_path}/y",
                       f"--resume={whole.out_dir}/checkpoint-00000004", *options, check=False)


def goes_on_there(tmp_path, whole):
    before = files(whole.out_dir)
    assert elsewhere(tmp_path, whole).returncode == 0
    run = program.Run(tmp_path / "y")
    assert run.column("step") == [5, 6, 7, 8] and run.losses == whole.losses[4:]
    assert files(whole.out_dir) == before


def goes_on_again(tmp_path, whole):
    goes_on_there(tmp_path, whole)
    program.run(*MODEL, f"--steps={STEPS + 1}", "--sample-tokens=0", f"--out-dir={tmp_path}/y", "--resume")
    goes_on_there(tmp_path, whole)


def is_refused(tmp_path, whole):
    program.train(tmp_path / "y", *MODEL, "--steps=3", "--seed=7")
    before = files(tmp_path / "y")
    result = elsewhere(tmp_path, whole)
    assert refused(result, tmp_path / "y", before, f"--out-dir: {tmp_path}/y holds another run of 3 steps; choose another --out-dir\n")
    result = program.run(*MODEL, "--steps=9", f"--out-dir={tmp_path}/y/best", f"--resume={tmp_path}/y", check=False)
    assert refused(result, tmp_path / "y", before, "best is for the best checkpoint of the run above it; choose another --out-dir\n")
    result = program.run(*MODEL, f"--steps={STEPS}", "--sample-tokens=0", f"--out-dir={tmp_path}/y", f"--resume={whole.out_dir}")
    assert "nothing to train" in result.stdout and files(tmp_path / "y") == before
    # The run from which this one began is another run too.
    shutil.copytree(whole.out_dir, tmp_path / "x")
    program.run(*MODEL, "--steps=6", "--sample-tokens=0", f"--out-dir={tmp_path}/z", f"--resume={tmp_path}/x/checkpoint-00000004")
    before = files(tmp_path / "x")
    result = program.run(*MODEL, "--steps=9", "--sample-tokens=0", f"--out-dir={tmp_path}/x", f"--resume={tmp_path}/z", check=False)
    assert refused(result, tmp_path / "x", before, f"--out-dir: {tmp_path}/x holds another run of {STEPS} steps; choose another --out-dir\n")


ELSEWHERE = {
    "does not exist": goes_on_there,
    "began from a checkpoint of `runs/x`": goes_on_again,
    "holds another run": is_refused,
}


@pytest.mark.parametrize("state", SECOND[1])
def test_a_start_from_a_checkpoint_elsewhere(state, whole, tmp_path):
    ELSEWHERE[state](tmp_path, whole)


def test_the_tables_are_whole():
    """The table of checkpoints elsewhere has the cases that are tested, and no cell has a meaning that no row uses."""
    assert list(SECOND[1]) == list(ELSEWHERE)
    assert {cell for cells in FIRST[1].values() for cell in cells} == set(MEANINGS)
