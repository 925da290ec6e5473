"""clang-tidy finds nothing in any file. (`.ci/run` reads those that a change touches.)"""

import os
import subprocess

import program


def test_no_file_has_a_finding():
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    subprocess.run(["scripts/deps.sh", "lint"], cwd=program.ROOT, check=True, stdout=subprocess.DEVNULL)
    done = subprocess.run(["make", f"--jobs={os.cpu_count()}", "--keep-going", "WERROR=1", f"BUILD={program.BUILD}", "clang-tidy"], cwd=program.ROOT,
                          env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
