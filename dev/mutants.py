#!/usr/bin/env python3
"""Plants small faults in a copy of the tree, one at a time, and tells which of them no test notices: `make mutants`.

    make mutants                                       all mutants that have no outcome yet
    make mutants MUTANT='adamw-* bpe-*' CUDA=0         some of them, in builds without CUDA
    make mutants MUTANT='--again adamw-decays-at-once' one of them once more
    dev/mutants.py --check                             only whether every mutant applies

test/mutants/*.toml has the mutants: a fault is a text of one file and what replaces it. The copy is in
build-mutants/tree. For each mutant, make builds the programs of the suites that should notice it, and these suites run
one after the other until one fails. build-mutants/results.json keeps the outcomes, so a later call goes on. A mutant
runs again if its own text or its file has changed. Logs are in build-mutants/logs/.

Before a suite judges any mutant, it must pass in the copy without one. The exit status is 1 if more than 5% survive.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
MOST_SURVIVORS = 0.05
CAUGHT, SURVIVED, DOES_NOT_COMPILE = "caught", "survived", "does not compile"

# Patterns of suites, and the targets of make that they run: fewer than the groups of test/suites.py, since they are built
# for every mutant. The first pattern that matches counts.
PROGRAMS = [
    ("unit", ["build/test/unit"]),
    ("mpi-*", ["build/test/mpi"]),
    ("tcp-*", ["build/test/mpi"]),
    ("kernels-*", ["build/test/{suite}"]),
    ("cuda-runtime-*", ["build/test/{suite}"]),
    ("simulated_gpu", ["train_gpt", "build/test/train_gpt-plain", "build/test/train_gpt-planted"]),
    ("simulated_*", ["train_gpt", "build/test/train_gpt-plain"]),
    ("allocations", ["build/test/probe/allocations"]),
    ("ops_against_pytorch", ["build/test/probe/op_probe"]),
    ("model_against_pytorch", ["build/test/probe/model_probe"]),
    ("communicator", ["build/test/tools/communicator_probe"]),
    ("tcp", ["train_gpt", "build/test/tools/communicator_probe"]),
    ("zero", ["train_gpt"]),
    ("memory_peak", ["build/test/tools/peak_memory"]),
    ("bench", ["train_gpt", "build/dev/bench_step"]),
    ("hellaswag", ["train_gpt", "build/test/train_gpt-plain", "build/libgpt2_bpe.so"]),
    ("bpe", ["train_gpt", "build/libgpt2_bpe.so"]),
    ("data", ["train_gpt", "build/libgpt2_bpe.so"]),
    ("datasets", ["train_gpt", "build/libgpt2_bpe.so"]),
    ("interface", ["train_gpt", "build/libgpt2_bpe.so"]),
    # They look at many programs, or at what was compiled.
    ("pages*", ["test-programs"]),
    ("gpu_check", ["test-programs"]),
    ("kernel_report", ["test-programs"]),
    ("cuda_libraries", ["test-programs"]),
    ("*", ["train_gpt"]),
]
# Programs that only have to exist. They are built once, without a fault.
MUST_EXIST = [("simulated_*", ["build/test/train_gpt-planted"])]
# Suites of several processes, where one that ends early would leave the others waiting.
WITH_PEERS = ["mpi-*", "tcp-*"]
# Folders that `make deps` fills and git ignores. The copy has links to them.
FROM_DEPS = [".python", ".cuda", "data/gpt2_bpe"]
# Variables of a surrounding make, which must not reach the builds.
OF_THE_CALLER = ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "GNUMAKEFLAGS", "BUILD", "SANITIZE", "V", "SUITE", "BUDGETS",
                 "GTEST_FILTER"]
# Built files that say nothing about a mutant: notes of the build, and logs.
NOTES = {".d", ".txt", ".ok", ".log", ".xml", ".json"}


class Trouble(Exception):
    """Why the mutants cannot be run, in one line."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    suites: tuple  # the cheapest first
    why: str  # the effect for a user
    area: str = ""  # the name of its TOML file

    def digest(self, text):
        """Identifies the mutant together with the text of its file."""
        return hashlib.sha256(json.dumps([self.file, self.old, self.new, text]).encode()).hexdigest()


# ---- The list of mutants ---------------------------------------------------------------------------------

def read_mutants(folder):
    """The mutants of all TOML files in a folder, in the order of the files."""
    keys = {field.name for field in dataclasses.fields(Mutant)} - {"area"}
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise Trouble(f"{path}: {error}") from None
        for number, entry in enumerate(table.get("mutant", []), 1):
            if set(entry) != keys:
                wrong = ", ".join(sorted(set(entry) ^ keys))
                raise Trouble(f"{path}, mutant {number} ({entry.get('name', 'without a name')}): missing or unknown: {wrong}")
            mutants.append(Mutant(**{**entry, "suites": tuple(entry["suites"])}, area=path.stem))
    return mutants


def names_of_suites(root):
    """The suites of `make test` and `make test-more`."""
    sys.path.insert(0, str(root / "test"))
    import suites
    with contextlib.chdir(root):
        return {suite.whole for suite in suites.find_suites("build", str) if suite.needs.tier != "long"}


def complaints_about(mutants, root, suites):
    """Lines that say which mutants must be mended, and why."""
    complaints, names = [], set()
    for mutant in mutants:
        def complain(what, mutant=mutant):
            complaints.append(f"test/mutants/{mutant.area}.toml: {mutant.name}: {what}")

        if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", mutant.name):
            complain("its name is not words of lower case with hyphens between them")
        if mutant.name in names:
            complain("another mutant has this name")
        names.add(mutant.name)
        if not (root / mutant.file).is_file():
            complain(f"there is no file {mutant.file}; name the one that has this code now")
            continue
        count = (root / mutant.file).read_text(encoding="utf-8").count(mutant.old) if mutant.old else 0
        if count != 1:
            complain(f"its `old` occurs {count} times in {mutant.file}, not once; mend it to fit the code of today")
        if mutant.old == mutant.new:
            complain("its `new` is its `old`")
        if not mutant.suites:
            complain("it names no suite")
        for suite in mutant.suites:
            if suite not in suites:
                complain(f"there is no suite {suite}")
        if not re.fullmatch(r"[^\n]+\.", mutant.why):
            complain("its `why` is not one sentence")
    return complaints


def chosen_among(mutants, patterns):
    """The mutants whose names match one of the patterns; all without patterns."""
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(mutant.name, pattern) for mutant in mutants):
            raise Trouble(f"no mutant matches {pattern}; --list shows them all")
    return [mutant for mutant in mutants
            if not patterns or any(fnmatch.fnmatchcase(mutant.name, pattern) for pattern in patterns)]


def found_in(table, suite):
    """The targets of the first pattern in a table that matches a suite."""
    for pattern, targets in table:
        if fnmatch.fnmatchcase(suite, pattern):
            return [target.format(suite=suite) for target in targets]
    return []


def targets_of(suites, table=None):
    return list(dict.fromkeys(target for suite in suites for target in found_in(table or PROGRAMS, suite)))


# ---- The copy of the tree --------------------------------------------------------------------------------

def git(*arguments, folder):
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


class Copy:
    """A copy of the work tree, with its own build. A planted fault is remembered in a file, so that it is removed even if
    the program was killed. It keeps the programs built without faults, so that they need not be built again."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.tree = folder / "tree"
        self.clean = folder / "clean"  # copies of what was built without faults
        self.note = folder / "planted.json"

    def bring_up_to_date(self):
        """Copies what git tracks, or would track. Files that are alike keep their times, so nothing is built again."""
        self.restore()
        names = [name for name in git("ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=self.root).split("\0")
                 if name and (self.root / name).is_file()]
        self.tree.mkdir(parents=True, exist_ok=True)
        if not (self.tree / ".git").exists():
            git("init", "-q", folder=self.tree)  # some tests ask git for the files; there is no commit
            with open(self.tree / ".git/info/exclude", "a") as file:
                file.writelines(f"/{name}\n" for name in FROM_DEPS)
        for name in set(git("ls-files", "-z", folder=self.tree).split("\0")) - {*names, ""}:
            (self.tree / name).unlink(missing_ok=True)
        for name in names:
            source, target = self.root / name, self.tree / name
            if target.is_file() and target.read_bytes() == source.read_bytes():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
        for name in FROM_DEPS:
            link = self.tree / name
            if (self.root / name).exists() and not link.exists():
                link.symlink_to((self.root / name).resolve())
        git("add", "--all", folder=self.tree)
        return names

    def text(self, name):
        return (self.tree / name).read_bytes().decode()

    def plant(self, mutant):
        path = self.tree / mutant.file
        text = self.text(mutant.file)
        self.note.write_text(json.dumps({"file": mutant.file, "text": text, "time": path.stat().st_mtime_ns}))
        path.write_bytes(text.replace(mutant.old, mutant.new).encode())

    def built(self):
        """The built files, with paths relative to the tree."""
        files = [self.tree / "train_gpt", *(self.tree / "build").rglob("*")]
        return [file.relative_to(self.tree) for file in files if file.is_file() and file.suffix not in NOTES]

    def keep_built(self):
        """Copies what was built without faults, with its times."""
        for name in self.built():
            kept, time = self.clean / name, (self.tree / name).stat().st_mtime_ns
            if not kept.exists() or kept.stat().st_mtime_ns != time:
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self.tree / name, kept)

    def restore(self):
        """Removes a planted fault, and replaces all that was built from it by what was built without faults. The file gets
        its old time, so that what was built before the fault counts as new enough."""
        if not self.note.exists():
            return
        planted = json.loads(self.note.read_text())
        since = self.note.stat().st_mtime_ns
        path = self.tree / planted["file"]
        path.write_bytes(planted["text"].encode())
        os.utime(path, ns=(planted["time"], planted["time"]))
        for name in self.built():
            if (self.tree / name).stat().st_mtime_ns >= since:
                (self.tree / name).unlink()
                if (self.clean / name).exists():
                    shutil.copy2(self.clean / name, self.tree / name)
        self.note.unlink()


# ---- Running ---------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Judgement:
    passed: int
    failed: int


class Runner:
    def __init__(self, root, folder, variables=()):
        self.copy, self.folder = Copy(root, folder), folder
        self.variables = dict(variable.split("=", 1) for variable in variables)
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.file = folder / "results.json"
        self.results = {"outcomes": {}, "sound": {}}
        if self.file.exists():
            self.results |= json.loads(self.file.read_text())
        self.absent = set()  # suites that run no test on this machine

    def save(self):
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(self.results, indent=1) + "\n")
        partial.replace(self.file)

    # These commands run in the copy. Tests replace them by others.
    def build_command(self, targets):
        jobs = self.variables.get("JOBS", str(len(os.sched_getaffinity(0))))
        variables = [f"{name}={value}" for name, value in self.variables.items()]
        return ["make", f"--jobs={jobs}", "--output-sync=target", *variables, *targets]

    def suites_command(self, suites):
        return [sys.executable, "test/run_suites.py", *suites]

    @functools.cache
    def has_target(self, target):
        """Whether this machine can build it. Without CUDA's headers, for instance, there are no simulated programs."""
        return subprocess.run([*self.build_command([target]), "--dry-run"], cwd=self.copy.tree, env=self.environment(),
                              capture_output=True).returncode == 0

    def environment(self, suites=()):
        environment = {name: value for name, value in os.environ.items() if name not in OF_THE_CALLER} | self.variables
        # Bytecode of a mutant must not be taken for that of its file.
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        shared = self.copy.root.parent / "shared/data"  # the tests look there, beside a clone
        if shared.is_dir():
            environment.setdefault("TRAIN_GPT_DATA", str(shared))
        if suites:
            environment["PYTEST_ADDOPTS"] = "--maxfail=1"
        if suites and not any(fnmatch.fnmatchcase(suite, pattern) for suite in suites for pattern in WITH_PEERS):
            environment["GTEST_FAIL_FAST"] = "1"
        return environment

    def run(self, command, log, environment):
        """The exit status of a command in the copy; its output is added to the log."""
        with open(log, "ab") as output:
            process = subprocess.Popen(command, cwd=self.copy.tree, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT)
            try:
                return process.wait()
            except BaseException:
                process.terminate()  # make and run_suites.py then end what they have started
                process.wait()
                raise

    def build(self, targets, log):
        return self.run(self.build_command(targets), log, self.environment()) == 0

    def judge(self, suites, log):
        """A Judgement for each suite, from what test/run_suites.py prints."""
        start = log.stat().st_size if log.exists() else 0
        self.run(self.suites_command(suites), log, self.environment(suites))
        text = log.read_bytes()[start:].decode(errors="replace")
        judgements = {}
        for suite in suites:
            # A suite may run in parts: unit.1 and unit.2.
            parts = re.findall(rf"^{re.escape(suite)}(?:\.\d+)? +(\d+) passed, (\d+) failed", text, re.MULTILINE)
            if not parts:
                raise Trouble(f"the suite {suite} did not report; see {log}")
            passed, failed = (sum(map(int, numbers)) for numbers in zip(*parts))
            judgements[suite] = Judgement(passed, failed)
        return judgements

    def log_of(self, name):
        log = self.logs / f"{name}.log"
        log.unlink(missing_ok=True)
        return log

    def begin(self, mutants):
        """Copies the tree, builds it without faults, and runs the suites in which it is not known yet that they pass."""
        names = self.copy.bring_up_to_date()
        log = self.log_of("without-faults")
        suites = list(dict.fromkeys(suite for mutant in mutants for suite in mutant.suites))
        self.absent = {suite for suite in suites if not all(map(self.has_target, targets_of([suite])))}
        suites = [suite for suite in suites if suite not in self.absent]
        targets = list(dict.fromkeys(targets_of(suites) + targets_of(suites, MUST_EXIST)))
        print(f"building a copy in {self.copy.tree}: {' '.join(targets)}", flush=True)
        if targets and not self.build(targets, log):
            raise Trouble(f"the tree does not compile without any fault; see {log}")
        self.copy.keep_built()
        tree = hashlib.sha256(json.dumps(sorted(self.variables.items())).encode())
        for name in sorted(names):
            if not name.startswith(("test/mutants/", "dev/mutants.py", "docs/")):
                tree.update(f"{name}\0".encode() + (self.copy.tree / name).read_bytes())
        digest = tree.hexdigest()
        sound = self.results["sound"]
        unknown = [suite for suite in suites if sound.get(suite, {}).get("digest") != digest]
        if unknown:
            print(f"without any fault: {' '.join(unknown)}", flush=True)
            judgements = self.judge(unknown, log)
            for suite, judgement in judgements.items():
                if judgement.failed == 0:
                    sound[suite] = {"digest": digest, "passed": judgement.passed}
            self.save()
            failing = [suite for suite, judgement in judgements.items() if judgement.failed]
            if failing:
                raise Trouble(f"without any fault, these suites fail: {' '.join(failing)}; see {log}")
        self.absent |= {suite for suite in suites if sound[suite]["passed"] == 0}

    def outcome_of(self, mutant):
        """The outcome that holds for a mutant and the text of its file, or None."""
        outcome = self.results["outcomes"].get(mutant.name)
        return outcome if outcome and outcome["digest"] == mutant.digest(self.copy.text(mutant.file)) else None

    def runs(self, mutant):
        return bool(set(mutant.suites) - self.absent)

    def try_out(self, mutant):
        """Plants a mutant, builds, and runs its suites until one fails."""
        digest = mutant.digest(self.copy.text(mutant.file))
        log = self.log_of(mutant.name)
        begin = time.monotonic()
        outcome = {"digest": digest, "outcome": SURVIVED, "suite": "", "test": ""}
        self.copy.plant(mutant)
        try:
            for suite in mutant.suites:
                if suite in self.absent:
                    continue
                if not self.build(targets_of([suite]), log):
                    outcome |= {"outcome": DOES_NOT_COMPILE}
                    break
                judgement = self.judge([suite], log)[suite]
                if judgement.failed:
                    test = re.search(r"^ +FAILED (\S+)", log.read_text(errors="replace"), re.MULTILINE)
                    outcome |= {"outcome": CAUGHT, "suite": suite, "test": test[1] if test else ""}
                    break
        finally:
            self.copy.restore()
        outcome["seconds"] = round(time.monotonic() - begin, 1)
        self.results["outcomes"][mutant.name] = outcome
        self.save()
        return outcome

    def run_all(self, mutants, again=()):
        """Runs the mutants that have no outcome; prints a line for each, and the summary. Returns the exit status."""
        if (self.copy.tree / ".git").exists():
            self.copy.bring_up_to_date()
        for name in again:
            self.results["outcomes"].pop(name, None)
        missing = [mutant for mutant in mutants
                   if not (self.copy.tree / mutant.file).exists() or self.outcome_of(mutant) is None]
        width = max(len(mutant.name) for mutant in mutants)
        if missing:
            self.begin(missing)
        for mutant in mutants:
            if mutant in missing:
                if not self.runs(mutant):
                    print(f"{mutant.name:{width}}  cannot run here: {' '.join(mutant.suites)}", flush=True)
                    continue
                self.try_out(mutant)
            print(f"{mutant.name:{width}}  {in_words(self.results['outcomes'][mutant.name])}", flush=True)
        return self.summary(mutants)

    def summary(self, mutants):
        of = {mutant: self.outcome_of(mutant) for mutant in mutants}
        survivors = [mutant for mutant, outcome in of.items() if outcome and outcome["outcome"] == SURVIVED]
        counts = {kind: sum(1 for outcome in of.values() if outcome and outcome["outcome"] == kind)
                  for kind in (CAUGHT, SURVIVED, DOES_NOT_COMPILE)}
        unknown = len(mutants) - sum(counts.values())
        if survivors:
            print("\nno suite noticed:")
        for mutant in survivors:
            print(f"  {mutant.name} ({mutant.file}): {mutant.why}")
        print(f"{counts[CAUGHT]} caught, {counts[SURVIVED]} survived, {counts[DOES_NOT_COMPILE]} do not compile, "
              f"of {len(mutants)}" + (f"; {unknown} cannot run here" if unknown else ""), flush=True)
        return 1 if counts[SURVIVED] > MOST_SURVIVORS * (counts[CAUGHT] + counts[SURVIVED]) else 0


def in_words(outcome):
    words = {CAUGHT: f"caught by {outcome['suite']}", SURVIVED: "SURVIVED", DOES_NOT_COMPILE: "does not compile"}
    return f"{words[outcome['outcome']]}, {outcome['seconds']:.0f} s"


def main(words=None):
    parser = argparse.ArgumentParser(description="Plant small faults in a copy of the tree, and list those that no test notices.")
    parser.add_argument("mutants", nargs="*", metavar="NAME", help="names or patterns of mutants (default: all); NAME=VALUE is a variable of make")
    parser.add_argument("--list", action="store_true", help="list the mutants with their suites and what is known, and exit")
    parser.add_argument("--check", action="store_true", help="only check that every mutant applies to the tree as it is")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="forget the outcome of these, and run them again")
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / "build-mutants", metavar="DIR",
                        help="keep the copy and the outcomes in DIR (default: build-mutants)")
    arguments = parser.parse_intermixed_args(words)
    variables = [word for word in arguments.mutants if "=" in word]
    patterns = [word for word in arguments.mutants if "=" not in word]
    mutants = read_mutants(ROOT / "test/mutants")
    complaints = complaints_about(mutants, ROOT, names_of_suites(ROOT))
    if complaints:
        print(*complaints, sep="\n", file=sys.stderr)
        return 1
    chosen = chosen_among(mutants, patterns + arguments.again)
    if arguments.check:
        print(f"{len(mutants)} mutants apply")
        return 0
    runner = Runner(ROOT, arguments.folder, variables)
    if arguments.list:
        for mutant in chosen:
            known = runner.results["outcomes"].get(mutant.name)
            print(f"{mutant.name}  {mutant.file}  {' '.join(mutant.suites)}  {in_words(known) if known else 'not run'}")
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the fault is removed
    again = [mutant.name for mutant in chosen_among(mutants, arguments.again)] if arguments.again else []
    return runner.run_all(chosen, again)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Trouble as trouble:
        sys.exit(f"error: {trouble}")
    except KeyboardInterrupt:
        sys.exit(130)
