// Reads the files of tokenizers: a folder's tokenizer.json, as Hugging Face's library writes it, or GPT-2's two files.
// Byte-level byte-pair encodings only; what else a file has is refused by its name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/data/tokenizer.h"

namespace llmc {

inline constexpr const char* tokenizer_file = "tokenizer.json";
// GPT-2's: the id of every token, and the merges in order. In Hugging Face's folders they are vocab.json and
// merges.txt.
inline constexpr const char* gpt2_ids_file = "encoder.json";
inline constexpr const char* gpt2_merges_file = "vocab.bpe";
inline constexpr std::string_view end_of_text_name = "<|endoftext|>";

// The tokenizer in a folder. UserError, which names the file, if there is none, or if it is damaged or not supported.
Tokenizer read_tokenizer(const std::filesystem::path& folder);

// The folder to read if the user gives none and the vocabulary is GPT-2's.
inline constexpr const char* gpt2_tokenizer_folder = "data/gpt2_bpe";

// How to get a tokenizer for a vocabulary, for messages: "run `...`, which makes ..., or give ... --tokenizer".
std::string advice_for_tokenizer(std::int64_t vocabulary = gpt2_vocabulary);

// The tokenizer of a model in a folder; its vocabulary must not be larger than the model's. Without a folder it is
// that of bytes for a vocabulary of 256, and otherwise there is none. `asked_by` is the option that needs the folder's:
// a UserError that begins with it says why that cannot be used. If no option does, there is none, and a note says why.
std::optional<Tokenizer> open_tokenizer(const std::string& folder, std::string_view asked_by,
                                        std::int64_t vocabulary, std::vector<std::string>& notes);

}  // namespace llmc
