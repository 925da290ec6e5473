// Models that this program does not train: their parameters and floating-point operations are counted from their
// configurations, for plans without memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace llmc {

struct DescribedModel {
    std::string name, description;
    std::int64_t parameters, active_parameters;  // active: those that one token uses
    std::int64_t input_embeddings;               // parameters that no product reads
    std::int64_t sequence_length;                // of its pretraining
    std::int64_t layers, channels;
    // Floating-point operations of attention of a token, forward and backward, for each token of the sequence: by
    // 3 L H (d_qk + d_v) with causal attention, and twice that where tokens see all others.
    double attention_per_token;
    std::int64_t buffer_bytes = 0;  // that Hugging Face's model has beside its weights

    // 6 (N_active - input embeddings) + attention
    double flops_per_token(std::int64_t sequence) const {
        return 6 * static_cast<double>(active_parameters - input_embeddings) +
               attention_per_token * static_cast<double>(sequence);
    }
};

// The model of a name, or of a folder whose config.json has the model_type mixtral, deepseek_v2 or deepseek_v3; none
// for others. UserError if such a file lacks a size.
std::optional<DescribedModel> described_model(const std::string& name);

}  // namespace llmc
