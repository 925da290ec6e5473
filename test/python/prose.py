"""Finds terms that docs/terms.md retires, in any form and in all texts, and lines of C++ that are too long.

    python3 test/python/prose.py [FILE...]     # all files of the repository by default; one line for each finding
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TERMS = ROOT / "docs" / "terms.md"
MOST_COLUMNS = 120
C_LIKE = {".h", ".cpp", ".cu", ".cuh"}
OTHERS = {".py", ".md", ".sh", ".sbatch", ".toml", ".mk", ".yml", ".cff"}
OTHERS_BY_NAME = {"Makefile", "Containerfile", ".clang-tidy", ".ci/run"}
# The words of a term may stand on two lines of a comment or of a string.
GAP = r"[\s/#*>\"]+"


def any_form(term):
    """A pattern of the term, each of its words with or without an ending."""
    words = [re.escape(word.removesuffix("e")) + ("(e|es|ed|ing)" if word.endswith("e") else "(s|d|ed|ing)?")
             for word in term.split()]
    return re.compile(r"\b" + GAP.join(words) + r"\b", re.IGNORECASE)


def retired_terms():
    """The terms of the second table of docs/terms.md, a pattern of each, and the words to say in its place."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", TERMS.read_text().partition("## Retired")[2], re.MULTILINE)
    return [(term, any_form(term), instead) for terms, instead in rows[1:] for term in terms.split("; ")]


def findings(path, retired):
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    text = path.read_text(errors="replace")
    if path.suffix in C_LIKE:  # clang-format breaks lines of code, and no comments
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > MOST_COLUMNS:
                yield f"{name}:{number}: {len(line)} columns, the most are {MOST_COLUMNS}: {line.strip()[:80]}"
    for term, pattern, instead in retired if path != TERMS else []:
        for found in pattern.finditer(text):
            yield f"{name}:{text.count(chr(10), 0, found.start()) + 1}: '{term}' is retired, say {instead}"


def files_of_the_repository():
    """The files with text that git tracks or would track, without the stories for training and this check's own test."""
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split()
    paths = [ROOT / name for name in names if OTHERS_BY_NAME & {name, pathlib.Path(name).name}
             or pathlib.Path(name).suffix in C_LIKE | OTHERS]
    return [path for path in paths if path.exists() and path.parent.name != "stories" and path.name != "test_lint.py"]


def main(arguments):
    retired = retired_terms()
    paths = [pathlib.Path(name).resolve() for name in arguments] or files_of_the_repository()
    found = [finding for path in paths for finding in findings(path, retired)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
