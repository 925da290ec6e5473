// What kind of character a code point is, as far as splitting text into words asks.
#pragma once

#include <cstdint>

namespace llmc {

// Unicode's letters \p{L}, numbers \p{N} and white space \s; all else, punctuation and unassigned code points included, is
// `other`. The table is that of Unicode 16.0, which tiktoken has.
enum class CharacterClass : std::uint8_t { other, letter, number, space };

CharacterClass class_of(char32_t code);

}  // namespace llmc
