"""Finds the Python modules that the dataset scripts need. Not run by itself: common.py imports it first.

`make deps` installs some of them as Debian packages and others into .python/ (scripts/interpreter.py);
data/requirements.txt lists all of them for pip.
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
    """Returns if all modules are there. Otherwise the script restarts with another interpreter, or ends with one
    line."""
    interpreter.need(*modules, remedy=REMEDY)


def why_not(module):
    """Why a module cannot be imported and what to do, worded to follow its name; empty if it can be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a module for another Python or NumPy can raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == module:
            return f"is not installed; {REMEDY}"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"is installed but cannot be imported ({reason}); run {WITH_PIP}"
    return ""
