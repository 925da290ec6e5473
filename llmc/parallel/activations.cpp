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
    for (int slot = 0; slot < spec.slots; ++slot) {
        const std::string prefix = fmt::format("slot {}: ", slot);
        MicroBatchBuffers<BufferId>& buffers = ids.slots.emplace_back();
        buffers.inputs = add(prefix + "inputs", DType::int32, {B, T});
        buffers.targets = add(prefix + "targets", DType::int32, {B, T});
        for (std::int64_t i = 0; i <= config.layers; ++i) {
            buffers.residual.push_back(add(fmt::format("{}residual {}", prefix, i), spec.dtype, {B, T, C}));
        }
        for (std::int64_t i = 0; i < config.layers; ++i) {
            buffers.blocks.push_back(lay_out_block_activations(layout, fmt::format("{}block {}", prefix, i),
                                                               config, B, spec.dtype));
        }
    }
    ids.scratch = lay_out_block_scratch(layout, config, B, spec.dtype);
    ids.head = lay_out_head(layout, config, B, spec.dtype);
    ids.residual_gradient = add("residual gradient", spec.dtype, {B, T, C});
    ids.loss_sum = add("loss sum", DType::fp64, {1});
    ids.norm_partials = add("norm partials", DType::fp32, {spec.norm_blocks});
    ids.norm_squared = add("norm squared", DType::fp64, {1});
    return ids;
}

ActivationBuffers<Tensor> bind(const ActivationBuffers<BufferId>& ids, const Arenas& arenas) {
    const auto tensor = [&](BufferId id) { return arenas[id]; };
    ActivationBuffers<Tensor> bound;
    for (const MicroBatchBuffers<BufferId>& slot : ids.slots) {
        MicroBatchBuffers<Tensor>& buffers = bound.slots.emplace_back();
        buffers.inputs = tensor(slot.inputs);
        buffers.targets = tensor(slot.targets);
        for (const BufferId id : slot.residual) buffers.residual.push_back(tensor(id));
        for (const auto& block : slot.blocks) buffers.blocks.push_back(block.transform(tensor));
    }
    bound.scratch = ids.scratch.transform(tensor);
    bound.head = ids.head.transform(tensor);
    bound.residual_gradient = tensor(ids.residual_gradient);
    bound.loss_sum = tensor(ids.loss_sum);
    bound.norm_partials = tensor(ids.norm_partials);
    bound.norm_squared = tensor(ids.norm_squared);
    return bound;
}

}  // namespace llmc
