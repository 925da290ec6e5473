// GPT-2 (Radford et al., "Language models are unsupervised multitask learners", 2019), in the names of its files.
#pragma once

#include <cstdint>

#include "llmc/model/model.h"

namespace llmc {

struct GPTConfig {
    std::int64_t layers = 0;           // L
    std::int64_t heads = 0;            // NH
    std::int64_t channels = 0;         // C
    std::int64_t sequence_length = 0;  // T
    std::int64_t vocabulary = 0;       // V
    bool bias = true;                  // of layernorms and products
    bool tied_head = true;             // the head is the token embedding

    bool operator==(const GPTConfig&) const = default;
};

Model gpt2(const GPTConfig& config);

}  // namespace llmc
