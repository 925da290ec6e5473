// What splitting text into words needs to know of Unicode's characters. The table is that of PyPI's `tokenizers`.
#pragma once

#include <cstdint>

namespace llmc {

// The general categories of Unicode 16.0, by their short names. `Cn` are unassigned code points.
enum class Category : std::uint8_t {
    // clang-format off
    Cn, Lu, Ll, Lt, Lm, Lo, Mn, Mc, Me, Nd, Nl, No, Pc, Pd, Ps, Pe, Pi, Pf, Po, Sm, Sc, Sk, So,
    Zs, Zl, Zp, Cc, Cf, Cs, Co
    // clang-format on
};

Category category_of(char32_t code);

// Whether the normalization NFC of `tokenizers`, of Unicode 9.0, knows a character; it leaves the others as they are,
// although later versions of Unicode compose or reorder some.
bool is_known_to_nfc(char32_t code);

}  // namespace llmc
