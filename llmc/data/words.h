// GPT-2's split of text into words, which no token crosses:
//   's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
#pragma once

#include <cstddef>
#include <string_view>

namespace llmc {

// Bytes of the first word of a text, which is UTF-8 and not empty.
std::size_t first_word(std::string_view text);

}  // namespace llmc
