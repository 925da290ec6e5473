"""The folders, noted at link time, in which a program looks for libraries before the system's."""

import pathlib
import re
import subprocess


def of(program):
    noted = subprocess.run(["readelf", "-d", program], capture_output=True, text=True, check=True).stdout
    return [pathlib.Path(folder) for folders in re.findall(r"\(RUNPATH\).*\[(.*)\]", noted) for folder in folders.split(":")]


def find(program, pattern):
    """The first library with such a name in those folders."""
    return next(path for folder in of(program) for path in sorted(folder.glob(pattern)))
