// Choosing the next token from logits.
#pragma once

#include <cstdint>
#include <span>

namespace llmc {

struct SamplerOptions {
    double temperature = 1;  // 0: the likeliest token
    std::int64_t top_k = 0;  // sample from this many likeliest tokens; 0: from all
    double top_p = 1;        // sample from the fewest tokens whose probabilities sum to this; 1: from all
};

// Chooses a token by `uniform`, a number in [0, 1). The softmax of logits / temperature is restricted to the
// top_k largest logits. Then only the smallest set of tokens whose probabilities sum to top_p remains
// (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020). The result is the token at
// `uniform` of the cumulated probabilities.
std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options, double uniform);

}  // namespace llmc
