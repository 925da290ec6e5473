"""The mutants of test/mutants/ apply to the code of today. If a change of the code makes one fail here, mend that mutant: its `old`
must occur once in its file. And the bookkeeping of dev/mutants.py, which runs them (`make mutants`)."""

import collections
import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "dev"))
import mutants  # noqa: E402

AREAS = {"cpu", "kernels", "gpu", "model", "tensor", "zero", "pipeline", "step", "plan", "communication", "data", "files", "schedules",
         "options", "scripts"}
LEAST, LEAST_OF_AREA = 80, 5


def test_every_mutant_applies():
    complaints = mutants.complaints_about(mutants.read_mutants(ROOT / "test/mutants"), ROOT, mutants.names_of_suites(ROOT))
    if complaints:
        pytest.fail("mend these mutants:\n" + "\n".join(complaints), pytrace=False)


def test_every_area_has_mutants():
    all_of_them = mutants.read_mutants(ROOT / "test/mutants")
    assert len(all_of_them) >= LEAST
    assert len({mutant.name for mutant in all_of_them}) == len(all_of_them)
    counts = collections.Counter(mutant.area for mutant in all_of_them)
    assert set(counts) >= AREAS and min(counts.values()) >= LEAST_OF_AREA, counts


def test_suites_need_programs():
    assert mutants.targets_of(["unit", "mpi-2", "tcp-4", "resume"]) == ["build/test/unit", "build/test/mpi", "train_gpt"]
    assert mutants.targets_of(["kernels-thread"]) == ["build/test/kernels-thread"]
    assert mutants.targets_of(["simulated_meshes", "metrics"]) == ["train_gpt", "build/test/train_gpt-plain"]
    assert mutants.targets_of(["simulated_meshes", "unit"], mutants.MUST_EXIST) == ["build/test/train_gpt-planted"]
    names = mutants.names_of_suites(ROOT)
    assert {"unit", "mpi-8", "tcp-1", "kernels-thread", "cuda-runtime-plain", "mutants"} <= names and "matrix-4" not in names


# ---- A made tree, with a program of one line

ENTRY = """[[mutant]]
name = "{name}"
file = "{file}"
old = '''{old}'''
new = '''{new}'''
suites = {suites}
why = "It is wrong."
"""
SOURCE = "answer = 6 * 7\nunused = 1\n"
# This builds the program by copying, and notes each build.
BUILD = """
import pathlib, sys
source = pathlib.Path("source.py").read_text()
if "(" in source: sys.exit("error: a parenthesis")
for target in sys.argv[1:]:
    pathlib.Path(target).parent.mkdir(parents=True, exist_ok=True)
    if not pathlib.Path(target).exists(): open("../builds.txt", "a").write(target + "\\n")
    pathlib.Path(target).write_text(source)
"""
# As test/run_suites.py prints. The suite `sums` tests the answer, in the second of two parts; `lines` tests nothing of it.
SUITES = """
import os, pathlib, sys
os.chdir(pathlib.Path(__file__).parent)
failed = False
for suite in sys.argv[1:]:
    names = {}
    exec(pathlib.Path("build", suite).read_text(), names)
    wrong = suite == "sums" and names["answer"] != 42
    failed |= wrong
    if suite == "sums": print(f"{suite}.1  {'2 passed, 0 failed, 1 skipped':34} 0.1 s    0.1 s of CPU")
    name = f"{suite}.2" if suite == "sums" else suite
    print(f"{name}  {'0 passed, 1 failed' if wrong else '1 passed, 0 failed':34} 0.1 s    0.1 s of CPU")
    if wrong: print("    error: no\\n    FAILED Sums.answer\\n    log: x")
print("done")
sys.exit(1 if failed else 0)
"""


class MadeRunner(mutants.Runner):
    def build_command(self, targets):
        return [sys.executable, "build.py", *targets]

    def suites_command(self, suites):
        return [sys.executable, "suites.py", *suites]

    def has_target(self, target):
        return target != "build/absent"


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A function that runs the mutants (name, old, new, suites) of a small tree, and returns the exit status."""
    root = tmp_path / "root"
    for name, text in (("source.py", SOURCE), ("build.py", BUILD), ("suites.py", SUITES), (".gitignore", "/build/\n/build-*/\n")):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (root / "ignored").mkdir()
    (root / ".git/info/exclude").write_text("/ignored/\n")
    (root / "ignored/file").write_text("x")
    monkeypatch.setattr(mutants, "PROGRAMS", [("*", ["build/{suite}"])])

    def run(*entries, again=()):
        folder = root / "test/mutants"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "made.toml").write_text("".join(
            ENTRY.format(name=name, file="source.py", old=old, new=new, suites=json.dumps(suites)) for name, old, new, suites in entries))
        found = mutants.read_mutants(folder)
        run.complaints = mutants.complaints_about(found, root, ["sums", "lines", "absent"])
        return None if run.complaints else MadeRunner(root, root / "build-mutants").run_all(found, again)

    run.root = root
    run.results = lambda: json.loads((root / "build-mutants/results.json").read_text())["outcomes"]
    return run


WRONG = ("wrong", "6 * 7", "6 * 8", ["lines", "sums"])
SLOW = ("unnoticed", "unused = 1", "unused = 2", ["lines", "sums"])
BROKEN = ("broken", "6 * 7", "(6 * 7", ["sums"])


def test_outcomes_are_printed_and_kept(made, capsys):
    assert made(WRONG, SLOW, BROKEN) == 1  # one of two survives
    out = re.sub(r"\b\d+ s\n", "N s\n", capsys.readouterr().out)
    assert "wrong      caught by sums, N s\nunnoticed  SURVIVED, N s\nbroken     does not compile, N s\n" in out
    assert out.endswith("no suite noticed:\n  unnoticed (source.py): It is wrong.\n1 caught, 1 survived, 1 do not compile, of 3\n")
    outcomes = made.results()
    assert [outcomes[name]["outcome"] for name in ("wrong", "unnoticed", "broken")] == ["caught", "survived", "does not compile"]
    assert (outcomes["wrong"]["suite"], outcomes["wrong"]["test"]) == ("sums", "Sums.answer")
    # The tree and its copy are as before, and the copy has what git tracks and no more.
    copy = made.root / "build-mutants/tree"
    assert (made.root / "source.py").read_text() == (copy / "source.py").read_text() == SOURCE
    assert not (copy / "ignored").exists() and not (made.root / "build").exists()


def test_a_later_call_goes_on(made, capsys):
    def built():
        """The programs that were built since the last call."""
        builds = made.root / "build-mutants/builds.txt"
        targets = builds.read_text().split()
        builds.write_text("")
        return targets

    made(WRONG)
    assert built() == ["build/lines", "build/sums"]
    assert made(WRONG, BROKEN) == 0
    assert capsys.readouterr().out.splitlines()[-3].startswith("wrong   caught by sums, ")
    assert built() == []  # the programs without a fault are there again
    known = made.results()
    assert made(WRONG, BROKEN) == 0 and made.results() == known and built() == []
    made(WRONG, BROKEN, again=["wrong"])
    assert made.results()["wrong"]["outcome"] == "caught"
    assert (made.root / "build-mutants/tree/build/sums").read_text() == SOURCE
    # Another text of the mutant or of its file is another mutant.
    other = ("wrong", "6 * 7", "7 * 6", ["lines", "sums"])
    assert made(other) == 1 and made.results()["wrong"]["outcome"] == "survived"
    (made.root / "source.py").write_text(SOURCE + "more = 1\n")
    assert made(WRONG) == 0 and made.results()["wrong"]["outcome"] == "caught"
    assert "more = 1" in (made.root / "build-mutants/tree/source.py").read_text()


def test_suites_that_cannot_run_here_are_passed_over(made, capsys):
    assert made(("wrong", "6 * 7", "6 * 8", ["absent", "sums"]), ("other", "unused = 1", "unused = 2", ["absent"])) == 0
    out = capsys.readouterr().out
    assert "wrong  caught by sums, " in out and "other  cannot run here: absent\n" in out
    assert out.endswith("1 caught, 0 survived, 0 do not compile, of 2; 1 cannot run here\n")


def test_a_fault_that_was_left_behind_is_removed(made):
    made(WRONG)
    runner = MadeRunner(made.root, made.root / "build-mutants")
    [mutant] = mutants.read_mutants(made.root / "test/mutants")
    runner.copy.plant(mutant)  # and then the program is killed
    runner.build(["build/sums"], runner.log_of("x"))
    assert "6 * 8" in runner.copy.text("source.py") and "6 * 8" in runner.copy.text("build/sums")
    later = MadeRunner(made.root, made.root / "build-mutants")
    later.copy.bring_up_to_date()
    assert later.copy.text("source.py") == later.copy.text("build/sums") == SOURCE
    runner.copy.plant(mutant)
    runner.build(["build/more"], runner.log_of("x"))  # there is none without faults
    runner.copy.restore()
    assert not (runner.copy.tree / "build/more").exists()


def test_suites_must_pass_without_a_fault(made):
    (made.root / "source.py").write_text(SOURCE.replace("6 * 7", "6 * 9"))
    with pytest.raises(mutants.Trouble, match="without any fault, these suites fail: sums; see "):
        made(("x", "unused = 1", "unused = 2", ["lines", "sums"]))
    (made.root / "source.py").write_text("answer = (42\n")
    with pytest.raises(mutants.Trouble, match="the tree does not compile without any fault"):
        made(("x", "42", "43", ["sums"]))


@pytest.mark.parametrize("entry, complaint", [
    (("x", "6 * 6", "6 * 8", ["sums"]), "x: its `old` occurs 0 times in source.py, not once; mend it"),
    (("x", "=", "!", ["sums"]), "x: its `old` occurs 2 times in source.py"),
    (("x", "6 * 7", "6 * 7", ["sums"]), "x: its `new` is its `old`"),
    (("x", "6 * 7", "6 * 8", ["other"]), "x: there is no suite other"),
    (("x", "6 * 7", "6 * 8", []), "x: it names no suite"),
    (("X y", "6 * 7", "6 * 8", ["sums"]), "X y: its name is not words"),
])
def test_mutants_that_must_be_mended_are_named(made, entry, complaint):
    assert made(entry) is None
    [found] = made.complaints
    assert found.startswith("test/mutants/made.toml: ") and complaint in found
    assert made(WRONG, WRONG) is None and "another mutant has this name" in made.complaints[0]


def test_a_mutant_that_lacks_something_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text('[[mutant]]\nname = "x"\nfile = "y"\n')
    with pytest.raises(mutants.Trouble, match=r"a.toml, mutant 1 \(x\): missing or unknown: new, old, suites, why"):
        mutants.read_mutants(tmp_path)
    (tmp_path / "a.toml").write_text("[[mutant]\n")
    with pytest.raises(mutants.Trouble, match="a.toml: "):
        mutants.read_mutants(tmp_path)


def test_mutants_are_chosen_by_patterns():
    all_of_them = mutants.read_mutants(ROOT / "test/mutants")
    chosen = mutants.chosen_among(all_of_them, ["adamw-*"])
    assert chosen and all(mutant.name.startswith("adamw-") for mutant in chosen)
    assert mutants.chosen_among(all_of_them, []) == all_of_them
    with pytest.raises(mutants.Trouble, match="no mutant matches never-"):
        mutants.chosen_among(all_of_them, ["adamw-*", "never-*"])
