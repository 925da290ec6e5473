#include "llmc/parallel/activations.h"

#include <fmt/format.h>

#include <string>

namespace llmc {

ActivationBuffers<BufferId> lay_out_activations(MemoryLayout& layout, const ActivationSpec& spec) {
    const GPTConfig& config = spec.config;
    const std::int64_t B = spec.batch, T = config.sequence_length, C = config.channels;
    const auto add = [&](const std::string& name, DType dtype, const Shape& shape) {
        return layout.add(ArenaKind::activations, name, dtype, shape);
    };

    ActivationBuffers<BufferId> ids;
    BlockActivations<BufferId> recomputed{};
    if (spec.recompute.any(config.layers))
        recomputed = lay_out_recomputed(layout, config, B, spec.dtype, spec.recompute.kind);
    for (int slot = 0; slot < spec.slots; ++slot) {
        const std::string prefix = fmt::format("slot {}: ", slot);
        MicroBatchBuffers<BufferId>& buffers = ids.slots.emplace_back();
        for (std::int64_t i = 0; i <= config.layers; ++i) {
            buffers.residual.push_back(add(fmt::format("{}residual {}", prefix, i), spec.dtype, {B, T, C}));
        }
        for (std::int64_t i = 0; i < config.layers; ++i) {
            buffers.blocks.push_back(lay_out_block_activations(layout, fmt::format("{}block {}", prefix, i),
                                                               config, B, spec.dtype, spec.recompute.of(i),
                                                               recomputed));
        }
    }
    for (int i = 0; i <= spec.slots; ++i) {
        ids.tokens.push_back({add(fmt::format("inputs {}", i), DType::int32, {B, T}),
                              add(fmt::format("targets {}", i), DType::int32, {B, T})});
    }
    ids.scratch = lay_out_block_scratch(layout, config, B, spec.dtype);
    ids.head = lay_out_head(layout, config, B, spec.dtype, spec.head_rows);
    ids.residual_gradient = add("residual gradient", spec.dtype, {B, T, C});
    ids.results = add("results", DType::fp64, {2});
    ids.norm_partials = add("norm partials", DType::fp32, {spec.norm_blocks});
    return ids;
}

ActivationBuffers<Tensor> bind(const ActivationBuffers<BufferId>& ids, const Arenas& arenas) {
    const auto tensor = [&](BufferId id) { return arenas[id]; };
    ActivationBuffers<Tensor> bound;
    for (const MicroBatchBuffers<BufferId>& slot : ids.slots) {
        MicroBatchBuffers<Tensor>& buffers = bound.slots.emplace_back();
        for (const BufferId id : slot.residual) buffers.residual.push_back(tensor(id));
        for (const auto& block : slot.blocks) buffers.blocks.push_back(block.transform(tensor));
    }
    for (const TokenBuffers<BufferId>& tokens : ids.tokens)
        bound.tokens.push_back({tensor(tokens.inputs), tensor(tokens.targets)});
    bound.scratch = ids.scratch.transform(tensor);
    bound.head = ids.head.transform(tensor);
    bound.residual_gradient = tensor(ids.residual_gradient);
    bound.results = tensor(ids.results);
    bound.norm_partials = tensor(ids.norm_partials);
    return bound;
}

}  // namespace llmc
