// Choosing the next token from logits.
#pragma once

#include <cstdint>
#include <span>

namespace llmc {

struct SamplerOptions {
    double temperature = 1;  // 0: the likeliest token
    std::int64_t top_k = 0;  // 0: from all
    double top_p = 1;  // from the smallest set of likeliest tokens that together are as likely; 1: from all
};

// The token whose share of the softmax of logits / temperature, restricted to the top_k largest, and of these to the
// likeliest whose shares reach top_p (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020), holds
// `uniform`, a number in [0, 1).
std::int32_t sample_token(std::span<const float> logits, const SamplerOptions& options, double uniform);

}  // namespace llmc
