// The sizes of a GPT-2 model, and the named models.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace llmc {

// Rows of the token embedding are stored up to a multiple of this on each rank that has some.
inline constexpr std::int64_t vocabulary_multiple = 128;

struct GPTConfig {
    std::int64_t layers = 0;           // L
    std::int64_t heads = 0;            // NH
    std::int64_t channels = 0;         // C
    std::int64_t sequence_length = 0;  // T
    std::int64_t vocabulary = 0;       // V

    std::int64_t head_size() const { return channels / heads; }
    // V rounded up: the rows that are stored. The padding never enters a softmax; files hold V rows.
    std::int64_t padded_vocabulary() const {
        return (vocabulary + vocabulary_multiple - 1) / vocabulary_multiple * vocabulary_multiple;
    }
    bool operator==(const GPTConfig&) const = default;
};

// tiny and mini read bytes; the others are GPT-2's four sizes.
struct NamedModel {
    std::string_view name;
    GPTConfig config;
    double
        learning_rate;  // that suits it with AdamW; GPT-3's for GPT-2's sizes (Brown et al., 2020, table 2.1)
};
std::span<const NamedModel> named_models();

// Refuses sizes that make no model with a UserError that names what would do. How large they may be is a matter
// of memory, which the run's plan checks.
void check_config(const GPTConfig& config);

// Floating-point operations that training on a token takes, forward and backward: 6 for each weight of a matrix
// product (the head's among them), and 6 L C T for the attention scores and what they weigh: half of what Chowdhery et al.
// count ("PaLM", 2022, appendix B), since nobody computes the half that the causal mask hides.
double training_flops_per_token(const GPTConfig& config);

// Trainable parameters, without padding, of sizes that may be absurd, whose products leave 64 bits.
double parameters_about(const GPTConfig& config);

}  // namespace llmc
