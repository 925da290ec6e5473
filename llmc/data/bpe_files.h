// Reads the two files of GPT-2's byte-pair encoding: encoder.json, with the id of every token, and vocab.bpe,
// with the merges in order.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "llmc/data/bpe.h"

namespace llmc {

inline constexpr const char* bpe_ids_file = "encoder.json";
inline constexpr const char* bpe_merges_file = "vocab.bpe";

// Reads both files. UserError, which names the file, if one is missing, unreadable, damaged, or not of the
// same encoding as the other. Both files describe the same tokens, so every mismatch is found. Any
// number of merges is allowed.
BytePairEncoder read_bpe(const std::filesystem::path& directory);

// The folder to read if the user gives none.
inline constexpr const char* default_bpe_directory = "data/gpt2_bpe";

// How to get an encoding of so many tokens, for messages: "run `...`, which makes ..., or give ... --bpe-dir".
std::string advice_for_bpe(std::int64_t vocabulary = gpt2_vocabulary);

// The encoding of a model's vocabulary: the one in the given directory, which must have as many tokens. If no
// directory is given and the vocabulary is GPT-2's, the one in data/gpt2_bpe, if it exists. UserErrors begin
// with --bpe-dir.
std::optional<BytePairEncoder> find_bpe(const std::string& directory, std::int64_t vocabulary);

}  // namespace llmc
