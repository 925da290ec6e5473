// Opens the training and validation data of a run from the user's options.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/data/data_record.h"
#include "llmc/data/token_source.h"

namespace llmc {

// A path is a file name or a shell pattern. Names that end in .bin, or .BIN, are token shards; a pattern may match many
// of them, which are read in the order of their names. Any other file is text, one token per byte.
struct DataOptions {
    std::string train_data;  // --train-data; empty: the embedded stories
    std::string val_data;    // --val-data; empty: the last 10% of the text, or no validation for token shards
    std::int64_t vocabulary;
    std::int64_t sequence_length;
    std::int64_t sequences = 1;  // in one step; the training source must have as many
    bool trains = true;          // false: an evaluation, which may validate on the training files
    // The folder of a model with a tokenizer of its own: data must be token shards. An evaluation needs none: the
    // embedded stories are not in its tokens. Empty: any data.
    std::string folder{};
    // The checksum of the model's tokenizer, which token shards must have, too; 0 if none is known. Shards that
    // say which tokenizer made them cannot be compared with one that cannot be used.
    std::uint64_t tokenizer = 0;
    bool has_unusable_tokenizer = false;
};

struct Data {
    std::unique_ptr<TokenSource> training;    // has no tokens if there is none
    std::unique_ptr<TokenSource> validation;  // null if there is none
    std::vector<std::string> files;           // the files that are read
    // The checksum of the tokenizer of the model or, if that is not known, of the token shards; 0 if they do not say.
    std::uint64_t tokenizer = 0;
    DataRecord record;  // its keys are "train-data" and, with validation, "val-data"
    // For the user: "first 90% of the embedded stories, 1,800,000 tokens".
    std::string training_description;
    std::string validation_description;  // empty if there is none
    // Describes shards of the training source that are shorter than a sample and are therefore not used.
    // Empty if there are none.
    std::string too_short;
    // For the user, for instance if the tokens are bytes and the vocabulary is larger, such as GPT-2's.
    std::vector<std::string> notes;
    std::int64_t epoch_tokens = 0;  // the tokens of one epoch: those of whole windows (samples.h)

    // The loss of a unigram model on the validation source, in nats per token; on the training source if
    // there is no validation. The probability of a token is proportional to its count in the training source
    // plus one. This takes a pass over all tokens, so it is left out if training and validation have more
    // than 100 million together; and for conversations, of which only some tokens count.
    std::optional<double> unigram_loss;
    // The entropy of the validation source in nats per token (Stories::entropy), for the embedded stories
    // only.
    std::optional<double> source_entropy;
};

// Opens the data. UserError, naming the option, for data that is missing, unreadable, damaged, too short, or
// made with another tokenizer.
// A training source needs enough windows of sequence_length + 1 tokens for one step; a validation source
// needs at least one token to predict. A run that trains may not validate on a file that it trains on. A token
// outside the vocabulary is a UserError here or when it is read.
Data open_data(const DataOptions& options);

}  // namespace llmc
