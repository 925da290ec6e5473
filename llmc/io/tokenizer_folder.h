// The files of a model's tokenizer, which an export and a checkpoint copy: what gives its ids, its chat template, the
// tokens that end a text.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace llmc {

// The contents of the files by their names, which may be in a folder of the folder.
using TokenizerFiles = std::map<std::string, std::string>;

// The files of a tokenizer in a folder; none if there is no such folder. UserError if one cannot be read.
TokenizerFiles read_tokenizer_files(const std::filesystem::path& folder);

// Whether a folder has files of a tokenizer of any kind.
bool has_tokenizer(const std::filesystem::path& folder);

// Writes the files into an existing folder, and makes them durable. UserError if that fails.
void write_tokenizer_files(const std::filesystem::path& folder, const TokenizerFiles& files);

}  // namespace llmc
