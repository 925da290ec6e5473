#!/usr/bin/env python3
"""Checks what has changed since a commit: the format and the lint of the changed files, the terms of all files, and the suites
of their folders (CHECKED_BY in suites.py). `make check` calls it; BASE names the commit (default: HEAD)."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

import suites

C_LIKE = {".h", ".cpp", ".cu", ".cuh"}


def lines_of(command):
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"error: {' '.join(command)}: {result.stderr.strip().splitlines()[0]}")
    return result.stdout.splitlines()


def changed_files(base):
    """Also files that are gone."""
    return sorted({*lines_of(["git", "diff", "--name-only", base]), *lines_of(["git", "ls-files", "--others", "--exclude-standard"])})


def commands_of_lint(names, python):
    """Each with the names of the files that it is for."""
    def ending(*endings):
        return [name for name in names if pathlib.Path(name).suffix in endings and pathlib.Path(name).is_file()]

    commands = [(["clang-format-14", "--dry-run", "--Werror"], ending(*C_LIKE)), ([python, "-m", "pyflakes"], ending(".py")),
                (["shellcheck"], ending(".sh", ".sbatch"))]
    # The terms of all files take two seconds.
    return [[*command, *files] for command, files in commands if files] + [[python, "test/python/prose.py"]]


def sources_with(names):
    """The sources of C++ among these files, and those that include one of them, directly or not."""
    files = {str(path): path.read_text() for folder in ("llmc", "dev", "test") for path in pathlib.Path(folder).rglob("*") if path.suffix in C_LIKE}
    found, new = set(), [name for name in names if pathlib.Path(name).suffix in C_LIKE]
    while new:
        found |= set(new)
        included = {f'#include "{name}"\n' for name in new}
        new = [path for path, text in files.items() if path not in found and any(line in text for line in included)]
    return sorted(name for name in found if pathlib.Path(name).suffix in (".cpp", ".cu") and pathlib.Path(name).is_file())


def kernels_with(name):
    """The first words of a file's name and of the kernels that include it, directly or not, if tests are called so."""
    found, new = {name}, [name]
    while new:
        line = f'#include "{new.pop()}"\n'
        more = {str(path) for path in pathlib.Path("llmc/device/cuda").glob("*.cuh") if line in path.read_text()} - found
        found |= more
        new += more
    words = {re.match("[a-z0-9]*", pathlib.Path(path).name)[0] for path in found}
    return {word for word in words if list(pathlib.Path("test/kernels").glob(f"{word}*_test.cpp"))}


def filter_of_kernels(names):
    """GoogleTest's filter for the tests of changed kernels. It is empty, for all tests, if a file belongs to no kernel."""
    kernels = [kernels_with(name) for name in names if "kernels-thread" in suites.suites_of_file(name)]
    if not all(kernels):
        return ""
    words = {word[:4] for word in set().union(*kernels)}  # "adam" is also in AdamW
    return ":".join(sorted(f"*{word}*:*{word.capitalize()}*" for word in words))


def main():
    parser = argparse.ArgumentParser(description="Checks what has changed since a commit.")
    parser.add_argument("--base", default="HEAD", help="the commit (default: HEAD, so that only changes that are not committed count)")
    parser.add_argument("--sources", action="store_true", help="only print the sources that changed, or that include a file that did")
    parser.add_argument("run_suites", nargs=argparse.REMAINDER, help="the command that runs suites, to which their names are added")
    arguments = parser.parse_args()
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    names = changed_files(arguments.base)
    if arguments.sources:
        print(*sources_with(names))
        return
    if not names:
        print(f"no file differs from {arguments.base}; BASE=COMMIT compares with another one")
        return
    print(f"{len(names)} changed: {' '.join(names[:8])}{' ...' if len(names) > 8 else ''}", flush=True)
    failed = [command[0] for command in commands_of_lint(names, sys.executable) if subprocess.run(command).returncode]
    if failed:
        sys.exit(f"error: {', '.join(failed)} found what is above")
    wanted = sorted({suite for name in names for suite in suites.suites_of_file(name)})
    if not wanted:
        print("no suite belongs to these files")
        return
    of_kernels = filter_of_kernels(names)
    if of_kernels and not [name for name in wanted if not name.startswith("kernels-")]:
        os.environ["GTEST_FILTER"] = of_kernels
        print(f"tests of kernels: {of_kernels}", flush=True)
    sys.exit(subprocess.run([*arguments.run_suites, *wanted]).returncode)


if __name__ == "__main__":
    main()
