// A GPT-2 of any size, for tests.
#pragma once

#include <cstdint>

#include "llmc/model/family.h"

namespace llmc {

struct GPTConfig {
    std::int64_t layers = 0;           // L
    std::int64_t heads = 0;            // NH
    std::int64_t channels = 0;         // C
    std::int64_t sequence_length = 0;  // T
    std::int64_t vocabulary = 0;       // V
    bool bias = true;                  // layernorms and products have biases
    bool tied_head = true;             // the head is the token embedding

    bool operator==(const GPTConfig&) const = default;
};

inline Model gpt2(const GPTConfig& m) {
    return make_model(family_of("gpt2"), {{{"layers", m.layers},
                                           {"heads", m.heads},
                                           {"channels", m.channels},
                                           {"seq-len", m.sequence_length},
                                           {"vocab-size", m.vocabulary},
                                           {"bias", m.bias},
                                           {"tied-head", m.tied_head}}});
}

}  // namespace llmc
