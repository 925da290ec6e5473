// Whether a file that is not named as a token shard is a text. Its bytes become tokens whatever they are, so a model
// would be trained on a compressed file without a word.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace llmc {

// UserError for a file that is surely no text in UTF-8: a token shard of another name, a compressed file, or a text
// in UTF-16 or UTF-32. The message begins with `option` ("--train-data").
void require_text(const std::string& path, std::span<const std::uint8_t> bytes, const std::string& option);

// A note if the file has NUL bytes near its beginning, or bytes that are no UTF-8; empty otherwise.
std::string note_if_no_text(const std::string& path, std::span<const std::uint8_t> bytes);

}  // namespace llmc
