"""The table of the suites, the program that runs them, and `make check`."""

import fnmatch
import os
import pathlib
import re
import subprocess
import sys

import pytest

import program

ROOT = program.ROOT
sys.path.append(str(ROOT / "test"))

import check  # noqa: E402
import run_suites  # noqa: E402
import suites  # noqa: E402

# The sum of the budgets of `make test`, in seconds of CPU.
MOST = 1150
REPORT = '<testsuites><testsuite><testcase name="a" classname="X"/>{}</testsuite></testsuites>'
FAILED = '<testcase name="b" classname="X"><failure message="no"/></testcase>'


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def all_suites():
    return suites.find_suites("build", str)


def test_each_suite_has_a_tier_a_group_and_a_budget():
    found = all_suites()
    assert len({(suite.name, suite.needs.tier) for suite in found}) == len(found) > 60
    for suite in found:
        assert suite.needs.tier in suites.TIERS and suite.needs.budget > 0 and 0 < suite.needs.cores <= 2
        assert set(suite.needs.programs.split()) <= set(suites.GROUPS)
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\nprograms-{group}: " in makefile for group in suites.GROUPS)


def test_a_suite_alone_builds_the_programs_that_it_runs():
    """Otherwise `make test SUITE=...` would test old ones."""
    for path in (ROOT / "test/python").glob("*_*.py"):
        for suite in (suite for suite in all_suites() if suite.command[-2:-1] == [str(path.relative_to(ROOT))]):
            programs = suite.needs.programs.split()
            assert "trainer" in programs
            assert "simulated" in programs or not re.search("^import simulated", path.read_text(), re.MULTILINE), path


def test_the_budgets_of_make_test_leave_room():
    assert sum(suite.needs.budget for suite in all_suites() if suite.needs.tier == "test") <= MOST


def test_every_folder_has_suites_that_check_it():
    known = {name for suite in all_suites() for name in (suite.name, suite.whole)}
    assert {name for named in suites.CHECKED_BY.values() for name in named.split()} <= known
    code = [str(path.relative_to(ROOT)) for folder in ("llmc", "dev", "data", "scripts", "test") for path in (ROOT / folder).rglob("*.*")
            if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".py", ".sh", ".mk"}]
    assert len(code) > 500 and [name for name in code if not suites.suites_of_file(name)] == []
    assert suites.suites_of_file("test/python/test_resume.py") == ["resume"]
    patterns = list(suites.CHECKED_BY)
    hidden = [pattern for i, pattern in enumerate(patterns) if any(fnmatch.fnmatch(pattern, earlier) for earlier in patterns[:i])]
    assert hidden == []
    assert suites.suites_of_file("LICENSE") == []


def test_the_tests_of_a_changed_kernel():
    assert check.filter_of_kernels(["llmc/device/cuda/attention_tiles.cuh", "dev/adamw.cu"]) == "*adam*:*Adam*:*atte*:*Atte*"
    assert check.filter_of_kernels(["llmc/train/options.cpp"]) == ""
    # A header of several kernels, and files of all tests.
    assert {"*clas*", "*laye*", "*glob*"} <= set(check.filter_of_kernels(["llmc/device/cuda/reduce.cuh"]).split(":"))
    assert check.filter_of_kernels(["test/kernels/kernels_main.cpp", "dev/adamw.cu"]) == ""


def test_a_changed_file_of_any_kernel_has_tests():
    """GoogleTest without a test is an error. The tests' names are in the macros that define them."""
    tests = " ".join(re.findall(r"TEST(?:_P|_F)?\((\w+, \w+)", "".join(path.read_text() for path in ROOT.glob("test/kernels/*.cpp"))))
    for path in [*ROOT.glob("llmc/device/cuda/*.cuh"), *ROOT.glob("dev/*.cu"), *ROOT.glob("test/kernels/*")]:
        for word in filter(None, check.filter_of_kernels([str(path.relative_to(ROOT))]).split(":")[::2]):
            assert word.strip("*").lower() in tests.lower(), path


def test_a_name_means_the_suite_of_its_tier():
    found = all_suites()

    def named(patterns, tier):
        return [(suite.name, suite.needs.tier) for suite in run_suites.choose(found, patterns, tier)]

    assert named(["signals"], "test") == [("signals", "test")] and named(["signals"], "long") == [("signals", "long")]
    assert named(["unit"], "test") == [("unit.1", "test"), ("unit.2", "test")]
    assert named(["clang"], "test") == [("clang", "long")] and named(["lab_report"], "test") == [("lab_report", "more")]
    assert not named(["nonsense"], "test") and {tier for _, tier in named([], "more")} == {"more"}


def made(tmp_path, name, script, budget=5, programs="trainer", cores=1):
    """A suite that is a line of shell; REPORT stands for its report."""
    report = tmp_path / f"{name}.xml"
    command = ["bash", "-c", script.replace("REPORT", f"'{report}'")]
    return suites.Suite(name, command, 60 * program.PATIENCE, suites.Needs("test", programs, cores, budget), whole=name)


def ran(tmp_path, chosen, make=""):
    run = run_suites.Run(chosen, tmp_path, lambda name: tmp_path / f"{name}.xml", make.split())
    return run.run()


def test_suites_pass_fail_crash_and_say_nothing(tmp_path, capfd):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(REPORT.format(""))
    bad.write_text(REPORT.format(FAILED))
    results = ran(tmp_path, [made(tmp_path, "passes", f"cp {good} REPORT"), made(tmp_path, "fails", f"cp {bad} REPORT; exit 1"),
                             made(tmp_path, "crashes", "kill -SEGV $$"), made(tmp_path, "silent", "true"),
                             made(tmp_path, "ends_badly", f"cp {good} REPORT; exit 3")])
    assert {name: (result.passed, result.failed) for name, result in results.items()} == {
        "passes": (1, []), "fails": (1, ["X.b"]), "crashes": (0, ["killed by SIGSEGV"]), "silent": (0, ["no report"]),
        "ends_badly": (1, ["exit status 3"])}
    assert "FAILED X.b" in capfd.readouterr().out


def test_a_suite_over_its_budget_is_named_and_does_not_fail(tmp_path, capfd):
    good = tmp_path / "good"
    good.write_text(REPORT.format(""))
    burn = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.5: pass'; cp {good} REPORT"
    chosen = [made(tmp_path, "burns", burn, budget=0.1), made(tmp_path, "rests", f"cp {good} REPORT")]
    results = ran(tmp_path, chosen)
    assert results["burns"].cpu >= 0.5 and not results["burns"].failed
    run_suites.show_over_budget(chosen, results)
    assert re.search(r"over the budget in test/suites.py: burns \d+ of 0 s\n$", capfd.readouterr().out)


def test_a_suite_starts_when_its_programs_are_built(tmp_path):
    """The second group is built only after the first one's suite has begun."""
    good = tmp_path / "good"
    good.write_text(REPORT.format(""))
    make = tmp_path / "make"
    make.write_text(f"#!/bin/sh\ntouch {tmp_path}/$1\n[ $1 != programs-tests ] || until [ -e {tmp_path}/began ]; do sleep 0.01; done\n")
    make.chmod(0o755)
    first = made(tmp_path, "first", f"[ -e {tmp_path}/programs-trainer ] && touch {tmp_path}/began && cp {good} REPORT")
    second = made(tmp_path, "second", f"[ -e {tmp_path}/programs-tests ] && cp {good} REPORT", programs="tests")
    assert all(not result.failed for result in ran(tmp_path, [second, first], str(make)).values())


def test_programs_that_are_not_built_cost_only_their_suites(tmp_path):
    """The last line counts, whatever is not built. Here the linker misses a library of one group."""
    make = tmp_path / "make"
    make.write_text("""#!/bin/sh
        [ $1 = programs-tests ] || exit 0
        echo '/usr/bin/ld: cannot find -lnothing: No such file or directory'
        echo 'collect2: error: ld returned 1 exit status' >&2
        echo 'make: *** [Makefile:319: build/test/unit] Error 1' >&2
        exit 2
        """)
    simulated = tmp_path / "build/test/cuda-runtime-plain"
    simulated.parent.mkdir(parents=True)
    simulated.write_text(f"#!/bin/sh\nfor option; do case $option in --gtest_output=xml:*) echo '{REPORT.format('')}' > ${{option#*xml:}}; esac; done\n")
    for script in (make, simulated):
        script.chmod(0o755)
    command = [sys.executable, "test/run_suites.py", "--build", tmp_path / "build", "--make", make, "unit", "cuda-runtime-plain"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * program.PATIENCE)
    assert done.stdout.splitlines()[-1] == "1 passed, 2 failed" and done.returncode == 1, done.stdout + done.stderr
    assert ("error: the programs tests were not built: /usr/bin/ld: cannot find -lnothing: No such file or directory\n"
            "    FAILED without them: unit.1 unit.2\n") in done.stdout


def test_what_has_passed_is_not_run_again(tmp_path):
    file = tmp_path / "passed.json"
    run_suites.Earlier(file, "state").add({"a": run_suites.Result(passed=3), "b": run_suites.Result(failed=["x"])})
    assert run_suites.Earlier(file, "state").passed == {"a": [3, []]}
    assert run_suites.Earlier(file, "another").passed == {}


def test_check_of_a_changed_page(tmp_path):
    """In a repository of its own: a file with wrong prose, then with right prose, and the suites of its folder."""
    for name in ("test/check.py", "test/suites.py", "test/python/prose.py", "docs/terms.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())

    def run(*command):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    def checked():
        return run(sys.executable, "test/check.py", "--base", "HEAD", "echo", "RUN")

    for command in (["init", "-q"], ["add", "-A"], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        assert run("git", *command).returncode == 0
    assert "no file differs from HEAD" in checked().stdout
    page = pathlib.Path(tmp_path, "docs/data.md")
    page.write_text("Of " + "two ranks it is one.\n")
    assert checked().returncode == 1 and "opens with a dangling 'Of'" in checked().stdout
    page.write_text("It is one of two ranks.\n")
    assert checked().stdout.endswith("RUN documents options_page\n")
