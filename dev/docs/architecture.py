#!/usr/bin/env python3
"""Draws the folders of llmc/ and which of them include which: docs/pictures/architecture.svg, by `make pictures`.

    python3 dev/docs/architecture.py [FILE]

A folder stands above all that it includes. An arrow says that some file of the upper folder includes a header of the lower
one. One line of text stands for the arrows of a folder that includes all below it, or that all above it include. The words
beside a folder's name are those of the map in README.md.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
WIDTH, LEFT, TOP = 900, 20, 20  # pixels
BOX, HEIGHT, GAP = 560, 40, 22  # a folder's box, and the distance to the next one
MANY = 4  # from this number of arrows on, one line of text replaces them
LANE = 26  # between arrows that pass by folders
COLORS = ["#0072b2", "#d55e00", "#009e73", "#a3487f", "#8a5a2b", "#5b5b9f", "#b07c00", "#3f7f9f"]
INK, FAINT, PAPER, FILL = "#222222", "#666666", "#ffffff", "#eef3f8"


def include_graph(root=ROOT):
    """{folder: folders that its files include}, for the folders of llmc/; a folder's own headers are left out."""
    graph = {path.name: set() for path in sorted((root / "llmc").iterdir()) if path.is_dir()}
    for folder, included in graph.items():
        for path in (root / "llmc" / folder).rglob("*"):
            if path.suffix in SOURCES:
                included |= set(re.findall(r'^#include "llmc/(\w+)/', path.read_text(), re.MULTILINE)) - {folder}
    return graph


def levels(graph):
    """How many folders stand below each one at least: the length of the longest chain of includes."""
    found = {}

    def level(folder, above=()):
        if folder in above:
            sys.exit(f"error: llmc/{folder}/ includes itself by way of {', '.join(above)}")
        if folder not in found:
            found[folder] = max((level(lower, (*above, folder)) + 1 for lower in graph[folder]), default=0)
        return found[folder]

    for folder in graph:
        level(folder)
    return found


def order_of(graph):
    """The folders from top to bottom."""
    height = levels(graph)
    return sorted(graph, key=lambda folder: (-height[folder], folder))


def words_of(readme):
    """{folder: what README.md's map says it is}."""
    return dict(re.findall(r"^    llmc/(\w+)/ +(.*)$", readme, re.MULTILINE))


def escaped(text):
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def text_at(x, y, text, size, color=INK, weight="normal", anchor="start"):
    return (f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" font-weight="{weight}" text-anchor="{anchor}">'
            f"{escaped(text)}</text>")


def picture(graph, words):
    order = order_of(graph)
    row = {folder: index for index, folder in enumerate(order)}
    top = {folder: TOP + row[folder] * (HEIGHT + GAP) for folder in order}
    includes_all = [folder for folder in order if len(graph[folder]) >= MANY and graph[folder] == set(order[row[folder] + 1:])]
    included_by_all = [folder for folder in order if row[folder] >= MANY and all(folder in graph[upper] for upper in order[:row[folder]])]
    arrows = [(upper, lower) for upper in order for lower in sorted(graph[upper], key=row.get)
              if upper not in includes_all and lower not in included_by_all]
    out = []
    lanes = []  # the rows that each lane's arrows take
    passing = [(upper, lower) for upper, lower in arrows if row[lower] > row[upper] + 1]
    for upper, lower in sorted(passing, key=lambda arrow: (row[arrow[1]] - row[arrow[0]], row[arrow[0]])):
        taken = range(row[upper], row[lower] + 1)
        lane = next((index for index, rows in enumerate(lanes) if not rows & set(taken)), len(lanes))
        if lane == len(lanes):
            lanes.append(set())
        lanes[lane] |= set(taken)
        color = COLORS[row[upper] % len(COLORS)]
        # An arrow leaves a box in its lower half and reaches one in its upper half, each lane at a height of its own.
        shift = 3 * (lane % 6)
        begin, end = top[upper] + HEIGHT - 4 - shift, top[lower] + 4 + shift
        x = LEFT + BOX + 30 + LANE * lane
        out.append(f'<path data-arrow="{upper} {lower}" d="M{LEFT + BOX} {begin}H{x - 8}Q{x} {begin} {x} {begin + 8}V{end - 8}'
                   f'Q{x} {end} {x - 8} {end}H{LEFT + BOX + 7}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        out.append(f'<path d="M{LEFT + BOX} {end}l9 -4v8z" fill="{color}"/>')
    for upper, lower in arrows:
        if row[lower] == row[upper] + 1:
            color, x, begin = COLORS[row[upper] % len(COLORS)], LEFT + 60, top[upper] + HEIGHT
            out.append(f'<path data-arrow="{upper} {lower}" d="M{x} {begin}V{begin + GAP - 7}" stroke="{color}" stroke-width="1.8"/>')
            out.append(f'<path d="M{x} {begin + GAP}l-4 -9h8z" fill="{color}"/>')
    for folder in order:
        y = top[folder]
        notes = []
        if folder in includes_all:
            notes.append(f'<g data-includes-all="{folder}">' + text_at(LEFT + BOX + 14, y + 25, "includes every folder below", 13, FAINT) + "</g>")
        if folder in included_by_all:
            notes.append(f'<g data-included-by-all="{folder}">' + text_at(LEFT + BOX + 14, y + 25, "every folder above includes it", 13, FAINT) + "</g>")
        out.append(f'<rect data-folder="{folder}" x="{LEFT}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6" fill="{FILL}" stroke="#8aa0b5"/>')
        out.append(text_at(LEFT + 14, y + 25, f"llmc/{folder}/", 15, INK, "bold"))
        out.append(text_at(LEFT + 135, y + 25, words.get(folder, ""), 13))
        out += notes
    height = top[order[-1]] + HEIGHT + TOP
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
                      'font-family="Helvetica, Arial, sans-serif">',
                      "<title>The folders of llmc/: an arrow says that the upper folder includes the lower one</title>",
                      f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>', *out, "</svg>", ""])


def drawn(root=ROOT):
    return picture(include_graph(root), words_of((root / "README.md").read_text()))


if __name__ == "__main__":
    path = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    path.write_text(drawn())
    print(f"wrote {path}")
