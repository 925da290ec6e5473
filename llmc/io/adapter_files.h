// The folders of low-rank adapters (model/low_rank.h) as Hugging Face's PEFT writes them: adapter_model.safetensors,
// with A (rank, inputs) and B (outputs, rank) of each matrix, and adapter_config.json.
#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace llmc {

inline constexpr const char *adapter_weights_file = "adapter_model.safetensors",
                            *adapter_config_file = "adapter_config.json",
                            *base_checksum_key = "base_checksum",  // these two in the metadata of the tensors
                                *base_dtype_key = "base_dtype";

inline constexpr std::int64_t most_adapter_rank = 1 << 16;
inline constexpr double least_alpha = 1e-6, greatest_alpha = 1e9;  // with 0, nothing would be trained

struct AdapterConfig {
    std::int64_t rank = 0;
    double alpha = 1;
    bool rslora = false;                  // the scale is alpha / sqrt(rank), not alpha / rank
    std::vector<std::string> matrices{};  // of `adaptable`, in its order
    std::string base{};                   // the name or the folder of its base model; may be empty
    std::string base_checksum{};          // of the base's weights (load_stored); empty: not known
    std::string base_dtype{};             // with which they were trained: "nf4", "fp32" ...; empty: not known

    double scale() const {
        return alpha / (rslora ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
    }
};

struct AdapterFolder {
    std::filesystem::path folder;
    AdapterConfig config;
    std::vector<std::string> notes;  // for the user: what is not used
};

// Reads the configuration, and from the names of the tensors which matrices have adapters. UserError names the key, or
// the tensor, with which the adapter would compute something else.
AdapterFolder read_adapter(const std::filesystem::path& folder);

// The text of adapter_config.json.
std::string adapter_config_text(const AdapterConfig& config);

}  // namespace llmc
