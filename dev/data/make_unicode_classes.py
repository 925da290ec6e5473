#!/usr/bin/env python3
"""Writes llmc/data/unicode_classes.cpp: which characters GPT-2's pattern takes for letters, numbers and white space.

It asks tiktoken for the class of every code point, so that ids agree with tiktoken's for any version of Unicode:

    python3 -m venv VENV && VENV/bin/pip install tiktoken && VENV/bin/python dev/data/make_unicode_classes.py
"""

import pathlib
import sys

FILE = pathlib.Path(__file__).resolve().parents[2] / "llmc" / "data" / "unicode_classes.cpp"
CLASSES = {"letter": r"\p{L}", "number": r"\p{N}", "space": r"\s"}
IN_A_ROW = 3

BEGIN = """// Made by dev/data/make_unicode_classes.py with tiktoken {version}, whose tables are those of Unicode {unicode}.
#include "llmc/data/unicode_classes.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace llmc {{
namespace {{

using enum CharacterClass;

struct Range {{
    char32_t first, last;
    CharacterClass kind;
}};

// In the order of their code points. Code points in no range have the class `other`.
// clang-format off
constexpr Range ranges[] = {{
"""

END = """};
// clang-format on

constexpr CharacterClass search(char32_t code) {
    const auto* const after = std::ranges::upper_bound(ranges, code, {}, &Range::first);
    if (after == std::begin(ranges)) return other;
    const Range& range = *std::prev(after);
    return code <= range.last ? range.kind : other;
}

// The classes of the first code points, of which most text consists.
constexpr auto first_classes = [] {
    std::array<CharacterClass, 0x800> classes{};
    classes.fill(other);
    for (const Range& range : ranges) {
        for (char32_t code = range.first; code <= range.last && code < classes.size(); ++code)
            classes[code] = range.kind;
    }
    return classes;
}();

}  // namespace

CharacterClass class_of(char32_t code) {
    return code < first_classes.size() ? first_classes[code] : search(code);
}

}  // namespace llmc
"""


def code_points():
    """All characters that a text can contain; surrogates are not characters."""
    return [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]


def members(pattern):
    """The code points that the pattern matches; tiktoken drops the characters that its pattern does not match."""
    import tiktoken

    encoding = tiktoken.Encoding("class", pat_str=pattern, mergeable_ranks={bytes([i]): i for i in range(256)}, special_tokens={})
    text = encoding.decode(encoding.encode_ordinary("".join(map(chr, code_points()))))
    return {ord(character) for character in text}


def ranges():
    classes = {code: name for name, pattern in CLASSES.items() for code in members(pattern)}
    found = []
    for code in sorted(classes):
        if found and found[-1][1] == code - 1 and found[-1][2] == classes[code]:
            found[-1][1] = code
        else:
            found.append([code, code, classes[code]])
    return found


def unicode_version(found):
    """The version of Unicode, found by letters that it added."""
    since = {"16.0": 0x10D4A, "15.1": 0x2EBF0, "15.0": 0x31350}
    letters = [(first, last) for first, last, name in found if name == "letter"]
    return next((version for version, code in since.items() if any(a <= code <= b for a, b in letters)), "before 15.0")


def source():
    import tiktoken

    found = ranges()
    entries = [f"{{{first:#x}, {last:#x}, {name}}}," for first, last, name in found]
    rows = [" ".join(entries[i:i + IN_A_ROW]) for i in range(0, len(entries), IN_A_ROW)]
    begin = BEGIN.format(version=tiktoken.__version__, unicode=unicode_version(found))
    return begin + "".join(f"    {row}\n" for row in rows) + END


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(f"error: {sys.argv[0]} takes no arguments: it writes {FILE}")
    FILE.write_text(source())
    print(f"wrote {FILE}")
