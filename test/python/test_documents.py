"""Names on the pages of the documentation exist: files, targets of the Makefile, options, identifiers, links, packages. And the
pages are laid out as CONTRIBUTING.md says."""

import fnmatch
import os
import re

import pytest

import program
from pages import BLOCK, NAMES, TEXTS, code_of

ROOT = program.ROOT
# Options of mpirun, and names that stand for any.
OTHERS = {"hostfile", "allow-run-as-root", "oversubscribe", "old-name", "new-name"}
CHANGELOG = "CHANGELOG.md"  # it names what was removed too
MOST_COLUMNS, MOST_LINES_OF_README = 120, 250
SOURCE_FILE = re.compile(r"\.(cpp|cu|cuh|h|md|py|sh)$")


def named_paths(document):
    """Paths of the repository: texts between backticks, and words of indented lines, that look like one."""
    spans, blocks = code_of(document)
    # A text of several words is a command. In commands and indented lines, only words that begin like a path of the repository
    # count.
    words = [span for span in spans if not re.search(r"\s", span)]
    commands = [word.strip("':") for line in [*spans, *blocks] for word in line.split()]
    top = {path.name for path in ROOT.iterdir()}
    paths = [word for word in words if "/" in word or SOURCE_FILE.search(word)]
    paths += [word for word in commands if word.split("/")[0] in top and ("/" in word or SOURCE_FILE.search(word))]
    return {path.removeprefix("./") for path in paths if not re.search("[<*]|^[~$/]|^(phase_ms|disk)/|^[A-Z]+=", path) and not is_made(path.removeprefix("./"))}


def is_made(path):
    """Whether building or running makes this file: git ignores it, or it is the program of a lab in dev/."""
    if path.startswith("dev/"):
        return (ROOT / f"{path}.cu").exists()
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    folders = ["/".join(path.split("/")[:count]) for count in (1, 2)]
    return any(fnmatch.fnmatchcase(folder, pattern) and folder.count("/") == pattern.count("/")
               for folder in folders for pattern in ignored)


def exists(path):
    """A file may be named without its folder; NAME stands for any name."""
    pattern = path.rstrip("/").replace("NAME", "*")
    anywhere = ROOT.glob(f"[!.]*/**/{pattern}") if "/" not in pattern else []
    return any(ROOT.glob(pattern)) or any(not is_made(str(found.parent.relative_to(ROOT))) for found in anywhere)


def named_targets(document):
    spans, blocks = code_of(document)
    return {target for code in [*spans, *blocks] for target in re.findall(r"\bmake ([a-z][a-z_-]*)(?![\w/-])", code)}


def named_options(document):
    spans, blocks = code_of(document)
    # Options of a launcher end before the program's name.
    ours = [re.sub(r"^(#SBATCH|sbatch|.*\bsrun|torchrun) .*?(?=\./train_gpt|$)", "", code) for code in [*spans, *blocks]]
    return {option for code in ours for option in re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", code)}


@pytest.mark.parametrize("document", NAMES)
def test_files_exist(document):
    paths = named_paths(document)
    assert not [path for path in sorted(paths) if not exists(path)]


@pytest.mark.parametrize("document", NAMES)
def test_scripts_run_as_they_are_typed(document):
    """The first word of a command, after variables and `exec`, is executable."""
    spans, blocks = code_of(document)
    typed = {re.sub(r"^((exec|\w+=\S*) )*", "", code).split()[0].removeprefix("./") for code in [*spans, *blocks]}
    scripts = {path for path in typed if re.match(r"[\w./]+$", path) and (ROOT / path).is_file() and (ROOT / path).read_bytes().startswith(b"#!")}
    assert not [path for path in sorted(scripts) if not os.access(ROOT / path, os.X_OK)]


@pytest.mark.parametrize("document", NAMES)
def test_targets_exist(document):
    makefiles = [ROOT / "Makefile", *ROOT.glob("dev/**/*.mk")]
    targets = {target for makefile in makefiles for target in re.findall(r"^([a-z_-]+):", makefile.read_text(), re.MULTILINE)}
    assert not named_targets(document) - targets


@pytest.mark.parametrize("document", NAMES)
def test_options_exist(document):
    text = program.run("--help").stdout + program.run("plan", "--help").stdout
    options = set(re.findall(r"^ +(?:-\w,)?--([a-z0-9-]+)", text, re.MULTILINE))
    for script in [*ROOT.glob("data/*.py"), *ROOT.glob("scripts/*.py")]:
        options |= set(re.findall(r"add_argument\([^)]*?\"--([a-z0-9-]+)", script.read_text()))
    assert not named_options(document) - options - OTHERS


@pytest.mark.parametrize("document", NAMES)
def test_identifiers_exist(document):
    """These are texts between backticks that have an underscore, such as functions and fields."""
    named = {span for span in code_of(document)[0] if re.fullmatch(r"\w*[a-z0-9]_\w+", span)}
    sources = " ".join(path.read_text() for folder in ("llmc", "test") for suffix in ("h", "cpp", "py")
                       for path in ROOT.glob(f"{folder}/**/*.{suffix}"))
    words = set(re.findall(r"\w+", sources))
    assert not named - words


def test_there_are_such_names():
    """Otherwise the tests above would test nothing."""
    for names, expected in ((named_paths, {"scripts/launch.sh", "llmc/device/ops.h"}), (named_targets, {"test", "gpu-check"}),
                            (named_options, {"config", "zero-stage"})):
        assert expected <= set().union(*map(names, NAMES))


def anchors_of(text):
    """As GitHub makes them of headings."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("document", NAMES)
def test_links_lead_somewhere(document):
    lost = []
    for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[document]):
        target, _, anchor = link.partition("#")
        if re.match(r"https?:", link):
            continue
        path = (ROOT / document).parent / target if target else ROOT / document
        if not path.exists() or (anchor and anchor not in anchors_of(path.read_text())):
            lost.append(link)
    assert not lost


def test_every_page_is_linked_to():
    linked = {link for link in re.findall(r"\]\(([^)#]+)", TEXTS["README.md"])}
    assert set(NAMES) - {"README.md"} <= linked


def test_the_packages_are_those_of_the_setup():
    """Except make, which starts the setup, and packages that only a system with apt needs."""
    setup = (ROOT / "scripts/deps.sh").read_text()
    needed = {package for package, probe in re.findall(r"^(?:build|run|test) +(\S+) +(\S+:\S.*|debian)$", setup, re.MULTILINE) if probe != "debian"}
    page = TEXTS["docs/install.md"]
    table = page.split("| Debian | conda-forge |", 1)[1].split("\n\n", 1)[0]
    assert {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])} == needed | {"make"}
    pinned = re.findall(r"nvidia-[\w-]+==[\d.]+", page)
    assert len(pinned) == 3 and not [package for package in pinned if package not in setup]


@pytest.mark.parametrize("document", [*NAMES, CHANGELOG])
def test_items_of_lists_are_indented(document):
    """A line that goes on with an item stands below the item's first word."""
    text = BLOCK.sub("\n", (ROOT / document).read_text())
    assert not re.findall(r"^ *(?:[-*]|\d+\.) .*\n(?:  .*\n)*(?![-*] |\d+\. )\S.*", text, re.MULTILINE)


@pytest.mark.parametrize("document", [*NAMES, CHANGELOG])
def test_lines_are_short(document):
    text = (ROOT / document).read_text()
    if document == "README.md":
        assert text.count("\n") <= MOST_LINES_OF_README
    else:  # tables and output are as wide as they are
        text = re.sub(r"^\|.*$", "", BLOCK.sub("", text), flags=re.MULTILINE)
    assert not [line for line in text.splitlines() if len(line) > MOST_COLUMNS]
