"""All of `make test` under AddressSanitizer and UndefinedBehaviorSanitizer, in a build of its own (build-sanitize/)."""

import os
import subprocess

import program


def test_everything_passes_under_sanitizers():
    """The output of a suite that fails is shown, and the build stays, so that a next run takes less time."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "BUILD_DIR", "PROGRAM", "PYTEST_CURRENT_TEST")}
    done = subprocess.run(["make", "test", "SANITIZE=1"], cwd=program.ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-20000:], done.stderr[-5000:])
    counted = [line for line in done.stdout.splitlines() if " passed, " in line][-1]
    assert done.returncode == 0 and ", 0 failed" in counted, counted
