#include "llmc/plan/activation_peak.h"

#include <algorithm>
#include <array>
#include <map>
#include <vector>

namespace llmc {

namespace {

constexpr std::array activation_roles = {
    BufferRole::tokens,     BufferRole::chunk_input,      BufferRole::residual,         BufferRole::saved,
    BufferRole::recomputed, BufferRole::output_gradients, BufferRole::residual_gradient};

bool is_activation(const BufferUse& use) {
    return std::ranges::find(activation_roles, use.role) != activation_roles.end();
}

std::size_t aligned(const PartBuffer& buffer) {
    const std::size_t bytes = static_cast<std::size_t>(buffer.shape.elements()) * size_of(buffer.dtype);
    return (bytes + buffer_alignment - 1) / buffer_alignment * buffer_alignment;
}

class Peak {
  public:
    explicit Peak(const RunPlan& plan) : plan_(plan) {}

    ActivationPeak find() {
        const std::vector<Action>& actions = plan_.training.actions;
        for (std::size_t i = 0; i < actions.size(); ++i) {
            for (const BufferUse& use : actions[i].reads) see(i, use, false);
            for (const BufferUse& use : actions[i].writes) see(i, use, true);
        }
        for (const auto& [place, values] : alive_) end(values);
        // Bytes that come into use at an action, and that are in use no more.
        std::vector<std::size_t> come(actions.size() + 1), go(actions.size() + 1);
        for (const Values& values : all_) {
            come[values.first] += values.bytes;
            go[values.last + 1] += values.bytes;
        }
        ActivationPeak peak{};
        std::size_t in_use = always_in_use();
        for (std::size_t i = 0; i < actions.size(); ++i) {
            in_use += come[i];
            in_use -= go[i];
            if (in_use > peak.bytes) peak = {i, in_use};
        }
        return peak;
    }

  private:
    // What a buffer holds from the action `first` to the action `last`.
    struct Values {
        std::size_t first = 0, last = 0, bytes = 0;
        int micro_batch = -1, chunk = 0, part = -1;
    };

    void see(std::size_t number, const BufferUse& use, bool writes) {
        if (!is_activation(use)) return;
        const Action& action = plan_.training.actions[number];
        Values& values = alive_[place_of(action, use)];
        const int part = use.role == BufferRole::recomputed ? use.unit : -1;
        const bool is_other =
            values.micro_batch != action.micro_batch || values.chunk != action.chunk || values.part != part;
        if (writes && (values.bytes == 0 || is_other)) {
            end(values);
            values = {number, number, bytes_of(action, use), action.micro_batch, action.chunk, part};
        }
        values.last = number;
    }
    void end(const Values& values) {
        if (values.bytes > 0) all_.push_back(values);
    }

    std::size_t bytes_of(const Action& action, const BufferUse& use) const {
        const ActivationBuffers<BufferId>& ids = plan_.activations;
        const auto at = [&](const std::vector<BufferId>& buffers, int index) {
            return bytes(buffers[static_cast<std::size_t>(index)]);
        };
        switch (use.role) {
            case BufferRole::tokens:
                return bytes(ids.tokens.front().inputs) + bytes(ids.tokens.front().targets);
            case BufferRole::chunk_input:
                return at(ids.chunk_inputs, use.index);
            case BufferRole::residual:
                return at(ids.slots[static_cast<std::size_t>(action.slot)].residual, use.index - 1);
            case BufferRole::residual_gradient:
                return at(ids.residual_gradients, use.index);
            case BufferRole::output_gradients: {
                std::size_t sum = 0;
                for (const BufferId id : ids.output_gradients[static_cast<std::size_t>(use.index)])
                    sum += bytes(id);
                return sum;
            }
            default:
                return kept_bytes(action.part, use.role == BufferRole::saved);
        }
    }
    // The buffers that a part keeps from its forward pass, or those that it recomputes.
    std::size_t kept_bytes(int part, bool are_kept) const {
        const PartLists& lists = plan_.lists->of(plan_.outline->part(part));
        const RecomputeKind kind = recompute_of(*plan_.outline, plan_.spec.recompute, part);
        std::size_t sum = 0;
        for (std::size_t i = 0; i < lists.kept.size(); ++i)
            if (lists.is_kept(i, kind) == are_kept) sum += aligned(lists.kept[i]);
        return sum;
    }
    // The bytes of a buffer in the arena.
    std::size_t bytes(BufferId id) const {
        const MemoryLayout::Buffer& buffer = plan_.memory.buffers()[static_cast<std::size_t>(id.index)];
        if (buffer.arena != ArenaKind::activations) return 0;
        const std::size_t size = static_cast<std::size_t>(buffer.shape.elements()) * size_of(buffer.dtype);
        return (size + buffer_alignment - 1) / buffer_alignment * buffer_alignment;
    }
    std::size_t always_in_use() const {
        const ActivationBuffers<BufferId>& ids = plan_.activations;
        std::size_t sum = bytes(ids.results) + bytes(ids.norm_partials);
        for (const auto* buffers : {&ids.scratch, &ids.angles, &ids.losses}) {
            for (const BufferId id : *buffers) sum += bytes(id);
        }
        return sum;
    }

    const RunPlan& plan_;
    std::map<BufferPlace, Values> alive_;
    std::vector<Values> all_;
};

}  // namespace

ActivationPeak activation_peak(const RunPlan& plan) { return Peak(plan).find(); }

}  // namespace llmc
