#!/usr/bin/env python3
"""Writes docs/options.md from what ./train_gpt --help and ./train_gpt plan --help print: `make docs`.

    python3 dev/docs/options_page.py [PROGRAM]      # writes docs/options.md
    python3 dev/docs/options_page.py --print [PROGRAM]

The program's table of settings is the only source, so that the page and --help always agree. A test compares the committed
page with a new one (test/python/test_options_page.py).
"""

import argparse
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "options.md"
COLUMN = 36  # --help's texts begin here, or on the next line where an option's name is longer
HEAD = """# Options

This page is `./train_gpt --help` as tables, and at its end what `./train_gpt plan --help` adds. `make docs` writes it,
and a test compares the two.

An option is `--name VALUE` or `--name=VALUE`. A switch is `--name`, and if it can be a key of a configuration file
also `--name=false`. A configuration file for `--config` has the same names without the dashes;
[interface.md](interface.md#configuration-files) explains it. [The README](../README.md) says where to begin.
"""


def help_of(program, *command):
    return subprocess.run([program, *command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def option_of(line):
    """(name, values, meaning) where the line begins an option; an empty meaning stands on the next line."""
    head, meaning = line, ""
    if len(line) > COLUMN and line[COLUMN - 1] == " " and not line[COLUMN].isspace():
        head, meaning = line[:COLUMN], line[COLUMN:]
    found = re.fullmatch(r"  (?:-\w,)?(--[a-z][a-z0-9-]*) ?(\S*) *", head)  # a sentence that begins so has more words
    return (*found.groups(), meaning) if found else None


def sections(text):
    """{title: lines} of --help. Titles stand at the left margin and end in a colon."""
    found, title = {}, None
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][^:]*:", line):
            title = line[:-1]
            found[title] = []
        elif title and line.strip():
            found[title].append(line)
    return found


def cell(text):
    return text.replace("|", "\\|")


def table(lines):
    """Rows of a section of options. A meaning may end in (default: ...)."""
    rows = []
    for line in lines:
        option = option_of(line)
        if option:
            rows.append(list(option))
        else:
            rows[-1][2] = f"{rows[-1][2]} {line.strip()}".strip()
    out = ["| option | default | meaning |", "|---|---|---|"]
    for name, values, meaning in rows:
        option = name if values == "[={true,false}]" else f"{name} {values}".strip()
        meaning, default = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", meaning).groups(default="")
        out.append(f"| `{cell(option)}` | {cell(default)} | {cell(meaning)} |")
    return out


def page(text, planner=""):
    """`planner`: the --help of `plan`, whose first options are its own."""
    out = [HEAD]
    for title, lines in {**sections(text), **{title: lines for title, lines in sections(planner).items() if title == "Plan"}}.items():
        out.append(f"## {title}\n")
        if option_of(lines[0]):
            out += table(lines)
        else:  # a text below the options: as it is printed
            out += [f"  {line}" for line in lines]
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Writes docs/options.md from what ./train_gpt --help prints.")
    parser.add_argument("program", nargs="?", default="./train_gpt", metavar="PROGRAM")
    parser.add_argument("--print", action="store_true", dest="prints", help="print the page instead")
    arguments = parser.parse_args()
    program = pathlib.Path(arguments.program).resolve()
    text = page(help_of(program), help_of(program, "plan"))
    if arguments.prints:
        print(text, end="")
    else:
        PAGE.write_text(text)
        print(f"wrote {PAGE.relative_to(ROOT)}")
