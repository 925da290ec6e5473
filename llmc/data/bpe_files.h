// The two files of a byte-pair encoding as GPT-2 has them: encoder.json, the id of every token, and vocab.bpe, the merges in
// their order.
#pragma once

#include <filesystem>

#include "llmc/data/bpe.h"

namespace llmc {

inline constexpr const char* bpe_ids_file = "encoder.json";
inline constexpr const char* bpe_merges_file = "vocab.bpe";

// UserError, which names the file, where one of them is not there, cannot be read, is damaged, or is not of the same
// encoding as the other: each says the same tokens, and whatever differs is found. Any number of merges will do.
BytePairEncoder read_bpe(const std::filesystem::path& directory);

}  // namespace llmc
