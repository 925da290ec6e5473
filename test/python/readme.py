"""The indented blocks of README.md, and what the comment before each says of it (test_readme.py)."""

import re

import program

README = (program.ROOT / "README.md").read_text()
BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n\n?)?((?:^    .*\n|^\n(?=    ))+)", re.MULTILINE)


def blocks():
    """(line, how, commands) of each indented block."""
    found = []
    for match in BLOCK.finditer(README):
        how, text = match.groups()
        found.append((README[:match.start(2)].count("\n") + 1, how, [line[4:] for line in text.splitlines() if line.strip()]))
    return found


def printed(beginning):
    """The lines of the one block of printed text whose first line begins so."""
    [lines] = [lines for _, how, lines in blocks() if how == "prints" and lines[0].startswith(beginning)]
    return lines


def shape(line):
    """Numbers of any length are N, with one space between columns."""
    return " ".join(re.sub(r"\d([\d.,:]*\d)?", "N", line).split())
