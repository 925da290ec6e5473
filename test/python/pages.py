"""The pages of the documentation: their indented blocks, and what the comment before each block says of it.

test_pages.py runs the commands; test_pages_prints.py compares what is shown as printed; CONTRIBUTING.md explains the comments.
"""

import re

import program

GENERATED = "docs/options.md"  # test_options_page.py compares every line of this page
NAMES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (program.ROOT / "docs").glob("*.md"))]
TEXTS = {name: (program.ROOT / name).read_text() for name in NAMES}
# After an empty line, as in Markdown: lines of a list may be indented as far.
BLOCK = re.compile(r"(?:^<!-- (.*?) -->\n\n?|(?<=\n\n))((?:^    .*\n|^\n(?=    ))+)", re.MULTILINE)


def blocks():
    """(page and line, how, commands) of each indented block; a line that ends in \\ goes on in the next one."""
    found = []
    for name, text in TEXTS.items():
        if name == GENERATED:
            continue
        for match in BLOCK.finditer(text):
            how, block = match.groups()
            lines = [line[4:] for line in block.splitlines() if line.strip()]
            if how != "prints":
                lines = re.sub(r" *\\\n *", " ", "\n".join(lines)).splitlines()
            found.append((f"{name}:{text[:match.start(2)].count(chr(10)) + 1}", how, lines))
    return found


def code_of(name):
    """All that a page sets in code: the texts between backticks, and the lines of its blocks."""
    lines = [line[4:] for _, block in BLOCK.findall(TEXTS[name]) for line in block.splitlines() if line.strip()]
    return re.findall(r"`([^`]+)`", BLOCK.sub("", TEXTS[name])), lines


def printed(beginning):
    """The lines of the one block of printed text whose first line begins so; long_fine_tuning.py has those of its page."""
    [lines] = [lines for place, how, lines in blocks() if how == "prints" and lines[0].startswith(beginning)
               and not place.startswith("docs/fine-tuning.md:")]
    return lines


def shape(line):
    """Numbers of any length are N, with one space between columns."""
    return " ".join(re.sub(r"\d([\d.,:]*\d)?", "N", line).split())
