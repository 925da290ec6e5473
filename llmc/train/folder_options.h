// Options that come from a folder in Hugging Face's format: --init DIR and --model DIR; and what --export writes
// into such a folder.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "llmc/core/dtype.h"
#include "llmc/io/tokenizer_folder.h"
#include "llmc/train/options.h"
#include "llmc/train/sources.h"

namespace llmc {

// Takes the model of the folder's config.json for options that nobody gave. UserError if this program does not
// compute it. Notes of what is not used are added to options.notes.
void take_folder(Options& options, const ModelFolder& folder);

// Takes the dtype of the weights of --init as that of the folder's model, if its config.json names none.
void take_dtype(Options& options, DType weights);

// The folder whose tokenizer made the model's tokens; empty for a model of ours, and for one of bytes.
std::string folder_of_tokens(const Options& options);
// The folder with the model's tokenizer: of --tokenizer, or the checkpoint's, or that of --lora, or of the model's
// folder, or GPT-2's. Empty if there is none.
std::string folder_of_tokenizer(const Options& options);

// The files of the tokenizer in that folder, and the model's own generation_config.json, if there is none beside them.
TokenizerFiles tokenizer_files_of(const Options& options, const std::string& folder);
// The same for a folder in Hugging Face's format, where GPT-2's files have other names.
TokenizerFiles with_names_of_folders(TokenizerFiles files);

// The tokens that end a text: those of the tokenizer's generation_config.json, or else of the folder's config.json.
std::vector<std::int32_t> end_tokens(const Options& options, const TokenizerFiles& tokenizer);

// The token with which the folder's texts begin: an empty prompt is that token. Empty without bos_token_id.
std::optional<std::int32_t> begin_token(const Options& options);

// The text of the exported folder's config.json, and the dtype of its weights: --export-dtype, or else that of the
// folder from which the model came. UserError if Hugging Face's library does not have the model.
std::string exported_config(const Options& options);
std::string exported_dtype(const Options& options);

}  // namespace llmc
