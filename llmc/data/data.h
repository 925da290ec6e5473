// What a run learns from and is validated on, found from what the user gave.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "llmc/data/token_source.h"

namespace llmc {

// A path is a file's name or a shell pattern. Names that end in .bin are token shards, a pattern may match
// many of them (read in the order of their names); any other file is text, a byte a token.
struct DataOptions {
    std::string train_data;  // --train-data; empty: the embedded stories
    std::string val_data;    // --val-data; empty: the last 10% of the text, or no validation for token shards
    std::int64_t vocabulary;
    std::int64_t sequence_length;
    std::int64_t sequences = 1;  // of one step, which the training source must have
};

struct Data {
    std::unique_ptr<TokenSource> training;
    std::unique_ptr<TokenSource> validation;  // null if there is none
    std::vector<std::string> files;           // that are read
    // For people: "first 90% of the embedded stories, 1,800,000 tokens".
    std::string training_description;
    std::string validation_description;  // empty if there is none
    // What of the training source is in no sample, since its shard is shorter than one; empty if nothing is.
    std::string too_short;
    // Said of bytes where the vocabulary has more, as GPT-2's has; empty where there is nothing to say.
    std::string note;
    std::int64_t epoch_tokens = 0;  // that an epoch learns from: those of whole windows (samples.h)

    // The cross-entropy on the validation source (on the training source if there is none), in nats per
    // token, of a model that knows how often each token of the vocabulary is in the training source, with one
    // added to each count. It takes a pass over all tokens: none where training and validation have more than
    // 100 million together.
    std::optional<double> unigram_loss;
    // The entropy of the validation source in nats per token (Stories::entropy): of the embedded stories
    // only.
    std::optional<double> source_entropy;
};

// UserError, naming the option, for data that is missing, unreadable, damaged, or too short: a training
// source has windows of sequence_length + 1 tokens for one step, a validation source at least one token to
// predict. A token outside the vocabulary is a UserError here or when it is read.
Data open_data(const DataOptions& options);

}  // namespace llmc
