"""Finds sentences that a reader must read twice: in comments and docstrings, and in the pages of the documentation.

    python3 test/python/prose.py [FILE...]     # all files of the repository by default; one line for each finding

A sentence is refused if it opens with a dangling preposition or relative pronoun, if it has more than 35 words, or if it
has a term that docs/terms.md retires. Code is left out: indented or fenced blocks of a page, text between backticks."""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize

ROOT = pathlib.Path(__file__).resolve().parents[2]
TERMS = ROOT / "docs" / "terms.md"
MOST_WORDS = 35
OPENING = re.compile(r"^[\W_]*(Of|What|Where|Beside|Behind)\b(?!.*\?$)")
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[^a-z\s])")
SHORT_FORM = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.$")


def is_c_like(path):
    return path.suffix in {".h", ".cpp", ".cu", ".cuh"}


def blocks_of_c_like(text):
    """Comments of C++ and CUDA: (first line, text); lines that follow one another are one comment."""
    blocks = []
    last = None  # the line and the column of the comment before
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r'"(\\.|[^"\\])*"', lambda quoted: "_" * len(quoted.group()), line)
        found = re.search(r"//+ ?(.*)", code)
        if not found or re.match(r"(clang-format|NOLINT)", found.group(1)):
            last = None
            continue
        words, column = line[found.start(1):], found.start()
        goes_on = last == (number - 1, column)
        if goes_on:
            blocks[-1][1].append(words)
        else:
            blocks.append((number, [words]))
        last = (number, column)
    return [(first, "\n".join(lines)) for first, lines in blocks]


def blocks_of_python(text):
    """Comments and docstrings."""
    blocks = []
    last = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, column = token.start
        words = token.string.lstrip("#!").strip()
        if last == (line - 1, column):
            blocks[-1][1].append(words)
        else:
            blocks.append((line, [words]))
        last = (line, column)
    blocks = [(first, "\n".join(lines)) for first, lines in blocks]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            blocks.append((node.body[0].lineno, ast.get_docstring(node)))
    return blocks


def blocks_of_hashes(text):
    """Comments of shell scripts, makefiles and TOML: whole lines that begin with #."""
    blocks = []
    last = None
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*#(?!!) ?(.*)", line)
        if not found:
            continue
        if last == number - 1:
            blocks[-1][1].append(found.group(1))
        else:
            blocks.append((number, [found.group(1)]))
        last = number
    return [(first, "\n".join(lines)) for first, lines in blocks]


def blocks_of_markdown(text):
    """Paragraphs, items of lists and cells of tables; neither code nor markup."""
    blocks = []
    fenced = in_comment = False
    paragraph = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced, paragraph = not fenced, None
            continue
        in_comment = (in_comment or "<!--" in line) and "-->" not in line
        if fenced or in_comment or "-->" in line or line.startswith("    ") or not line.strip():
            paragraph = None
            continue
        if line.startswith("|"):
            paragraph = None
            if not re.fullmatch(r"[|:\- ]+", line):
                blocks += [(number, [cell.strip()]) for cell in line.strip("|").split("|")]
            continue
        begins = re.match(r"\s*([-*+]|\d+\.|#+|>)\s+(.*)", line)
        if begins or paragraph is None:
            paragraph = (number, [begins.group(2) if begins else line.strip()])
            blocks.append(paragraph)
        else:
            paragraph[1].append(line.strip())
    return [(first, "\n".join(lines)) for first, lines in blocks]


def blocks_of(path):
    text = path.read_text(encoding="utf-8")
    if is_c_like(path):
        return blocks_of_c_like(text)
    if path.suffix == ".py":
        return blocks_of_python(text)
    if path.suffix == ".md":
        return blocks_of_markdown(text)
    return blocks_of_hashes(text)


def sentences_of(block):
    """(lines before it, its words on one line); an indented line is code or a picture, and ends the sentence before it."""
    pieces = []
    for number, line in enumerate(block.split("\n")):
        if not line.strip() or re.match(r"\s{2,}", line):
            pieces.append(None)
        else:
            line = re.sub(r"`[^`]*`", "`code`", line.strip())
            if pieces and pieces[-1] is not None and not re.match(r"([-*]|\d+\.) ", line):
                pieces[-1][1] += " " + line
            else:
                pieces.append([number, line])
    for piece in pieces:
        if piece is None:
            continue
        number, text = piece
        held = ""
        for part in re.split(END_OF_SENTENCE, text):
            held = f"{held} {part}".strip()
            if not SHORT_FORM.search(held):
                yield number, held
                held = ""
        if held:
            yield number, held


def retired_terms():
    """The terms of the first column of docs/terms.md's second table, and what to say in place of each."""
    if not TERMS.exists():
        return []
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", TERMS.read_text().partition("## Retired")[2], re.MULTILINE)
    return [(term.strip(), instead) for terms, instead in rows[2:] for term in terms.split(";")]


def findings(path, retired):
    for first, block in blocks_of(path):
        for offset, sentence in sentences_of(block):
            place = f"{path.relative_to(ROOT)}:{first + offset}"
            opening = OPENING.match(sentence)
            if opening:
                yield f"{place}: opens with a dangling '{opening.group(1)}': {sentence[:80]}"
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > MOST_WORDS:
                yield f"{place}: {len(words)} words, the most are {MOST_WORDS}: {sentence[:80]}"
            for term, instead in retired:
                if path != TERMS and re.search(rf"\b{re.escape(term)}\b", sentence, re.IGNORECASE):
                    yield f"{place}: '{term}' is retired, say {instead}: {sentence[:80]}"


def files_of_the_repository():
    """The files that git tracks or would track, if their kind has comments or prose."""
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split()
    kinds = {".h", ".cpp", ".cu", ".cuh", ".py", ".md", ".sh", ".toml", ".mk", ".sbatch"}
    paths = [ROOT / name for name in names]
    return [path for path in paths if path.exists() and (path.suffix in kinds or path.name in {"Makefile", "Containerfile"})]


def main(arguments):
    retired = retired_terms()
    count = 0
    for path in [pathlib.Path(name).resolve() for name in arguments] or files_of_the_repository():
        for finding in findings(path, retired):
            print(finding)
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
