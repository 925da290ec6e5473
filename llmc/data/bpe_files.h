// The two files of a byte-pair encoding as GPT-2 has them: encoder.json, the id of every token, and vocab.bpe, the merges in
// their order.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "llmc/data/bpe.h"

namespace llmc {

inline constexpr const char* bpe_ids_file = "encoder.json";
inline constexpr const char* bpe_merges_file = "vocab.bpe";

// UserError, which names the file, where one of them is not there, cannot be read, is damaged, or is not of the same
// encoding as the other: each says the same tokens, and whatever differs is found. Any number of merges will do.
BytePairEncoder read_bpe(const std::filesystem::path& directory);

// The folder that is read where none is given.
inline constexpr const char* usual_bpe_directory = "data/gpt2_bpe";

// What a model's vocabulary means: the encoding in a directory, which must have as many tokens; or where none is given and
// the vocabulary is GPT-2's, that in data/gpt2_bpe if it is there. UserErrors begin with --bpe-dir.
std::optional<BytePairEncoder> find_bpe(const std::string& directory, std::int64_t vocabulary);

}  // namespace llmc
