#!/usr/bin/env python3
"""Builds and runs the test suites of suites.py, and counts their tests: `make test`, `make test-more` and `make test-long`.

The programs are built group by group. A suite starts as soon as its group is there and cores are free for it, the longest
first by the last run's times. A suite writes a JUnit report (GoogleTest and pytest both do). One that crashes, exceeds its
time limit or reports no test counts as one more failure, and so does one whose programs were not built. The last line is
`N passed, M failed`, with `, K skipped` if tests were skipped. The exit status is 0 only if nothing failed. The output of the
suites is in BUILD/test/logs/, and is shown for those that fail.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree

import suites as table

LINES_SHOWN = 200  # most lines shown of a failed suite's output; the log has all of it
SLOWEST_SHOWN = 10
NO_TEST_RAN = "exit status 5"  # pytest's, also for a file of tests that is skipped
# Suites may need so many cores more than there are: each also waits now and then.
MORE_CORES = 0.6
# An error in the output of a build, of a compiler, a linker or make; and the lines that only say that a command has failed.
ERROR = re.compile(r"error|cannot find|undefined reference|\*\*\*", re.IGNORECASE)
CONSEQUENCE = re.compile(r"\*\*\* \[|^collect2: |^make.*(Waiting for|because of errors)|^\s")
SHORT_WAIT = 1.0  # seconds; only so that Ctrl-C is noticed
running = set()  # the processes of running suites and of the build


@dataclasses.dataclass
class Result:
    passed: int = 0
    failed: list = dataclasses.field(default_factory=list)  # names of tests, or what happened to the suite
    skipped: list = dataclasses.field(default_factory=list)  # (name, reason)
    seconds: float = 0
    cpu: float = 0  # seconds, of all its processes


def waited(process, seconds=None):
    """Waits for a process. Returns its exit status (negative for a signal) and the CPU time of it and its children. After the
    given time, or when another thread ends it, its whole group is killed."""
    timer = threading.Timer(seconds, end_group, [process]) if seconds else None
    if timer:
        timer.start()
    try:
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        if timer:
            timer.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode, usage.ru_utime + usage.ru_stime


def run_command(suite, log_path):
    """Runs a suite into its log. Returns the process's error, or None, and its CPU time."""
    start = time.monotonic()
    with open(log_path, "w") as log:
        # A separate process group, so that ending the suite ends its child processes. Each mpirun also gets its own
        # folder, because those that share one may remove it while another uses it.
        place = tempfile.mkdtemp()
        process = subprocess.Popen(suite.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                                   env={**os.environ, "OMPI_MCA_orte_tmpdir_base": place, **suite.environment},
                                   start_new_session=True)
        running.add(process)
        try:
            status, cpu = waited(process, suite.timeout)
        finally:
            running.discard(process)
            end_group(process)
            shutil.rmtree(place, ignore_errors=True)
    if time.monotonic() - start >= suite.timeout:
        return f"ended after {suite.timeout:g} seconds", cpu
    if status < 0:
        return f"killed by {signal.Signals(-status).name}", cpu
    return (f"exit status {status}" if status else None), cpu


def end_group(process):
    """Ends the remaining processes of a suite. SIGTERM comes first, because mpirun then ends its ranks, which have
    their own process groups."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        end = time.monotonic() + 10
        while process.returncode is None and time.monotonic() < end:
            time.sleep(0.1)
        time.sleep(1)  # pytest ends at once, and mpirun under it within a second
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def build_group(command):
    """Builds programs, and prints what the build prints. Returns its exit status, its CPU time, and the last line that says why
    it failed."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                               start_new_session=True)
    running.add(process)
    error = ""
    with process.stdout:
        for line in process.stdout:
            print(line, end="", flush=True)
            if ERROR.search(line) and not CONSEQUENCE.search(line):
                error = line.strip()
    status, cpu = waited(process)
    running.discard(process)
    return status, cpu, error


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
    start = time.monotonic()
    try:
        trouble, cpu = run_command(suite, log_path)
    except OSError as error:  # no such program
        trouble, cpu = str(error), 0
    result = read_report(report_path) or Result(failed=[trouble or "no report"])
    result.seconds, result.cpu = time.monotonic() - start, cpu
    if not (result.passed or result.failed or result.skipped):
        result.failed.append("no test in it")
    elif trouble and not result.failed and not (trouble == NO_TEST_RAN and result.skipped):
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


def show(suite, width, result, log_path):
    print(f"{suite.name:{width}}  {summary(result.passed, len(result.failed), len(result.skipped)):34} {result.seconds:6.1f} s "
          f"{result.cpu:7.1f} s of CPU", flush=True)
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


def show_over_budget(suites, results):
    """Processors differ by a factor of two, so a suite over its budget is a hint and no failure."""
    over = [f"{suite.name} {results[suite.name].cpu:.0f} of {suite.needs.budget:.0f} s" for suite in suites
            if suite.name in results and results[suite.name].cpu > suite.needs.budget]
    if over:
        print("CPU time over the budget in test/suites.py: " + ", ".join(over))


class Run:
    """Builds groups of programs and runs suites beside that."""

    def __init__(self, chosen, logs, report, make):
        self.pending, self.logs, self.report = list(chosen), logs, report
        self.width = max(len(suite.name) for suite in chosen)
        self.results, self.active, self.built = {}, [], set()
        self.build_seconds = self.build_cpu = 0.0
        self.changed = threading.Condition()
        self.times_file = logs / "times.json"
        self.times = json.loads(self.times_file.read_text()) if self.times_file.exists() else {}
        self.pending.sort(key=lambda suite: -self.times.get(suite.name, suite.needs.budget / suite.needs.cores))
        self.is_building = bool(make)
        if make:
            threading.Thread(target=self.build, args=(make,), daemon=True).start()
        else:
            self.built = set(table.GROUPS)

    def waits_for(self, suite, group):
        return group in suite.needs.programs.split() and not suite.skipped

    def build(self, make):
        for group in table.GROUPS:
            with self.changed:
                if not any(self.waits_for(suite, group) for suite in self.pending):
                    continue
            start = time.monotonic()
            status, cpu, error = build_group([*make, f"programs-{group}"])
            with self.changed:
                self.build_seconds += time.monotonic() - start
                self.build_cpu += cpu
                if status:
                    self.give_up(group, error or f"make ends with status {status}")
                else:
                    self.built.add(group)
                self.changed.notify_all()
        with self.changed:
            self.is_building = False
            self.changed.notify_all()

    def give_up(self, group, error):
        """The suites that need these programs fail. All others go on."""
        lost = [suite for suite in self.pending if self.waits_for(suite, group)]
        for suite in lost:
            self.pending.remove(suite)
            self.results[suite.name] = Result(failed=[f"not run: {error}"])
        print(f"error: the programs {group} were not built: {error}\n"
              f"    FAILED without them: {' '.join(suite.name for suite in lost)}", flush=True)

    def next_suite(self):
        """A suite that may start now, or None."""
        busy = sum(suite.needs.cores for suite in self.active) + (1 if self.is_building else 0)
        for suite in self.pending:
            fits = not self.active or busy + min(suite.needs.cores, os.cpu_count()) <= os.cpu_count() + MORE_CORES
            if (self.built.issuperset(suite.needs.programs.split()) or suite.skipped) and fits:
                return suite
        return None

    def run_one(self, suite):
        log_path = self.logs / f"{suite.name}.log"
        result = run_suite(suite, log_path, self.report(suite.name))
        with self.changed:
            self.active.remove(suite)
            self.results[suite.name] = result
            show(suite, self.width, result, log_path)
            self.changed.notify_all()

    def run(self):
        with self.changed:
            while self.pending or self.active:
                suite = self.next_suite()
                if suite is None:
                    self.changed.wait(SHORT_WAIT)
                    continue
                self.pending.remove(suite)
                self.active.append(suite)
                threading.Thread(target=self.run_one, args=(suite,), daemon=True).start()
        self.times.update({name: result.seconds for name, result in self.results.items() if result.seconds})
        self.times_file.write_text(json.dumps(self.times, indent=1))
        return self.results


def state_of_tree():
    """A digest of all files that git knows or would add; empty without git."""
    digest = hashlib.sha256()
    for command in (["rev-parse", "HEAD"], ["diff", "HEAD"], ["ls-files", "--others", "--exclude-standard", "-z"]):
        done = subprocess.run(["git", *command], capture_output=True)
        if done.returncode:
            return ""
        digest.update(done.stdout)
    for name in filter(None, done.stdout.split(b"\0")):
        digest.update(pathlib.Path(os.fsdecode(name)).read_bytes())
    return digest.hexdigest()


class Earlier:
    """The suites that have passed in this state of the tree, so that an interrupted `make test-long` goes on."""

    def __init__(self, file, state):
        self.file, self.state = file, state
        known = json.loads(file.read_text()) if state and file.exists() else {}
        self.passed = known["passed"] if known.get("state") == state else {}

    def add(self, results):
        self.passed.update({name: [result.passed, result.skipped] for name, result in results.items() if not result.failed})
        if self.state:
            self.file.write_text(json.dumps({"state": self.state, "passed": self.passed}))


def choose(suites, patterns, tier):
    """The suites of a tier. Or those that are named: of this tier if it has some of that name. (Some suites of `make test-long`
    have the name of a shorter one.)"""
    if not patterns:
        return [suite for suite in suites if suite.needs.tier == tier]
    chosen = []
    for pattern in patterns:
        meant = [suite for suite in suites if suite.is_meant(pattern)]
        chosen += [suite for suite in meant if (suite.needs.tier == "long") == (tier == "long")] or meant
    return list({id(suite): suite for suite in chosen}.values())


def without_jobserver(make):
    """A make that this program starts has no access to the jobserver of the make that started it, but keeps its number of jobs."""
    words = os.environ.get("MAKEFLAGS", "").split()
    jobs = [word for word in words if re.fullmatch(r"-j\d+", word)]
    os.environ["MAKEFLAGS"] = " ".join(word for word in words if not re.match("-j|--job", word))
    return [*shlex.split(make), *jobs] if make else []


def main():
    parser = argparse.ArgumentParser(description="Builds and runs the test suites and counts their tests.")
    parser.add_argument("suites", nargs="*", help="names or patterns such as mpi-* (default: all suites of the tier)")
    parser.add_argument("--tier", choices=table.TIERS, default="test", help="the suites of `make test`, `make test-more` or `make test-long`")
    parser.add_argument("--build", default="build", help="where the test programs are")
    parser.add_argument("--program", default="train_gpt", help="the trainer that the Python tests run")
    parser.add_argument("--make", default="", metavar="COMMAND", help="build the programs that the suites need with this command")
    parser.add_argument("--without", default="", metavar="LIST", help="what this build lacks: simt, runtime")
    arguments = parser.parse_args()

    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    logs = pathlib.Path(arguments.build, "test/logs")
    logs.mkdir(parents=True, exist_ok=True)
    # The paths of the programs, for the Python tests.
    os.environ["PROGRAM"] = str(pathlib.Path(arguments.program).resolve())
    # On a busy machine, spinning threads wait for each other endlessly (let_waiting_threads_sleep in llmc/device/device.h).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ["BUILD_DIR"] = str(pathlib.Path(arguments.build).resolve())

    def report(name):
        return logs.resolve() / f"{name}.xml"

    lacks = arguments.without.split()
    suites = table.find_suites(arguments.build, report, "simt" not in lacks, "runtime" not in lacks)
    chosen = choose(suites, arguments.suites, arguments.tier)
    if not chosen:
        sys.exit(f"error: no suite matches {' '.join(arguments.suites)}; there are:  " +
                 ", ".join(sorted({suite.whole or suite.name for suite in suites})))
    earlier = Earlier(logs / "passed-long.json", state_of_tree() if arguments.tier == "long" else "")
    again = [suite.name for suite in chosen if suite.name in earlier.passed]
    if again:
        print(f"passed before in this state of the tree, and not run again: {', '.join(again)}")

    # If a script starts this in the background, Ctrl-C is ignored here, and the tests would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An interrupted run ends its suites' processes before it exits.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    start = time.monotonic()
    left = [suite for suite in chosen if suite.name not in again]
    results = {}
    if left:
        run = Run(left, logs, report, without_jobserver(arguments.make))
        try:
            results = run.run()
        finally:
            earlier.add(run.results)
            for process in list(running):
                end_group(process)
    passed = sum(result.passed for result in results.values()) + sum(earlier.passed[name][0] for name in again)
    failed = sum(len(result.failed) for result in results.values())
    skipped = [case for result in results.values() for case in result.skipped] + [case for name in again for case in earlier.passed[name][1]]
    show_skipped(skipped)
    show_slowest({name: result.seconds for name, result in results.items()})
    show_over_budget(left, results)
    if left:
        print(f"{len(left)} suites in {time.monotonic() - start:.0f} s with {sum(result.cpu for result in results.values()):.0f} s of CPU, and "
              f"{run.build_seconds:.0f} s of building with {run.build_cpu:.0f} s of CPU")
    (logs / "summary.txt").write_text(summary(passed, failed, len(skipped)) + "\n")
    print(summary(passed, failed, len(skipped)), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
