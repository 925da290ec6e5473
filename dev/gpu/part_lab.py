"""The part `lab` of the check: times every variant of the kernel lab, one operation at a time.

It writes the report and the picture of dev/lab/report.py.
"""

import json
import subprocess
import sys

import part_kernels
import programs
from results import CheckFailed, Late, Skipped, read, replace_text, require

SECONDS = 5  # the least time for an operation


def run(results, tiny):
    if tiny:
        results.attempt("every variant of the kernel lab", skip)
        return
    timings = results.path.parent / "timings.jsonl"
    operations = [suite.removeprefix("Lab.") for suite in part_kernels.attempt_list(results) if suite.startswith("Lab.")]
    if not operations:
        return
    # Drops the timings of other commits.
    known = [operation for operation in operations if results.has_passed(name_of(operation))]
    write(timings, [line for line in read(timings) if line["operation"] in known])
    results.attempt_all([(name_of(operation), time_operation, (results, timings, operations, operation), SECONDS)
                         for operation in operations])
    results.attempt("the report of the kernel lab", report, timings)


def skip():
    raise Skipped("nothing is timed on the CPU")


def name_of(operation):
    return f"every variant of {operation}"


def write(timings, lines):
    replace_text(timings, "".join(json.dumps(line) + "\n" for line in lines))


def time_operation(results, timings, operations, operation):
    own = timings.with_suffix(".part")
    own.unlink(missing_ok=True)
    late = None
    try:
        done = programs.run([programs.KERNELS, "--time", own, operation], results.seconds_left())
    except Late as reason:
        late = reason
    # Keeps what was timed so far, except an incomplete line, and unless an earlier run timed all of it.
    lines = read(timings)
    if not (late and results.has_passed(name_of(operation))):
        timed = own.read_text().splitlines(keepends=True) if own.exists() else []
        lines = [line for line in lines if line["operation"] != operation]
        lines += [json.loads(line) for line in timed if line.endswith("\n")]
        write(timings, sorted(lines, key=lambda line: operations.index(line["operation"])))
    own.unlink(missing_ok=True)
    if late:
        raise late
    require(done.returncode == 0, programs.tail(done.stderr))
    return {"detail": f"{sum(line['operation'] == operation for line in lines)} timings"}


def report(timings):
    if not read(timings):
        raise Skipped("there are no timings")
    done = subprocess.run([sys.executable, programs.BUNDLE / "dev/lab/report.py", timings, timings.parent], capture_output=True,
                          text=True)
    if done.returncode:
        raise CheckFailed(programs.tail(done.stderr))
    return {"detail": done.stdout.strip()}
