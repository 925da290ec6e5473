#include "llmc/model/config.h"

#include <algorithm>
#include <array>

#include "llmc/core/error.h"

namespace llmc {

std::span<const NamedModel> named_models() {
    static constexpr std::array models = {
        NamedModel{"tiny", {4, 4, 128, 64, 256}, 4e-3},
        NamedModel{"mini", {6, 6, 384, 256, 256}, 1e-3},
        NamedModel{"gpt2", {12, 12, 768, 1024, 50257}, 6e-4},
        NamedModel{"gpt2-medium", {24, 16, 1024, 1024, 50257}, 3e-4},
        NamedModel{"gpt2-large", {36, 20, 1280, 1024, 50257}, 2.5e-4},
        NamedModel{"gpt2-xl", {48, 25, 1600, 1024, 50257}, 2e-4},
        NamedModel{"gpt3-6.7b", {32, 32, 4096, 2048, 50257}, 1.2e-4},
    };
    return models;
}

namespace {

// Channels of a head, in a suggestion.
constexpr std::int64_t smallest_head = 16;

void check_size(std::string_view option, std::int64_t size) {
    if (size < 1) user_error("{} {} is out of range; give 1 or more", option, size);
}

}  // namespace

void check_config(const GPTConfig& config) {
    check_size("--layers", config.layers);
    check_size("--heads", config.heads);
    check_size("--channels", config.channels);
    check_size("--seq-len", config.sequence_length);
    check_size("--vocab-size", config.vocabulary);
    if (config.channels % config.heads != 0) {
        const std::int64_t below = config.channels / config.heads * config.heads;
        if (below == 0) {
            std::int64_t most = std::max<std::int64_t>(1, config.channels / smallest_head);
            while (config.channels % most != 0) --most;
            user_error("--heads {} are more than --channels {}; give a divisor of it, such as {}",
                       config.heads, config.channels, most);
        }
        user_error("--heads {} does not divide --channels {}; try --channels {} or {}", config.heads,
                   config.channels, below, below + config.heads);
    }
}

double parameters_about(const GPTConfig& config) {
    const auto L = static_cast<double>(config.layers), C = static_cast<double>(config.channels);
    const auto T = static_cast<double>(config.sequence_length), V = static_cast<double>(config.vocabulary);
    return (V + T) * C + L * (12 * C * C + 13 * C) + 2 * C;
}

double training_flops_per_token(const GPTConfig& config) {
    const auto L = static_cast<double>(config.layers), C = static_cast<double>(config.channels);
    const auto T = static_cast<double>(config.sequence_length), V = static_cast<double>(config.vocabulary);
    const double weights = L * 12 * C * C + V * C;
    return 6 * weights + 6 * L * C * T;
}

}  // namespace llmc
