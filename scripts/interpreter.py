"""Finds the Python modules that a script needs: in this interpreter, in .python/, or in the interpreter that
scripts/deps.sh chooses.

`make deps` installs Debian packages, which only /usr/bin/python3 sees, and PyPI packages into .python/. deps.sh lists
them.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

SCRIPTS = pathlib.Path(__file__).resolve().parent
FROM_PYPI = str(SCRIPTS.parent / ".python")
if FROM_PYPI not in sys.path:
    sys.path.append(FROM_PYPI)  # last, so that the system's modules have precedence


def end_plainly(kind, error, traceback):
    """Makes Ctrl-C during the slow imports of a script end it with one line and no traceback."""
    if issubclass(kind, KeyboardInterrupt):
        print("\ninterrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


sys.excepthook = end_plainly

# Names of files need not be UTF-8. They are printed as they are, byte for byte.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="surrogateescape")


def lacks(modules):
    """The first of the modules that this interpreter does not find, or None."""
    for module in modules:
        try:
            if importlib.util.find_spec(module) is None:
                return module
        except ModuleNotFoundError:  # a.b, where a does not exist
            return module
    return None


def need(*modules, remedy="run `make deps`"):
    """Returns if all modules are there. Otherwise the script restarts with the interpreter that deps.sh chooses. If
    that one lacks a module too, the program ends with one line that says what to do."""
    lacking = lacks(modules)
    if lacking is None:
        return
    chosen = subprocess.run([SCRIPTS / "deps.sh", "python"], capture_output=True, text=True).stdout.strip()
    question = f"import sys; sys.path.append({str(SCRIPTS)!r}); import interpreter; interpreter.need_here({modules!r})"
    if not chosen or subprocess.run([chosen, "-c", question], capture_output=True).returncode != 0:
        wanted = " and ".join(filter(None, [", ".join(modules[:-1]), modules[-1]]))
        both = f"neither {sys.executable} nor {chosen} has" if chosen else f"{sys.executable} does not have"
        sys.exit(f"error: {both} {wanted} ({lacking} is missing); {remedy}")
    os.execv(chosen, [chosen, *sys.argv])


def need_here(modules):
    """Exits with status 1 if this interpreter lacks one of the modules."""
    sys.exit(lacks(modules) is not None)
