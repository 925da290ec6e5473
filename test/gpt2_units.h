// Numbers of GPT-2's units and parts, for tests that look at a model's units and parts.
#pragma once

#include <memory>
#include <vector>

#include "llmc/model/model.h"
#include "llmc/parallel/pipeline/stage.h"
#include "test/gpt2_config.h"

namespace llmc {

// In forward order: wte, wpe, h.0 ... h.L-1, ln_f.
inline constexpr int wte_unit = 0;
inline constexpr int wpe_unit = 1;
inline constexpr int block_unit(int block) { return 2 + block; }
inline constexpr int ln_f_unit(int layers) { return 2 + layers; }

// The embedding, blocks, the head.
inline constexpr int embedding_part = 0;
inline constexpr int block_part(int block) { return 1 + block; }
inline constexpr int head_part(int layers) { return 1 + layers; }

inline std::shared_ptr<const Outline> outline_of(const GPTConfig& config) {
    return std::make_shared<Outline>(outline_of(gpt2(config)));
}

inline std::vector<UnitSpec> gpt_units(const GPTConfig& config) {
    const auto outline = outline_of(config);
    std::vector<UnitSpec> units;
    for (const Outline::OutlinedUnit& unit : outline->units) units.push_back(unit.spec);
    return units;
}

// Parts of a small model: all of a model with `layers` layers, or one stage's part of a pipeline with these
// chunks.
inline std::shared_ptr<const Outline> outline_of_layers(int layers) {
    return outline_of(
        GPTConfig{.layers = layers, .heads = 2, .channels = 8, .sequence_length = 4, .vocabulary = 16});
}
inline StagePart whole_model(int layers) { return whole_model(outline_of_layers(layers)); }
inline StagePart part_of_stage(const std::vector<BlockRange>& chunks, int stages, int stage,
                               const Recompute& recompute = {}, bool splits = false) {
    return parts_of_stages(outline_of_layers(chunks.back().end), chunks, stages, splits,
                           recompute)[static_cast<std::size_t>(stage)];
}

// Floating-point operations of the forward pass on a token.
inline double embedding_cost(const GPTConfig& config) { return forward_cost(gpt2(config).runs[0].parts[0]); }
inline double block_cost(const GPTConfig& config) { return forward_cost(gpt2(config).runs[1].parts[0]); }
inline double head_cost(const GPTConfig& config) { return forward_cost(gpt2(config).runs[2].parts[0]); }

inline int layers_of(const StagePart& part) {
    int layers = 0;
    for (const Chunk& chunk : part.chunks) layers += chunk.layers();
    return layers;
}
// The layer of a part of such a model. -1 means the embedding or the head.
inline int layer_of(const StagePart& stage, int part) {
    return part < 0 ? -1 : stage.outline->part(part).layer;
}

}  // namespace llmc
