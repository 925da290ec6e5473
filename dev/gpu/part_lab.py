"""The part `lab` of the check: every variant of the kernel lab timed, with the report and the picture of dev/lab/report.py."""

import subprocess
import sys

import programs
from results import CheckFailed, Late, Skipped


def run(results, tiny):
    results.attempt("every variant of the kernel lab", time_all, results, tiny)


def time_all(results, tiny):
    if tiny:
        raise Skipped("nothing is timed on the CPU")
    timings = results.path.parent / "timings.jsonl"
    timings.unlink(missing_ok=True)
    trouble = None
    try:
        done = programs.run([programs.KERNELS, "--time", timings], results.seconds_left())
        trouble = CheckFailed(programs.tail(done.stderr)) if done.returncode else None
    except Late as late:  # what was timed until then counts
        trouble = late
    report = subprocess.run([sys.executable, programs.BUNDLE / "dev/lab/report.py", timings, timings.parent],
                            capture_output=True, text=True)
    if trouble or report.returncode:
        raise trouble or CheckFailed(programs.tail(report.stderr))
    return {"detail": report.stdout.strip()}
