"""Finds sentences that a reader must read twice: in comments and docstrings, in the pages, in texts that users read.

    python3 test/python/prose.py [FILE...]     # all files of the repository by default; one line for each finding

A sentence of a comment, a docstring or a page is refused
- if it opens with a dangling preposition or relative pronoun, in upper or lower case: "of two ranks", "Where it ends";
- if it has more than 35 words;
- if it has a term that docs/terms.md retires, or a form of it with an ending.
The same holds for a string of four or more words, but such an opening only in upper case: many strings are fragments.
Strings of tests may be longer, since they join several messages.
Questions are allowed everywhere. Code is left out: indented or fenced blocks of a page, and text between backticks. An
indented line of a comment may be code; only an opening in upper case is refused there."""

import ast
import io
import pathlib
import re
import subprocess
import sys
import tokenize
import typing

ROOT = pathlib.Path(__file__).resolve().parents[2]
TERMS = ROOT / "docs" / "terms.md"
# The strings of these are not read: sentences that must be found, and stories for training.
STRINGS_UNREAD = [ROOT / "test" / "python" / "test_lint.py", *sorted((ROOT / "llmc" / "data" / "stories").glob("*"))]
MOST_WORDS = 35
MOST_COLUMNS = 120
FEWEST_WORDS_OF_STRINGS = 4
# A sentence may have a label before it: "Note:", "rank 3:", "Step one:", "(1)", "b)", "[^1]:", "@param x", "<b>".
LABEL = r"(?:\w+(?: \w+)?:|\(?\w{1,2}(?:\.\d+)*[.)]|\[\^\w+\]:?|[@\\]\w+(?: \w+)?|<\w+>)"
DANGLING = rf"(?:[^\w\s{{]*{LABEL}\W*)?(?:[^\w{{]|_)*(Of|What|Where|Beside|Behind)\b"
NO_QUESTION = r"(?!.*\?\W*$)"
OPENING = re.compile(DANGLING + NO_QUESTION, re.IGNORECASE)
OPENING_OF_STRING = re.compile(DANGLING + NO_QUESTION)
END_OF_SENTENCE = re.compile(r"(?<=[.!?])[)\"']*\s+(?=[^a-z\s])|(?<=[\w)][.!?])\s+(?=(?:of|what|where|beside|behind)\b)")
SHORT_FORM = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.$")
ITEM = re.compile(r"\s*([-*+]|\d+\.)\s+")

C_LIKE = {".h", ".cpp", ".cu", ".cuh"}
# All of these except Python and Markdown have comments that begin with #.
OTHERS = {".py", ".md", ".sh", ".sbatch", ".toml", ".mk", ".yml", ".cff"}
OTHERS_BY_NAME = {"Makefile", "Containerfile", ".clang-tidy", ".clang-format", ".ci/run", ".gitignore", ".containerignore", "test/leaks.txt",
                  "data/requirements.txt"}


class Block(typing.NamedTuple):
    """A comment, a paragraph, an item of a list, a cell of a table or a string."""
    first_line: int
    text: str
    is_string: bool = False


class CommentLine(typing.NamedTuple):
    line: int
    column: int
    code_before: bool
    text: str


def joined(lines):
    """Blocks of comments: a line continues the one above it if both begin in one column, and no code is before it."""
    blocks = []
    last = None
    for comment in lines:
        if last == (comment.line - 1, comment.column) and not comment.code_before:
            blocks[-1][1].append(comment.text)
        else:
            blocks.append((comment.line, [comment.text]))
        last = (comment.line, comment.column)
    return [Block(first, "\n".join(texts)) for first, texts in blocks]


# ---- C++ and CUDA ----------------------------------------------------------------------------------------

# Numbers are named since they can have quotes in them, as 1'000 has.
C_TOKEN = re.compile(r"""(?P<comment>//[^\n]*) | (?P<block>/\*.*?\*/)
    | \bR"(?P<mark>[^\s(]*)\((?P<raw>.*?)\)(?P=mark)" | "(?P<string>(?:\\.|[^"\\\n])*)"
    | '(?:\\.|[^'\\\n])*' | \b\d[\w.']*""", re.DOTALL | re.VERBOSE)


def lines_of_block_comment(comment, line, column, code_before):
    """The lines of /* ... */, without the stars before them."""
    for number, text in enumerate(comment[2:-2].split("\n")):
        yield CommentLine(line + number, column, code_before and number == 0,
                          re.sub(rf"^(\s*\*+ ?|\s{{0,{column + 3 if number else 1}}})", "", text))


def blocks_of_c_like(text):
    """Comments, and string literals; adjacent literals are one."""
    comments, strings = [], []
    end = 0  # the end of the string before, or of a comment that follows it
    for token in C_TOKEN.finditer(text):
        line = text.count("\n", 0, token.start()) + 1
        before = text[text.rfind("\n", 0, token.start()) + 1:token.start()]
        place = (line, len(before), bool(before.strip()))
        is_adjacent = bool(strings) and not text[end:token.start()].strip()
        if token["comment"] and not re.match(r"//+ ?(clang-format|NOLINT)", token["comment"]):
            comments.append(CommentLine(*place, re.sub(r"^//+ ?", "", token["comment"])))
        elif token["block"] and not re.fullmatch(r"/\*\w+=?\*/", token["block"]):  # names of parameters
            comments += lines_of_block_comment(token["block"], *place)
        elif token["string"] is not None or token["raw"] is not None:
            words = token["raw"] or (token["string"] or "").replace("\\n", "\n").replace("\\", "")
            first = strings.pop() if is_adjacent else Block(line, "", is_string=True)
            strings.append(first._replace(text=first.text + words))
            is_adjacent = True
        end = token.end() if is_adjacent else end
    return joined(comments) + strings


# ---- Python ----------------------------------------------------------------------------------------------

def docstrings_of(tree):
    """Syntax nodes of docstrings, and what they document."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.body[0].value: node for node in ast.walk(tree)
            if isinstance(node, documented) and ast.get_docstring(node) is not None}


def strings_of_python(tree, docstrings):
    """String constants; a {} stands for what an f-string fills in."""
    read_elsewhere = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    read_elsewhere |= set(docstrings)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield Block(node.lineno, "".join(pieces), is_string=True)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in read_elsewhere:
            yield Block(node.lineno, node.value, is_string=True)


def blocks_of_python(text):
    """Comments, docstrings, and string constants."""
    comments = [CommentLine(*token.start, bool(token.line[:token.start[1]].strip()), re.sub(r"^#+ ?", "", token.string))
                for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.COMMENT and not token.string.startswith("#!")]
    tree = ast.parse(text)
    docstrings = docstrings_of(tree)
    documentation = [Block(string.lineno, ast.get_docstring(node)) for string, node in docstrings.items()]
    return joined(comments) + documentation + list(strings_of_python(tree, docstrings))


# ---- Shell scripts, makefiles, TOML, YAML ----------------------------------------------------------------

QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"|\'([^\']*)\'')


def blocks_of_hashes(text):
    """Comments, on lines of their own or at the end of one; what is quoted on one line; texts of `make help`."""
    comments, strings = [], []
    for number, line in enumerate(text.splitlines(), 1):
        without_strings = QUOTED.sub(lambda quoted: "_" * len(quoted.group()), line)
        found = re.search(r"(?<!\S)#+(?!!) ?", without_strings)
        if found:
            code_before = bool(line[:found.start()].strip())
            comments.append(CommentLine(number, found.start(), code_before, line[found.end():]))
        code = line[:found.start()] if found else line
        strings += [Block(number, quoted[1] or quoted[2] or "", is_string=True) for quoted in QUOTED.finditer(code)]
    return joined(comments) + strings


# ---- Markdown --------------------------------------------------------------------------------------------

def without_html_comments(text):
    """The same lines without HTML's comments. A page shows one if a backtick is before it."""
    return re.sub(r"(?<!`)<!--.*?-->", lambda comment: "\n" * comment.group().count("\n"), text, flags=re.DOTALL)


def cells_of(row):
    """Cells of a table's row, without rules between rows, and without names of columns such as "what"."""
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    return [cell for cell in cells if not re.fullmatch(r"[:\- ]*|" + DANGLING, cell, re.IGNORECASE)]


def blocks_of_markdown(text):
    """Paragraphs, items of lists and cells of tables; neither code nor markup."""
    blocks = []
    fenced = False
    paragraph = None  # the one that the next line continues
    margins = []  # columns in which the text begins, of the items of lists that this line may belong to
    for number, line in enumerate(without_html_comments(text).splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith("```"):
            fenced, paragraph = not fenced, None
            continue
        if fenced or not line.strip():
            paragraph = None
            continue
        begins = ITEM.match(line) or re.match(r"\s*(#+|>)\s+", line)
        if paragraph is None or begins:
            margins = [margin for margin in margins if margin <= indent]
        if paragraph is None and indent >= 4 + (margins or [0])[-1]:
            continue  # code
        if line.lstrip().startswith("|"):
            blocks += [(number, [cell]) for cell in cells_of(line)]
            paragraph = None
        elif begins or paragraph is None:
            paragraph = (number, [line[begins.end() if begins else indent:]])
            blocks.append(paragraph)
            margins += [begins.end()] if ITEM.match(line) else []
        else:
            paragraph[1].append(line.strip())
    return [Block(first, "\n".join(lines)) for first, lines in blocks]


# ---- Findings --------------------------------------------------------------------------------------------

def blocks_of(path):
    text = path.read_text(encoding="utf-8")
    if path.suffix in C_LIKE:
        return blocks_of_c_like(text)
    if path.suffix == ".py":
        return blocks_of_python(text)
    if path.suffix == ".md":
        return blocks_of_markdown(text)
    return blocks_of_hashes(text)


def pieces_of(text):
    """Paragraphs and items of lists: (lines before it, its words, whether it is code). Deeper indentation is code or a picture."""
    pieces = []
    goes_on = False
    margin = 0  # the column in which the text of the last item of a list begins
    for number, line in enumerate(text.split("\n")):
        indent = len(line) - len(line.lstrip())
        item = ITEM.match(line)
        if not line.strip() or (not item and indent > max(margin, 1)):
            goes_on = False
            pieces += [(number, [line.strip()], True)] if line.strip() else []
            continue
        if item or indent < margin:
            goes_on = False
            margin = item.end() if item else indent
        words = line[item.end():] if item else line
        if goes_on:
            pieces[-1][1].append(words.strip())
        else:
            pieces.append((number, [words.strip()], False))
        goes_on = True
    return [(number, re.sub(r"`[^`]*`", "`code`", " ".join(words)), is_code) for number, words, is_code in pieces]


def sentences_of(text):
    """(lines before the paragraph of the sentence, the sentence, whether it is code)."""
    for number, piece, is_code in pieces_of(text):
        if is_code:
            yield number, piece, True
            continue
        held = ""
        for part in re.split(END_OF_SENTENCE, piece):
            held = f"{held} {part}".strip()
            if not SHORT_FORM.search(held):
                yield number, held, False
                held = ""
        if held:
            yield number, held, False


def any_form(term):
    """A pattern of the term, each of its words with or without an ending."""
    words = [re.escape(word.removesuffix("e")) + ("(e|es|ed|ing)" if word.endswith("e") else "(s|d|ed|ing)?")
             for word in term.split()]
    return re.compile(r"\b" + " ".join(words) + r"\b", re.IGNORECASE)


def retired_terms():
    """The terms of the second table of docs/terms.md, a pattern of each, and the words to say in its place."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", TERMS.read_text().partition("## Retired")[2], re.MULTILINE)
    return [(term, any_form(term), instead) for terms, instead in rows[1:] for term in terms.split("; ")]


def words_of(text):
    return re.findall(r"\S*\w\S*", text)


PROSE, CODE, STRING = range(3)


def sentences_to_check(path):
    """(line, sentence, its kind). Each line of a string is read alone, whatever its indentation."""
    for block in blocks_of(path):
        if not block.is_string:
            yield from ((block.first_line + offset, sentence, CODE if is_code else PROSE)
                        for offset, sentence, is_code in sentences_of(block.text))
        elif path not in STRINGS_UNREAD and len(words_of(block.text)) >= FEWEST_WORDS_OF_STRINGS:
            for line in block.text.split("\n"):
                yield from ((block.first_line, sentence, STRING) for _, sentence, _ in sentences_of(line.strip()))


def findings(path, retired):
    in_tests = path.is_relative_to(ROOT / "test")
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    if path.suffix in C_LIKE:  # clang-format breaks lines of code, and no comments
        for number, text in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if len(text) > MOST_COLUMNS:
                yield f"{name}:{number}: {len(text)} columns, the most are {MOST_COLUMNS}: {text.strip()[:80]}"
    for line, sentence, kind in sentences_to_check(path):
        place = f"{name}:{line}"
        opening = (OPENING if kind == PROSE else OPENING_OF_STRING).match(sentence)
        if opening:
            yield f"{place}: opens with a dangling '{opening.group(1)}': {sentence[:80]}"
        if kind == CODE:
            continue
        count = len(words_of(sentence))
        # The strings of tests repeat several messages at once.
        if count > MOST_WORDS and not (kind == STRING and in_tests):
            yield f"{place}: {count} words, the most are {MOST_WORDS}: {sentence[:80]}"
        for term, pattern, instead in retired:
            if path != TERMS and pattern.search(sentence):
                yield f"{place}: '{term}' is retired, say {instead}: {sentence[:80]}"


def files_of_the_repository():
    """The files that git tracks or would track, if their kind has comments or prose."""
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
                           capture_output=True, text=True).stdout.split()
    paths = [ROOT / name for name in names if OTHERS_BY_NAME & {name, pathlib.Path(name).name}
             or pathlib.Path(name).suffix in C_LIKE | OTHERS]
    return [path for path in paths if path.exists()]


def main(arguments):
    retired = retired_terms()
    paths = [pathlib.Path(name).resolve() for name in arguments] or files_of_the_repository()
    found = [finding for path in paths for finding in findings(path, retired)]
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
