#include "llmc/parallel/step.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "llmc/parallel/step_places.h"

namespace llmc {

namespace {

// The last actions of each stream that wrote and used a buffer, by their place in the list.
struct LastUses {
    std::array<int, 2> write = {-1, -1};
    std::array<int, 2> use = {-1, -1};
};

}  // namespace

std::vector<int> dependencies(const Step& step) {
    std::map<Place, LastUses> buffers;
    std::vector<int> after;
    for (int i = 0; i < std::ssize(step.actions); ++i) {
        const Action& action = step.actions[static_cast<std::size_t>(i)];
        const auto own = static_cast<std::size_t>(action.stream), other = 1 - own;
        const auto last_uses = [&](const BufferUse& use) -> LastUses& {
            return buffers[place_of(action, use)];
        };
        int last = -1;
        for (const BufferUse& use : action.reads) last = std::max(last, last_uses(use).write[other]);
        for (const BufferUse& use : action.writes) last = std::max(last, last_uses(use).use[other]);
        for (const BufferUse& use : action.reads) last_uses(use).use[own] = i;
        for (const BufferUse& use : action.writes) last_uses(use).use[own] = last_uses(use).write[own] = i;
        after.push_back(last);
    }
    return after;
}

void order_streams(Step& step) {
    const std::vector<int> after = dependencies(step);
    for (std::size_t i = 0; i < after.size(); ++i) step.actions[i].after = after[i];
}

int slots_in_flight(const Step& step) {
    // A micro-batch lives from its load to the last action that names it.
    std::map<int, std::size_t> last;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        if (step.actions[i].micro_batch >= 0) last[step.actions[i].micro_batch] = i;
    }
    int alive = 0, most = 0;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        if (action.micro_batch < 0) continue;
        if (action.kind == ActionKind::load) most = std::max(most, ++alive);
        if (last[action.micro_batch] == i) --alive;
    }
    return most;
}

BytesSent bytes_sent(const Step& step, std::span<const UnitBytes> units) {
    const auto shards = static_cast<std::uint64_t>(step.sharding.shards);
    const auto replicas = static_cast<std::uint64_t>(step.sharding.replicas);
    BytesSent sent;
    for (const Action& action : step.actions) {
        if (action.unit < 0) continue;
        const UnitBytes& unit = units[static_cast<std::size_t>(action.unit)];
        switch (action.kind) {
            case ActionKind::reduce_scatter:
            case ActionKind::gather_gradients:
                sent.inside += unit.gradients / shards * (shards - 1);
                break;
            case ActionKind::gather_parameters:
                sent.inside += unit.parameters / shards * (shards - 1);
                break;
            case ActionKind::all_reduce:
                sent.across += 2 * (unit.gradients / shards / replicas) * (replicas - 1);
                break;
            default:
                break;
        }
    }
    return sent;
}

bool communicates(const Step& step) {
    return std::ranges::any_of(
        step.actions, [](const Action& action) { return action.stream == StreamKind::communication; });
}

}  // namespace llmc
