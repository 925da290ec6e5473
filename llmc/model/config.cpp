#include "llmc/model/config.h"

#include <array>

#include "llmc/core/error.h"
#include "llmc/model/units.h"

namespace llmc {

std::span<const NamedModel> named_models() {
    static constexpr std::array models = {
        NamedModel{"tiny", {4, 4, 128, 64, 256}, 4e-3},
        NamedModel{"mini", {6, 6, 384, 256, 256}, 1e-3},
        NamedModel{"gpt2", {12, 12, 768, 1024, 50257}, 6e-4},
        NamedModel{"gpt2-medium", {24, 16, 1024, 1024, 50257}, 3e-4},
        NamedModel{"gpt2-large", {36, 20, 1280, 1024, 50257}, 2.5e-4},
        NamedModel{"gpt2-xl", {48, 25, 1600, 1024, 50257}, 2e-4},
    };
    return models;
}

namespace {

void check_size(std::string_view option, std::int64_t size, std::int64_t largest) {
    if (size < 1 || size > largest) user_error("{} {} is out of range; give 1 to {}", option, size, largest);
}

}  // namespace

void check_config(const GPTConfig& config) {
    // Far beyond any GPT, and small enough that no product of sizes leaves 64 bits.
    check_size("--layers", config.layers, 1 << 10);
    check_size("--heads", config.heads, 1 << 10);
    check_size("--channels", config.channels, 1 << 15);
    check_size("--seq-len", config.sequence_length, 1 << 17);
    check_size("--vocab-size", config.vocabulary, 1 << 20);
    if (config.channels % config.heads != 0) {
        const std::int64_t below = config.channels / config.heads * config.heads;
        const std::int64_t above = below + config.heads;
        if (below == 0) {
            user_error("--heads {} does not divide --channels {}; try --channels {}", config.heads,
                       config.channels, above);
        }
        user_error("--heads {} does not divide --channels {}; try --channels {} or {}", config.heads,
                   config.channels, below, above);
    }
}

std::int64_t count_parameters(const GPTConfig& config) {
    std::int64_t parameters = 0;
    for (const UnitSpec& unit : gpt_units(config)) {
        for (const ParamSpec& param : unit.params) parameters += param.shape.elements();
    }
    return parameters;
}

}  // namespace llmc
