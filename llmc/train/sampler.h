// Choosing the next token from logits.
#pragma once

#include <cstdint>
#include <span>

namespace llmc {

struct SamplerOptions {
    double temperature = 1;  // 0: the likeliest token
    std::int64_t top_k = 0;  // 0: from all
};

// The token whose share of the softmax of logits / temperature, restricted to the top_k largest, holds
// `uniform`, a number in [0, 1).
std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options, double uniform);

}  // namespace llmc
