// Low-rank adapters (Hu et al., "LoRA", arXiv 2106.09685): a model whose parameters are frozen, made from another one.
// Each chosen product y = W x of its layers becomes y = W x + s B (A x), with A (R, inputs) and B (outputs, R), which
// alone are trained. W + s B A is never formed.
//
// Every matrix has its own A and B. Those of a layer are a unit of their own: "layers.3.lora" beside "layers.3".
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llmc/model/model.h"

namespace llmc {

// The matrices that may have adapters, by the beginnings of their names: "q" is q_proj.
inline constexpr std::array<std::string_view, 7> adaptable = {"q", "k", "v", "o", "gate", "up", "down"};

struct LowRank {
    std::int64_t rank = 0;              // R
    double scale = 1;                   // s
    std::vector<std::string> matrices;  // of `adaptable`
    bool operator==(const LowRank&) const = default;
};

// UserError if the model lacks one of the matrices.
Model with_adapters(const Model& model, const LowRank& adapters);

// The same model with the matrices of its layers, which are frozen, in 4 bits (device/nf4.h). Those of a layer are a
// unit of their own: "layers.3.nf4". UserError if tensor-parallel `ranks` would cut a block, or if a matrix has no
// whole blocks.
Model with_nf4(const Model& model, int ranks);

// The tensors of an adapter beside its matrix "layers.3.self_attn.q_proj.weight", by their names in the model:
// "layers.3.lora.self_attn.q_proj.lora_A.weight".
inline constexpr std::string_view lora_unit = ".lora", lora_a = ".lora_A.weight", lora_b = ".lora_B.weight";
inline constexpr std::string_view nf4_unit = ".nf4";
// The name of a tensor without this part of its unit's.
std::string without_nf4(const std::string& name);
// Whether the name of a tensor, or of a unit, is that of adapters.
inline bool is_of_adapter(std::string_view name) {
    return name.ends_with(lora_unit) || name.find(".lora.") != std::string_view::npos;
}

}  // namespace llmc
