#include "llmc/parallel/activations.h"

#include <fmt/format.h>

#include <string>

namespace llmc {

ActivationBuffers<BufferId> lay_out_activations(MemoryLayout& layout, const ActivationSpec& spec) {
    const BlockSizes& sizes = spec.sizes;
    const DType dtype = sizes.dtype;
    const std::int64_t B = sizes.batch, T = sizes.config.sequence_length;
    const Shape stream = {B, sizes.split.stream_tokens(sizes.config), sizes.config.channels};
    const BuffersInFlight& in_flight = spec.in_flight;
    const auto add_to = [&](ArenaKind arena, const std::string& name, DType type, const Shape& shape) {
        return layout.add(arena, name, type, shape);
    };
    const auto add = [&](const std::string& name, DType type, const Shape& shape) {
        return add_to(ArenaKind::activations, name, type, shape);
    };
    // What is only there while it is received or sent.
    const auto beside = [](bool is) { return is ? ArenaKind::pipeline : ArenaKind::activations; };

    ActivationBuffers<BufferId> ids;
    BlockActivations<BufferId> recomputed{};
    if (spec.part.recomputes_any(spec.recompute))
        recomputed = lay_out_recomputed(layout, sizes, spec.recompute.kind);
    for (int slot = 0; slot < in_flight.slots; ++slot) {
        const std::string prefix = fmt::format("slot {}: ", slot);
        SlotBuffers<BufferId>& buffers = ids.slots.emplace_back();
        for (int i = 0; i < spec.part.most_blocks_of_a_chunk(); ++i) {
            buffers.residual.push_back(add(fmt::format("{}residual {}", prefix, i), dtype, stream));
            const std::string block = fmt::format("{}block {}", prefix, i);
            buffers.blocks.push_back(lay_out_block_activations(
                layout, block, sizes, spec.recompute.of(in_flight.block_at(slot, i)), recomputed));
        }
    }
    for (int i = 0; i < in_flight.chunk_inputs; ++i) {
        ids.chunk_inputs.push_back(
            add_to(beside(i >= in_flight.slots), fmt::format("input {}", i), dtype, stream));
    }
    for (int i = 0; i <= in_flight.tokens; ++i) {
        ids.tokens.push_back({add(fmt::format("inputs {}", i), DType::int32, {B, T}),
                              add(fmt::format("targets {}", i), DType::int32, {B, T})});
    }
    ids.scratch = lay_out_block_scratch(layout, sizes);
    if (spec.part.has_head()) ids.head = lay_out_head(layout, sizes, spec.head_rows);
    for (int i = 0; i < in_flight.residual_gradients; ++i) {
        ids.residual_gradients.push_back(
            add_to(beside(i > 0), fmt::format("residual gradient {}", i), dtype, stream));
    }
    for (int i = 0; i < in_flight.output_gradients; ++i)
        ids.output_gradients.push_back(
            lay_out_output_gradients(layout, fmt::format("output gradients {}", i), sizes));
    ids.results = add("results", DType::fp64, {2});
    ids.norm_partials = add("norm partials", DType::fp32, {spec.norm_blocks});
    return ids;
}

ActivationBuffers<Tensor> bind(const ActivationBuffers<BufferId>& ids, const Arenas& arenas) {
    const auto tensor = [&](BufferId id) { return arenas[id]; };
    ActivationBuffers<Tensor> bound;
    for (const SlotBuffers<BufferId>& slot : ids.slots) {
        SlotBuffers<Tensor>& buffers = bound.slots.emplace_back();
        for (const BufferId id : slot.residual) buffers.residual.push_back(tensor(id));
        for (const auto& block : slot.blocks) buffers.blocks.push_back(block.transform(tensor));
    }
    for (const BufferId id : ids.chunk_inputs) bound.chunk_inputs.push_back(tensor(id));
    for (const TokenBuffers<BufferId>& tokens : ids.tokens)
        bound.tokens.push_back({tensor(tokens.inputs), tensor(tokens.targets)});
    bound.scratch = ids.scratch.transform(tensor);
    if (ids.head) bound.head = ids.head->transform(tensor);
    for (const BufferId id : ids.residual_gradients) bound.residual_gradients.push_back(tensor(id));
    for (const auto& block : ids.output_gradients) bound.output_gradients.push_back(block.transform(tensor));
    bound.results = tensor(ids.results);
    bound.norm_partials = tensor(ids.norm_partials);
    return bound;
}

}  // namespace llmc
