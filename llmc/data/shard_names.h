// What the names of token shards say about their use: for training, for validation, or nothing.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace llmc {

// What to give for `option` (--train-data or --val-data) in place of this directory.
std::string advice_for_directory(const std::filesystem::path& directory, const std::string& option);

// A note if `files`, given by `pattern` to --train-data, are training shards and validation shards by their names;
// empty otherwise.
std::string note_on_validation_shards(const std::string& pattern, std::span<const std::string> files);

}  // namespace llmc
