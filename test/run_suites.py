#!/usr/bin/env python3
"""Runs the test suites, three at a time, and counts their tests: `make test`, `make test-long` and `make
test-matrix`.

A suite is one command that writes a JUnit report (GoogleTest and pytest both do). A suite that crashes, exceeds its
time limit or reports no test counts as one more failure. The last line is `N passed, M failed`, with `, K skipped` if
tests were skipped. The exit status is 0 only if nothing failed. The output of the suites is in BUILD/test/logs/, and
is shown for those that fail.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import fnmatch
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

RANKS = [1, 2, 3, 4, 8]
MATRIX_RANKS = [1, 2, 3, 4, 8]  # the process counts of the parallel matrix
KERNEL_KINDS = ["address", "thread"]  # how the kernels are compiled for the executor (dev/kernels.mk)
LONG_KERNEL_KINDS = ["plain"]
RUNTIME_KINDS = ["plain"]  # the same for the CUDA runtime of the tests (test/simt/runtime.mk)
LONG_RUNTIME_KINDS = ["address"]
# Many suites mostly wait (for processes, for time limits), and others have one thread.
AT_ONCE = 3
# The suites that take longest begin first, so that none runs alone at the end.
LONGEST = ["kernels-*", "simulated_*", "gpu_check", "zero", "signals", "pages", "mpi-8"]
# Seconds after which a suite is ended: several times its duration on two cores, because a machine may be busy.
# PATIENCE multiplies them and the tests' own time limits; the Makefile sets it for builds with sanitizers.
UNIT_TIMEOUT, MPI_TIMEOUT, KERNEL_TIMEOUT, PYTHON_TIMEOUT, LONG_TIMEOUT, MATRIX_TIMEOUT = 300, 240, 600, 420, 5400, 5400
# The suites that check for leaks in a build with address checks. Open MPI has leaks, which only the whole stack of an
# allocation distinguishes from ours (test/leaks.txt). Recording it takes up to 15 times as long, so few suites do.
OF_MPI_PROGRAMS = "detect_leaks=1:fast_unwind_on_malloc=0"
LEAK_CHECKS = {"unit": "detect_leaks=1", "mpi-1": OF_MPI_PROGRAMS, "mpi-2": OF_MPI_PROGRAMS, "program": OF_MPI_PROGRAMS}
running = set()  # the processes of running suites
LINES_SHOWN = 200  # most lines shown of a failed suite's output; the log has all of it
SLOWEST_SHOWN = 10


@dataclasses.dataclass
class Suite:
    name: str
    command: list
    timeout: float
    environment: dict = dataclasses.field(default_factory=dict)
    skipped: str = ""  # why it cannot run here


@dataclasses.dataclass
class Result:
    passed: int = 0
    failed: list = dataclasses.field(default_factory=list)  # names of tests, or what happened to the suite
    skipped: list = dataclasses.field(default_factory=list)  # (name, reason)


def started(transport, ranks, program):
    """The beginning of a command that starts a program with this many processes."""
    if transport == "tcp" or os.environ.get("MPI") == "0":
        return [program, "--processes", str(ranks)]
    return ["scripts/launch.sh", "-np", str(ranks), "--bind-to", "none", program]


def matrix_suite(build, ranks, report):
    name = f"matrix-{ranks}"
    command = [*started("mpi", ranks, f"{build}/test/mpi"), *googletest_options(report(name)),
               f"--gtest_filter=*WholeMatrix*of_{ranks}_*"]
    return Suite(name, command, MATRIX_TIMEOUT)


def find_suites(build, report, kind):
    """The table of suites; report(name) is the file of a suite's report."""
    if kind == "matrix":
        return [matrix_suite(build, ranks, report) for ranks in MATRIX_RANKS]
    if kind == "long":
        return (kernel_suites(build, LONG_KERNEL_KINDS, report) +
                [runtime_suite(build, kind, report) for kind in LONG_RUNTIME_KINDS] +
                [python_suite(path, report, LONG_TIMEOUT) for path in sorted(pathlib.Path("test/python").glob("long_*.py"))])
    suites = [Suite("unit", [f"{build}/test/unit", *googletest_options(report("unit"))], UNIT_TIMEOUT)]
    transports = ["tcp"] if os.environ.get("MPI") == "0" else ["mpi", "tcp"]
    for transport, ranks in itertools.product(transports, RANKS):
        name = f"{transport}-{ranks}"
        left_out = "*WholeMatrix*"  # `make test-matrix` runs these
        if transport == "tcp" and len(transports) > 1:  # the sums are the same either way: run the long trainings once
            left_out += ":*ShardedTraining*:HybridSharding*:*RecomputedTraining*:*WrongWeight*:ParallelMatrix*:StrangeFamily*"
        command = [*started(transport, ranks, f"{build}/test/mpi"), *googletest_options(report(name)), f"--gtest_filter=-{left_out}"]
        suites.append(Suite(name, command, MPI_TIMEOUT))
    of_kernels = kernel_suites(build, KERNEL_KINDS, report)
    suites += of_kernels
    if of_kernels:
        suites += [runtime_suite(build, kind, report) for kind in RUNTIME_KINDS]
    for path in sorted(pathlib.Path("test/python").glob("test_*.py")):
        suites.append(python_suite(path, report, PYTHON_TIMEOUT))
    return sorted(suites, key=lambda suite: not any(fnmatch.fnmatch(suite.name, pattern) for pattern in LONGEST))


def kernel_suites(build, kinds, report):
    programs = [pathlib.Path(build, "test", f"kernels-{kind}") for kind in kinds]
    return [Suite(program.name, [program, *googletest_options(report(program.name))], KERNEL_TIMEOUT,
                  {"KERNEL_REPORT": f"{build}/nvcc/report.txt"})
            for program in programs if program.exists()]  # absent in a build with sanitizers


def runtime_suite(build, kind, report):
    name = f"cuda-runtime-{kind}"
    program = pathlib.Path(build, "test", name)
    return Suite(name, [program, *googletest_options(report(name))], KERNEL_TIMEOUT,
                 skipped="" if program.exists() else f"{program} was not built: cublasLt.h or nccl.h is missing")


def googletest_options(report_path):
    return [f"--gtest_output=xml:{report_path}", "--gtest_color=no"]


def python_suite(path, report, timeout):
    name = re.sub("^(test|long)_", "", path.stem)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-v", str(path)]
    # Ignore pytest plugins that happen to be installed.
    return Suite(name, command + [f"--junitxml={report(name)}"], timeout, {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})


def run_command(suite, log_path):
    """Runs a suite into its log. Returns the process's error, or None."""
    with open(log_path, "w") as log:
        # A separate process group, so that ending the suite ends its child processes. Each mpirun also gets its own
        # folder, because those that share one may remove it while another uses it.
        place = tempfile.mkdtemp()
        process = subprocess.Popen(suite.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env={**os.environ, "OMPI_MCA_orte_tmpdir_base": place, **suite.environment},
                                   start_new_session=True)
        running.add(process)
        try:
            status = process.wait(suite.timeout)
        except subprocess.TimeoutExpired:
            return f"ended after {suite.timeout:g} seconds"
        finally:
            running.discard(process)
            end_group(process)
            shutil.rmtree(place, ignore_errors=True)
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exit status {status}" if status else None


def end_group(process):
    """Ends the remaining processes of a suite. SIGTERM comes first, because mpirun then ends its ranks, which have
    their own process groups."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
            time.sleep(1)  # pytest ends at once, and mpirun under it within a second
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def read_report(path):
    """The tests of a JUnit report; None if there is no complete report."""
    try:
        cases = ElementTree.parse(path).getroot().iter("testcase")
    except (OSError, ElementTree.ParseError):
        return None
    result = Result()
    for case in cases:
        name = f"{case.get('classname')}.{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed.append(name)
        elif skipped is not None:
            reason = skipped.get("message") or skipped.text or "no reason given"
            result.skipped.append((name, " ".join(reason.split())))
        elif case.get("status") == "notrun":
            result.skipped.append((name, "disabled"))
        else:
            result.passed += 1
    return result


def run_suite(suite, log_path, report_path):
    report_path.unlink(missing_ok=True)
    if suite.skipped:
        return Result(skipped=[(suite.name, suite.skipped)])
    trouble = run_command(suite, log_path)
    result = read_report(report_path)
    if result is None:
        return Result(failed=[trouble or "no report"])
    if not (result.passed or result.failed or result.skipped):
        result.failed.append("no test in it")
    elif trouble and not result.failed:
        result.failed.append(trouble)
    return result


def output_of_failure(log_path):
    """A suite's output without the passed tests of GoogleTest and pytest."""
    text = log_path.read_text(errors="replace")
    text = re.sub(r"\[ RUN      \] (.*)\n\[       OK \] \1 .*\n", "", text)
    passed = re.compile(r"\[-{10}\] .*|.* PASSED +\[ *\d+%\]|")
    lines = [line for line in text.splitlines() if not passed.fullmatch(line)]
    if len(lines) > LINES_SHOWN:
        lines = [f"... the last {LINES_SHOWN} lines of {len(lines)}:"] + lines[-LINES_SHOWN:]
    return "\n".join("    " + line for line in lines)


def summary(passed, failed, skipped):
    return f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else "")


def show(result, seconds, log_path):
    print(f"{summary(result.passed, len(result.failed), len(result.skipped)):34} {seconds:6.1f} s", flush=True)
    if result.failed:
        print(output_of_failure(log_path))
        for name in result.failed:
            print(f"    FAILED {name}")
        print(f"    log: {log_path}", flush=True)


def show_skipped(skipped):
    """One line for each reason, the most frequent first. (GoogleTest's reasons begin with a file and a line.)"""
    reasons = collections.Counter(re.sub(r"^\S+:\d+ ", "", reason) for _, reason in skipped)
    for reason, count in reasons.most_common():
        print(f"{count:5} skipped: {reason}")


def show_slowest(seconds):
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST_SHOWN]
    print("slowest: " + ", ".join(f"{name} {time:.0f} s" for name, time in slowest))


def main():
    parser = argparse.ArgumentParser(description="Runs the test suites and counts their tests.")
    parser.add_argument("suites", nargs="*", help="names or patterns such as mpi-* (default: all suites)")
    parser.add_argument("--long", dest="kind", action="store_const", const="long", help="the suites that take long, instead of the others")
    parser.add_argument("--matrix", dest="kind", action="store_const", const="matrix", help="the whole parallel matrix instead")
    parser.add_argument("--build", default="build", help="where the test programs are")
    parser.add_argument("--program", default="train_gpt", help="the trainer that the Python tests run")
    arguments = parser.parse_args()

    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    logs = pathlib.Path(arguments.build, "test/logs")
    logs.mkdir(parents=True, exist_ok=True)
    # The paths of the programs, for the Python tests.
    os.environ["PROGRAM"] = str(pathlib.Path(arguments.program).resolve())
    # On a busy machine, spinning threads wait for each other endlessly (llmc/device/cpu/openmp_wait.h).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["BUILD_DIR"] = str(pathlib.Path(arguments.build).resolve())

    def report(name):
        return logs.resolve() / f"{name}.xml"

    suites = find_suites(arguments.build, report, arguments.kind)
    for suite in suites:
        suite.timeout *= float(os.environ.get("PATIENCE", 1))
        if suite.name in LEAK_CHECKS:
            options = [os.environ.get("ASAN_OPTIONS", ""), LEAK_CHECKS[suite.name]]
            suite.environment["ASAN_OPTIONS"] = ":".join(filter(None, options))
    chosen = [suite for suite in suites
              if not arguments.suites or any(fnmatch.fnmatch(suite.name, pattern) for pattern in arguments.suites)]
    if not chosen:
        sys.exit(f"error: no suite matches {' '.join(arguments.suites) or '*'}; there are:  " +
                 (", ".join(suite.name for suite in suites) or "none"))

    # If a script starts this in the background, Ctrl-C is ignored here, and the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An interrupted run ends its suites' processes before it exits.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    width = max(len(suite.name) for suite in chosen)
    passed = failed = 0
    skipped, seconds_of = [], {}
    start = time.monotonic()

    def run_timed(suite):
        suite_start = time.monotonic()
        return run_suite(suite, logs / f"{suite.name}.log", report(suite.name)), time.monotonic() - suite_start

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for suite, done in [(suite, pool.submit(run_timed, suite)) for suite in chosen]:
                print(f"{suite.name:{width}}  ", end="", flush=True)
                result, seconds = done.result()
                show(result, seconds, logs / f"{suite.name}.log")
                passed, failed = passed + result.passed, failed + len(result.failed)
                skipped += result.skipped
                seconds_of[suite.name] = seconds
        except BaseException:  # an interrupted run
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                end_group(process)
            raise
    show_skipped(skipped)
    show_slowest(seconds_of)
    print(f"{len(chosen)} suites in {time.monotonic() - start:.0f} s")
    (logs / "summary.txt").write_text(summary(passed, failed, len(skipped)) + "\n")
    print(summary(passed, failed, len(skipped)), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
