#!/usr/bin/env python3
"""Checks what has changed since a commit: the format, the lint and the prose of the changed files, and the suites of their
folders (CHECKED_BY in suites.py). `make check` calls it; BASE names the commit (default: HEAD)."""

import argparse
import os
import pathlib
import re
import subprocess
import sys

import suites

C_LIKE = {".h", ".cpp", ".cu", ".cuh"}
KERNEL = re.compile(r"(?:llmc/device/cuda|dev|test/kernels)/([a-z0-9]+)\w*\.(?:cuh|cu|cpp)")


def lines_of(command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def changed_files(base):
    names = lines_of(["git", "diff", "--name-only", "--diff-filter=d", base]) + lines_of(["git", "ls-files", "--others", "--exclude-standard"])
    return sorted({name for name in names if pathlib.Path(name).is_file()})


def commands_of_lint(names, python):
    """Each with the names of the files that it is for."""
    def ending(*endings):
        return [name for name in names if pathlib.Path(name).suffix in endings]

    commands = [(["clang-format-14", "--dry-run", "--Werror"], ending(*C_LIKE)), ([python, "-m", "pyflakes"], ending(".py")),
                (["shellcheck"], ending(".sh")), ([python, "test/python/prose.py"], ending(*C_LIKE, ".py", ".md", ".sh", ".mk"))]
    return [[*command, *files] for command, files in commands if files]


def filter_of_kernels(names):
    """GoogleTest's filter for the tests of changed kernels, by the first word of their files; empty if others changed too."""
    matches = [KERNEL.fullmatch(name) for name in names if "kernels-thread" in suites.suites_of_file(name)]
    if not matches or not all(matches):
        return ""
    words = {match[1][:4] for match in matches}  # "adam" is also in AdamW
    return ":".join(sorted(f"*{word}*:*{word.capitalize()}*" for word in words))


def main():
    parser = argparse.ArgumentParser(description="Checks what has changed since a commit.")
    parser.add_argument("--base", default="HEAD", help="the commit (default: HEAD, so that only changes that are not committed count)")
    parser.add_argument("run_suites", nargs=argparse.REMAINDER, help="the command that runs suites, to which their names are added")
    arguments = parser.parse_args()
    os.chdir(pathlib.Path(__file__).resolve().parent.parent)
    names = changed_files(arguments.base)
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
