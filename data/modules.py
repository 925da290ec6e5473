"""Finds the Python modules that the scripts of the datasets need. Not run by itself: common.py has it begin.

`make deps` installs some of them as Debian's packages and others into .python/ (scripts/interpreter.py);
data/requirements.txt has them all for pip.
"""

import importlib
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
REQUIREMENTS = pathlib.Path(__file__).with_name("requirements.txt")
sys.path.append(str(ROOT / "scripts"))

import interpreter  # noqa: E402

WITH_PIP = f"`pip install -r {REQUIREMENTS}`"
REMEDY = f"run `make deps`, or {WITH_PIP}"


def need(*modules):
    """Returns where all are there; otherwise the script begins again under another interpreter, or ends with one line."""
    interpreter.need(*modules, remedy=REMEDY)


def why_not(module):
    """Why a module cannot be imported and what would do, in words that follow its name; empty where it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # what was installed for another Python or another NumPy can raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return f"is not installed; {REMEDY}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"is installed and cannot be imported ({reason}); {WITH_PIP} installs one that can be"
    return ""
