"""The pictures of README.md: the folders' is as its script would draw it now and agrees with the includes of the sources; both
are small, and have a background of their own."""

import re
import struct
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import program
from pages import TEXTS, printed

sys.path.append(str(program.ROOT / "dev" / "docs"))

import architecture  # noqa: E402

PICTURES = program.ROOT / "docs" / "pictures"
MOST_BYTES = 60_000


def test_pages_show_every_picture_and_no_other():
    shown = {f"docs/{target.removeprefix('docs/')}" for text in TEXTS.values() for target in re.findall(r'<img src="([^"]+)"', text)}
    assert shown == {f"docs/pictures/{path.name}" for path in PICTURES.iterdir()}


def test_they_are_small():
    for path in PICTURES.iterdir():
        assert path.stat().st_size < MOST_BYTES, path


def test_they_have_a_background():
    """So that a dark page does not swallow their lines."""
    data = (PICTURES / "loss.png").read_bytes()
    width, height, _, color = struct.unpack(">IIBB", data[16:26])
    assert width > height > 500
    assert color in (0, 2, 3) and b"tRNS" not in data  # no transparency
    svg = ElementTree.parse(PICTURES / "architecture.svg").getroot()
    background = next(child for child in svg if child.tag.endswith("rect"))
    assert (background.get("width"), background.get("height"), background.get("fill")) == (svg.get("width"), svg.get("height"), "#ffffff")


def test_the_loss_is_the_quickstarts():
    """The numbers beside the picture are those of the log that docs/results.md shows."""
    [(first, last, steps)] = re.findall(r'loss.png" .* from ([\d.]+) to ([\d.]+) in ([\d,]+) steps"', TEXTS["README.md"])
    log = "\n".join(printed("train_gpt 0.1.0 (commit "))
    begin = re.search(r"^ +1 +([\d.]+)", log, re.MULTILINE).group(1)
    end = re.search(r"best +validation loss ([\d.]+)", log).group(1)
    assert (first, last) == (f"{float(begin):.2f}", f"{float(end):.2f}")
    assert f"{steps} steps" in log


def test_the_folders_are_as_drawn():
    """Read anew, from the lines `#include "llmc/..."` of the files that git knows."""
    included = subprocess.run(["git", "grep", "--untracked", "-o", "-E", '^#include "llmc/[a-z_]+/', "--", "llmc/*.h", "llmc/*.cpp", "llmc/*.cu", "llmc/*.cuh"],
                              cwd=program.ROOT, capture_output=True, text=True, check=True).stdout
    edges = {(upper, lower) for upper, lower in re.findall(r'^llmc/(\w+)/.*?:#include "llmc/(\w+)/$', included, re.MULTILINE) if upper != lower}
    assert len(edges) > 20

    svg = (PICTURES / "architecture.svg").read_text()
    order = re.findall(r'data-folder="(\w+)"', svg)
    assert sorted(order) == sorted(path.name for path in (program.ROOT / "llmc").iterdir() if path.is_dir())
    drawn = [tuple(arrow.split()) for arrow in re.findall(r'data-arrow="(\w+ \w+)"', svg)]
    for folder in re.findall(r'data-includes-all="(\w+)"', svg):
        drawn += [(folder, lower) for lower in order[order.index(folder) + 1:]]
    for folder in re.findall(r'data-included-by-all="(\w+)"', svg):
        drawn += [(upper, folder) for upper in order[:order.index(folder)]]
    assert set(drawn) == edges, "`make pictures` draws them again"
    assert all(order.index(upper) < order.index(lower) for upper, lower in edges)


def test_the_folders_are_drawn_anew():
    assert (PICTURES / "architecture.svg").read_text() == architecture.drawn(), "`make pictures` draws them again"
    words = architecture.words_of(TEXTS["README.md"])
    assert set(words) == set(architecture.include_graph()) and all(len(text) <= 62 for text in words.values())
