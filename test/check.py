#!/usr/bin/env python3
"""Checks what has changed since a commit: the format and the lint of the changed files, the terms of all files, and the suites
of their folders (CHECKED_BY in suites.py). `make check` calls it; BASE names the commit (default: HEAD)."""

import argparse
import os
import pathlib
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
    sys.exit(subprocess.run([*arguments.run_suites, *wanted]).returncode)


if __name__ == "__main__":
    main()
