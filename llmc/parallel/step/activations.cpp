// Adds a rank's activation buffers to the memory layout, as many of each kind as its lists use at once.
#include "llmc/parallel/step/activations.h"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace llmc {

namespace {

class LayOut {
  public:
    LayOut(MemoryLayout& layout, const ActivationSpec& spec)
        : layout_(layout),
          spec_(spec),
          outline_(*spec.part.outline),
          sizes_(spec.lists->kinds.front().sizes),
          has_stages_(!spec.part.takes_tokens() || !spec.part.makes_losses()) {}

    ActivationBuffers<BufferId> run() {
        const BuffersInFlight& in_flight = spec_.in_flight;
        const auto widths = static_cast<int>(outline_.widths.size());
        const Shape all_tokens = {sizes_.batch, outline_.kinds.front().part.tokens};
        ActivationBuffers<BufferId> ids;
        for (int slot = 0; slot < in_flight.slots; ++slot)
            ids.slots.push_back(slot_of(slot, in_flight.first_part(slot)));
        // Buffers that hold data only while it is received or sent belong to the pipeline arena.
        const auto arena_if_transfer = [this](bool is_transfer) {
            return is_transfer && has_stages_ ? ArenaKind::pipeline : ArenaKind::activations;
        };
        for (int i = 0; i < in_flight.chunk_inputs; ++i) {
            ids.chunk_inputs.push_back(add(arena_if_transfer(i >= in_flight.slots * widths),
                                           fmt::format("input {}", i), sizes_.dtype, stream(i % widths)));
        }
        for (int i = 0; i <= in_flight.tokens; ++i) {
            ids.tokens.push_back({add(fmt::format("inputs {}", i), DType::int32, all_tokens),
                                  add(fmt::format("targets {}", i), DType::int32, all_tokens)});
        }
        for (const Scratch::Buffer& buffer : spec_.lists->scratch.buffers)
            ids.scratch.push_back(add(fmt::format("scratch.{}", buffer.width), buffer.dtype, buffer.shape));
        for (const RopeAngles& angles : spec_.lists->scratch.angles)
            ids.angles.push_back(add("angles", DType::fp32, {angles.positions, angles.head_size / 2, 2}));
        if (spec_.part.makes_losses()) {
            for (const PartBuffer& buffer : spec_.lists->of(outline_.parts.back()).kept)
                ids.losses.push_back(add(fmt::format("losses.{}", buffer.name), buffer.dtype, buffer.shape));
        }
        for (int i = 0; i < in_flight.residual_gradients; ++i) {
            ids.residual_gradients.push_back(add(arena_if_transfer(i >= widths),
                                                 fmt::format("residual gradient {}", i), sizes_.dtype,
                                                 stream(i % widths)));
        }
        for (int i = 0; i < in_flight.output_gradients; ++i)
            ids.output_gradients.push_back(output_gradients(i));
        ids.results = add("results", DType::fp64, {2});
        ids.norm_partials = add("norm partials", DType::fp32, {spec_.norm_blocks});
        const bool is_delayed = sizes_.fp8 == Fp8Scaling::delayed;
        ids.amax = add("amax", DType::fp32, {2, is_delayed ? first_amax(outline_).back() : 0});
        return ids;
    }

  private:
    BufferId add(ArenaKind arena, const std::string& name, DType type, const Shape& shape) {
        return layout_.add(arena, name, type, shape);
    }
    BufferId add(const std::string& name, DType type, const Shape& shape) {
        return add(ArenaKind::activations, name, type, shape);
    }
    Shape stream(int width) const {
        return {sizes_.batch, sizes_.split.tokens(outline_.kinds.front().part.tokens),
                outline_.widths[static_cast<std::size_t>(width)]};
    }

    SlotBuffers<BufferId> slot_of(int slot, int first_part) {
        SlotBuffers<BufferId> buffers;
        const std::string prefix = fmt::format("slot {}: ", slot);
        const bool takes_tokens = spec_.part.takes_tokens();
        buffers.kept.push_back(takes_tokens ? kept(prefix, outline_.parts.front(), RecomputeKind::none)
                                            : std::vector<BufferId>());
        for (int place = 0; place < spec_.part.most_places_of_a_chunk(); ++place) {
            const Outline::OutlinedPart& part = outline_.part_with_output(first_part + place);
            if (has_stages_ || spec_.in_flight.holds_output(slot, place))
                buffers.residual.push_back(add(fmt::format("{}residual {}", prefix, place), sizes_.dtype,
                                               stream(part.output_width)));
            buffers.kept.push_back(kept(fmt::format("{}{}.", prefix, place), part,
                                        recompute_of(outline_, spec_.recompute, first_part + place)));
        }
        return buffers;
    }

    // Lays out what a part keeps. Memory shared by recomputing parts of a kind is laid out once.
    std::vector<BufferId> kept(const std::string& prefix, const Outline::OutlinedPart& part,
                               RecomputeKind recompute) {
        const PartLists& lists = spec_.lists->of(part);
        std::vector<BufferId>& shared = recomputed_[part.kind];
        if (recompute != RecomputeKind::none && shared.empty()) {
            for (std::size_t i = 0; i < lists.kept.size(); ++i) {
                const PartBuffer& buffer = lists.kept[i];
                shared.push_back(lists.is_kept(i, recompute)
                                     ? BufferId{}
                                     : add("recomputed." + buffer.name, buffer.dtype, buffer.shape));
            }
        }
        std::vector<BufferId> ids;
        for (std::size_t i = 0; i < lists.kept.size(); ++i) {
            const PartBuffer& buffer = lists.kept[i];
            ids.push_back(lists.is_kept(i, recompute) ? add(prefix + buffer.name, buffer.dtype, buffer.shape)
                                                      : shared[i]);
        }
        return ids;
    }

    std::vector<BufferId> output_gradients(int index) {
        const auto kind =
            std::ranges::find(outline_.kinds, index % outline_.split_kinds, &Outline::Kind::split_number);
        std::vector<BufferId> ids;
        for (const PartBuffer& buffer :
             spec_.lists->kinds[static_cast<std::size_t>(kind - outline_.kinds.begin())].kept_gradients)
            ids.push_back(
                add(fmt::format("output gradients {}: {}", index, buffer.name), buffer.dtype, buffer.shape));
        return ids;
    }

    MemoryLayout& layout_;
    const ActivationSpec& spec_;
    const Outline& outline_;
    const PartSizes& sizes_;
    bool has_stages_;
    std::map<int, std::vector<BufferId>> recomputed_;  // by kind of part
};

}  // namespace

ActivationBuffers<BufferId> lay_out_activations(MemoryLayout& layout, const ActivationSpec& spec) {
    return LayOut(layout, spec).run();
}

ActivationBuffers<Tensor> bind(const ActivationBuffers<BufferId>& ids, const Arenas& arenas) {
    const auto tensor = [&](BufferId id) { return arenas[id]; };
    const auto all = [&](const std::vector<BufferId>& buffers) {
        std::vector<Tensor> tensors;
        for (const BufferId id : buffers) tensors.push_back(tensor(id));
        return tensors;
    };
    ActivationBuffers<Tensor> bound;
    for (const SlotBuffers<BufferId>& slot : ids.slots) {
        SlotBuffers<Tensor>& buffers = bound.slots.emplace_back();
        buffers.residual = all(slot.residual);
        for (const auto& kept : slot.kept) buffers.kept.push_back(all(kept));
    }
    bound.chunk_inputs = all(ids.chunk_inputs);
    for (const TokenBuffers<BufferId>& tokens : ids.tokens)
        bound.tokens.push_back({tensor(tokens.inputs), tensor(tokens.targets)});
    bound.scratch = all(ids.scratch);
    bound.angles = all(ids.angles);
    bound.losses = all(ids.losses);
    bound.residual_gradients = all(ids.residual_gradients);
    for (const auto& kept : ids.output_gradients) bound.output_gradients.push_back(all(kept));
    bound.results = tensor(ids.results);
    bound.norm_partials = tensor(ids.norm_partials);
    bound.amax = tensor(ids.amax);
    return bound;
}

}  // namespace llmc
