// Models of any size, for tests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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

// The choices of a named model, with some of them changed.
inline ModelChoices choices_with(std::string_view model,
                                 const std::vector<std::pair<std::string, ModelValue>>& changes) {
    ModelChoices choices = choices_of(model);
    for (const auto& [name, value] : changes) choices.values.at(name) = value;
    return choices;
}

inline Model model_with(std::string_view model,
                        const std::vector<std::pair<std::string, ModelValue>>& changes) {
    return make_model(family_of(model), choices_with(model, changes));
}

inline Model gpt2(const GPTConfig& m) {
    return model_with("gpt2", {{"layers", m.layers},
                               {"heads", m.heads},
                               {"channels", m.channels},
                               {"seq-len", m.sequence_length},
                               {"vocab-size", m.vocabulary},
                               {"bias", m.bias},
                               {"tied-head", m.tied_head}});
}

}  // namespace llmc
