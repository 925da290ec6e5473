// Writes a model as a folder in Hugging Face's format: config.json, the weights, and the files of the tokenizer.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/io/model_files.h"
#include "llmc/io/tokenizer_folder.h"
#include "llmc/parallel/zero/parameter_store.h"
#include "llmc/parallel/zero/unit_transfer.h"

namespace llmc {

// Whether --export NAME means a folder, and not a single file. A link's own name says so.
bool is_folder_name(const std::filesystem::path& name);

struct ExportedFolder {
    std::string config;                             // the text of config.json, or that of adapters
    std::string dtype;                              // of the weights: "fp32", "bf16" or "fp16"
    Collected what{};                               // the weights, or the adapters alone
    std::map<std::string, std::string> metadata{};  // of the files of weights
    TokenizerFiles tokenizer{};                     // none for a model without one
    // The most bytes of a file of weights; a larger tensor has a file of its own.
    std::uint64_t shard_bytes = 5'000'000'000;
};

// Writes a single safetensors file with elements of this dtype. All ranks call it.
void save_file(const std::filesystem::path& file, const ParameterStore& store, UnitTransfer& transfer,
               const Collected& what, const std::string& dtype);

// Writes the folder, which must be new or empty; it is there only when it is whole. All ranks call it, and the
// transfer's root writes. UserError if it cannot be written, or if a weight is too large for fp16.
void save_folder(const std::filesystem::path& folder, const ParameterStore& store, UnitTransfer& transfer,
                 const ExportedFolder& exported);

// Throws UserError if the folder, or that where a link leads, cannot be written later, or is neither new nor empty.
void require_new_folder(const std::filesystem::path& folder);

}  // namespace llmc
