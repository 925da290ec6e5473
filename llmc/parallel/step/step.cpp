// Derives facts from a step's list: which actions wait for which, the buffers in flight, the bytes sent.
#include "llmc/parallel/step/step.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

namespace llmc {

bool belongs_to_unit(BufferRole role) {
    switch (role) {
        case BufferRole::parameters:
        case BufferRole::parameter_shard:
        case BufferRole::gradients:
        case BufferRole::gradient_shard:
        case BufferRole::gradient_sums:
        case BufferRole::optimizer:
        case BufferRole::directions:
            return true;
        default:
            return false;
    }
}

bool belongs_to_micro_batch(BufferRole role) {
    return lies_in_slot(role) || role == BufferRole::tokens || role == BufferRole::chunk_input ||
           role == BufferRole::residual_gradient || role == BufferRole::output_gradients ||
           role == BufferRole::rows || role == BufferRole::logits;
}

bool lies_in_slot(BufferRole role) { return role == BufferRole::residual || role == BufferRole::saved; }

namespace {

// For one buffer: the position in the list of each stream's last action that wrote it, and that used it.
struct LastUses {
    LastUses() {
        write.fill(-1);
        use.fill(-1);
    }
    std::array<int, all_streams.size()> write, use;
};

}  // namespace

std::vector<std::vector<int>> dependencies(const Step& step) {
    std::vector<std::vector<int>> after(step.actions.size());
    if (!has_streams(step)) return after;  // a single stream never waits
    std::map<BufferPlace, LastUses> buffers;
    std::vector<LastUses*> read, written;
    for (int i = 0; i < std::ssize(step.actions); ++i) {
        const Action& action = step.actions[static_cast<std::size_t>(i)];
        const auto own = static_cast<std::size_t>(action.stream);
        const auto find_all = [&](std::vector<LastUses*>& found, const std::vector<BufferUse>& uses) {
            found.clear();
            for (const BufferUse& use : uses) found.push_back(&buffers[place_of(action, use)]);
        };
        find_all(read, action.reads);
        find_all(written, action.writes);
        for (std::size_t other = 0; other < all_streams.size(); ++other) {
            if (other == own) continue;
            int last = -1;
            for (const LastUses* buffer : read) last = std::max(last, buffer->write[other]);
            for (const LastUses* buffer : written) last = std::max(last, buffer->use[other]);
            if (last >= 0) after[static_cast<std::size_t>(i)].push_back(last);
        }
        for (LastUses* buffer : read) buffer->use[own] = i;
        for (LastUses* buffer : written) buffer->use[own] = buffer->write[own] = i;
    }
    return after;
}

void order_streams(Step& step) {
    std::vector<std::vector<int>> after = dependencies(step);
    for (std::size_t i = 0; i < after.size(); ++i) step.actions[i].after = std::move(after[i]);
}

BuffersInFlight buffers_in_flight(const Step& step) {
    BuffersInFlight count;
    const auto at_least = [](int& number, int index) { number = std::max(number, index + 1); };
    std::map<int, int> first_parts;   // the first part with an input, by slot
    std::map<int, std::size_t> last;  // the last action that needs the tokens of a micro-batch
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        at_least(count.slots, action.slot);
        const auto slot = static_cast<std::size_t>(action.slot);
        if (slot >= count.residuals.size()) count.residuals.resize(slot + 1);
        if (action.kind == ActionKind::backward || action.kind == ActionKind::backward_input)
            first_parts[action.slot] = step.chunk_of(action).first_with_input();
        for (const auto* uses : {&action.reads, &action.writes}) {
            for (const BufferUse& use : *uses) {
                if (use.role == BufferRole::residual) at_least(count.residuals[slot], use.index - 1);
                if (use.role == BufferRole::chunk_input) at_least(count.chunk_inputs, use.index);
                if (use.role == BufferRole::residual_gradient || use.role == BufferRole::rows)
                    at_least(count.residual_gradients, use.index);
                if (use.role == BufferRole::output_gradients) at_least(count.output_gradients, use.index);
                if (use.role == BufferRole::tokens) last[action.micro_batch] = i;
            }
        }
    }
    for (const auto& [slot, part] : first_parts) count.first_parts.push_back(part);
    int alive = 0;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        if (action.kind == ActionKind::load) count.tokens = std::max(count.tokens, ++alive);
        if (const auto found = last.find(action.micro_batch); found != last.end() && found->second == i)
            --alive;
    }
    return count;
}

bool has_streams(const Step& step) {
    return std::ranges::any_of(step.actions,
                               [](const Action& action) { return action.stream != StreamKind::compute; });
}

bool communicates(const Step& step) {
    return std::ranges::any_of(step.actions, [](const Action& action) {
        return action.stream != StreamKind::compute && action.stream < StreamKind::copy;
    });
}

bool is_on_disk(const Action& action) {
    return action.stream == StreamKind::disk_in || action.stream == StreamKind::disk_out;
}

bool is_begun_only(const Action& action) { return is_between_stages(action.kind) || is_on_disk(action); }

bool moves_parameters(ActionKind kind) {
    return kind == ActionKind::read_parameters || kind == ActionKind::write_parameters ||
           kind == ActionKind::upload_parameters || kind == ActionKind::download_parameters;
}

bool is_between_stages(ActionKind kind) {
    return kind == ActionKind::receive_activation || kind == ActionKind::send_activation ||
           kind == ActionKind::receive_gradient || kind == ActionKind::send_gradient;
}

namespace {

// The list of operations that a part's action runs.
const List& list_of(const PartLists& lists, ActionKind kind, RecomputeKind recompute) {
    switch (kind) {
        case ActionKind::forward:
            return lists.forward;
        case ActionKind::recompute:
            return lists.recompute_of(recompute);
        case ActionKind::backward:
            return lists.backward;
        case ActionKind::backward_input:
            return lists.backward_input;
        default:
            return lists.backward_weight;
    }
}

bool computes(ActionKind kind) {
    return kind == ActionKind::forward || kind == ActionKind::recompute || kind == ActionKind::backward ||
           kind == ActionKind::backward_input || kind == ActionKind::backward_weight;
}

}  // namespace

BytesSent bytes_sent(const Step& step, std::span<const UnitBytes> units, const ModelLists& lists) {
    const auto shards = static_cast<std::uint64_t>(step.sharding.shards);
    const auto tensor = static_cast<std::uint64_t>(step.tensor.ranks);
    const Outline& outline = *step.part.outline;
    const PartSizes& sizes = lists.kinds.front().sizes;
    const std::int64_t T = outline.kinds.front().part.tokens;
    const auto stream = [&](int width) {
        return static_cast<std::uint64_t>(sizes.batch * sizes.split.tokens(T) *
                                          outline.widths[static_cast<std::size_t>(width)]) *
               size_of(sizes.dtype);
    };
    BytesSent sent;
    for (const Action& action : step.actions) {
        if (action.kind == ActionKind::send_activation)
            sent.stages += stream(outline.part(step.chunk_of(action).end_part - 1).output_width);
        if (action.kind == ActionKind::send_gradient)
            sent.stages += stream(outline.part(step.chunk_of(action).first_part).input_width);
        if (computes(action.kind))
            sent.tensor +=
                bytes_sent(list_of(lists.of(outline.part(action.part)), action.kind, step.recompute.kind));
        if (action.unit < 0) continue;
        const UnitBytes& unit = units[static_cast<std::size_t>(action.unit)];
        switch (action.kind) {
            case ActionKind::reduce_scatter:
            case ActionKind::gather_gradients:
                sent.inside += bytes_inside(unit.gradients, step.sharding);
                break;
            case ActionKind::gather_parameters:
                sent.inside += bytes_inside(unit.parameters, step.sharding);
                break;
            case ActionKind::gather_directions:
                if (!step.sharding.keeps_optimizer_whole())
                    sent.inside += bytes_inside(unit.directions, step.sharding);
                sent.tensor += (tensor - 1) * unit.directions;
                break;
            case ActionKind::all_reduce:
                sent.across += bytes_across(unit.gradients, step.sharding);
                break;
            case ActionKind::sum_replicated:
                sent.tensor += all_reduce_bytes(unit.replicated_gradients, unit.gradient_size, tensor);
                break;
            case ActionKind::sum_tied:
                sent.tied += all_reduce_bytes(unit.gradients / shards, unit.gradient_size,
                                              static_cast<std::uint64_t>(step.part.unit(action.unit).stages));
                break;
            default:
                break;
        }
    }
    return sent;
}

}  // namespace llmc
