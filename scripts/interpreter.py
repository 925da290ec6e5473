"""Finds the modules that a script needs: in this interpreter, in .python/, or by the interpreter of scripts/deps.sh.

`make deps` installs Debian's packages, which /usr/bin/python3 alone sees, and PyPI's into .python/. Which packages
those are is said in deps.sh.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

SCRIPTS = pathlib.Path(__file__).resolve().parent
FROM_PYPI = str(SCRIPTS.parent / ".python")
if FROM_PYPI not in sys.path:
    sys.path.append(FROM_PYPI)  # last: what the system has goes first


def end_plainly(kind, error, traceback):
    """Ctrl-C while a script still imports its modules, which takes a while, ends it with one line and no traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = end_plainly


def lacks(modules):
    """The first of the modules that this interpreter does not find, or None."""
    for module in modules:
        try:
            if importlib.util.find_spec(module) is None:
                return module
        except ModuleNotFoundError:  # of a.b where there is no a
            return module
    return None


def need(*modules, remedy="run `make deps`"):
    """Returns where all modules are there. Otherwise the script begins again under the interpreter that deps.sh chooses;
    where that one lacks some too the program ends with one line, which says what would do."""
    lacking = lacks(modules)
    if lacking is None:
        return
    chosen = subprocess.run([SCRIPTS / "deps.sh", "python"], capture_output=True, text=True).stdout.strip()
    question = f"import sys; sys.path.append({str(SCRIPTS)!r}); import interpreter; interpreter.need_here({modules!r})"
    if not chosen or subprocess.run([chosen, "-c", question], capture_output=True).returncode != 0:
        wanted = " and ".join(filter(None, [", ".join(modules[:-1]), modules[-1]]))
        both = f"neither {sys.executable} nor {chosen} has" if chosen else f"{sys.executable} has not"
        sys.exit(f"error: {both} {wanted} ({lacking} is missing); {remedy}")
    os.execv(chosen, [chosen, *sys.argv])


def need_here(modules):
    """Exit status 1 where this interpreter lacks one of the modules."""
    sys.exit(lacks(modules) is not None)
