// The class of a Unicode character, as far as splitting text into words needs it.
#pragma once

#include <cstdint>

namespace llmc {

// Unicode's letters \p{L}, numbers \p{N} and white space \s. All else is `other`, including punctuation and
// unassigned code points. The table is that of Unicode 16.0, as in tiktoken.
enum class CharacterClass : std::uint8_t { other, letter, number, space };

CharacterClass class_of(char32_t code);

}  // namespace llmc
