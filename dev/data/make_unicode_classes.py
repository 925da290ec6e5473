#!/usr/bin/env python3
"""Writes llmc/data/unicode_classes.cpp: the general category of every character, and those that NFC leaves alone.

It asks `tokenizers` for them, so that words and ids agree with that library's for any version of Unicode. The newest
data of Unicode say which characters its NFC, of an older version, does not know:

    python3 -m venv VENV && VENV/bin/pip install tokenizers unicodedata2 && VENV/bin/python dev/data/make_unicode_classes.py
"""

import pathlib
import sys

FILE = pathlib.Path(__file__).resolve().parents[2] / "llmc" / "data" / "unicode_classes.cpp"
# In the order of `Category` (llmc/data/unicode_classes.h).
CATEGORIES = "Cn Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co".split()

SOURCE = """// Made by dev/data/make_unicode_classes.py with tokenizers {version}, whose words are those of Unicode {unicode}.
#include "llmc/data/unicode_classes.h"

#include <algorithm>
#include <array>
#include <iterator>

namespace llmc {{
namespace {{

// Runs of code points of one category: 32 times the first one, plus the category. Each ends where the next begins.
// clang-format off
constexpr std::uint32_t runs[] = {{
{runs}
}};

struct Range {{
    char32_t first, last;
}};
constexpr Range unknown_to_nfc[] = {{
{ranges}
}};
// clang-format on

constexpr std::uint32_t run_of(char32_t code) {{
    return *std::prev(std::ranges::upper_bound(runs, static_cast<std::uint32_t>(code), {{}},
                                               [](std::uint32_t run) {{ return run >> 5; }}));
}}

// The categories of the first code points, of which most text consists.
constexpr auto first_categories = [] {{
    std::array<std::uint8_t, 0x800> categories{{}};
    const std::uint32_t* run = runs;
    for (std::uint32_t code = 0; code < categories.size(); ++code) {{
        if (code >= run[1] >> 5) ++run;
        categories[code] = *run & 31;
    }}
    return categories;
}}();

}}  // namespace

Category category_of(char32_t code) {{
    const std::uint32_t bits = code < first_categories.size() ? first_categories[code] : run_of(code) & 31;
    return static_cast<Category>(bits);
}}

bool is_known_to_nfc(char32_t code) {{
    const auto* const after = std::ranges::upper_bound(unknown_to_nfc, code, {{}}, &Range::first);
    return after == std::begin(unknown_to_nfc) || code > std::prev(after)->last;
}}

}}  // namespace llmc
"""


def code_points():
    """All characters that a text can contain; surrogates are not characters."""
    return [code for code in range(0x110000) if not 0xD800 <= code < 0xE000]


def category_of_each():
    """The category of each code point, as a number."""
    from tokenizers import Regex, pre_tokenizers

    text = "".join(map(chr, code_points()))
    found = {code: CATEGORIES.index("Cs") for code in range(0xD800, 0xE000)}
    for number, name in enumerate(CATEGORIES):
        if name == "Cs":
            continue
        members = pre_tokenizers.Split(Regex(rf"\p{{{name}}}+"), "removed", invert=True)
        for run, _ in members.pre_tokenize_str(text):
            found.update((ord(character), number) for character in run)
    return [found[code] for code in range(0x110000)]


def unknown_to_nfc():
    """The code points that take part in NFC by the newest Unicode, but not by `tokenizers`."""
    import unicodedata2
    from tokenizers import normalizers

    decompose = normalizers.NFD().normalize_str

    def is_unknown_mark(character):
        mark = unicodedata2.combining(character)
        # A mark goes behind those of a lower class. U+0345 has the class 240, U+0315 the class 232.
        text = f"a\u0345{character}" if mark < 240 else f"a{character}\u0315"
        return mark > 0 and decompose(text) == text

    found = set()
    for character in map(chr, code_points()):
        parts = unicodedata2.decomposition(character)
        if is_unknown_mark(character):
            found.add(ord(character))
        if parts and not parts.startswith("<") and decompose(character) == character:
            others = [int(part, 16) for part in parts.split()]
            found.update([ord(character), *(code for code in others if not unicodedata2.combining(chr(code)))])
    return sorted(found)


def ranges_of(codes):
    ranges = []
    for code in codes:
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def in_rows(entries, in_a_row):
    return "\n".join("    " + " ".join(entries[i:i + in_a_row]) for i in range(0, len(entries), in_a_row))


def source():
    import tokenizers

    categories = category_of_each()
    runs = [f"{code << 5 | kind}," for code, kind in enumerate(categories) if code == 0 or kind != categories[code - 1]]
    ranges = [f"{{{first:#x}, {last:#x}}}," for first, last in ranges_of(unknown_to_nfc())]
    # A letter that Unicode 16.0 added, and one of 17.0.
    is_letter = [categories[code] in range(1, 6) for code in (0x10D4A, 0x323B0)]
    version = "before 16.0" if not is_letter[0] else "16.0" if not is_letter[1] else "17.0 or later"
    return SOURCE.format(version=tokenizers.__version__, unicode=version, runs=in_rows(runs, 11), ranges=in_rows(ranges, 5))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(f"error: {sys.argv[0]} takes no arguments: it writes {FILE}")
    FILE.write_text(source())
    print(f"wrote {FILE}")
