// Adds the gathers of sharded parameters and the recomputes to a list.
#include "llmc/parallel/step/gathers_and_recomputes.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace llmc {

namespace {

// Whether an action continues the one before: a part's backward pass after its recompute.
bool is_backward_after_recompute(const Action& action, const Action& before) {
    return before.kind == ActionKind::recompute && action.part == before.part &&
           action.micro_batch == before.micro_batch;
}

// Calls f(use) for each unit's whole parameters that an action reads.
template <class F>
void for_each_parameters(const Action& action, F&& f) {
    for (const BufferUse& use : action.reads) {
        if (use.role == BufferRole::parameters) f(use);
    }
}

}  // namespace

void insert_gathers(Step& step) {
    const Sharding& sharding = step.sharding;
    if (sharding.keeps_parameters_whole()) return;

    std::map<int, int> held;                     // By buffer: the unit whose whole parameters it holds.
    std::map<int, std::size_t> free_since;       // By buffer: the first action after its last use.
    std::vector<std::size_t> parts;              // The actions that read parameters.
    std::multimap<std::size_t, Action> gathers;  // By the action before which they are inserted.
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        if (action.kind == ActionKind::release) {
            const BufferUse& released = action.writes.front();
            held.erase(released.index);
            free_since[released.index] = i + 1;
            continue;
        }
        bool reads = false;
        for_each_parameters(action, [&](const BufferUse& use) {
            reads = true;
            if (const auto found = held.find(use.index); found != held.end() && found->second == use.unit)
                return;
            const auto ahead = static_cast<std::size_t>(sharding.prefetch_units);
            const std::size_t earliest = ahead == 0             ? i
                                         : parts.size() < ahead ? 0
                                                                : parts[parts.size() - ahead];
            gathers.emplace(std::max(earliest, free_since[use.index]),
                            Action{.kind = ActionKind::gather_parameters,
                                   .stream = StreamKind::communication,
                                   .unit = use.unit,
                                   .reads = {{BufferRole::parameter_shard, use.unit, use.unit}},
                                   .writes = {use}});
            held[use.index] = use.unit;
        });
        if (reads && (parts.empty() || !is_backward_after_recompute(action, step.actions[parts.back()])))
            parts.push_back(i);
    }

    std::vector<Action> actions;
    auto next = gathers.begin();
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        for (; next != gathers.end() && next->first == i; ++next) actions.push_back(std::move(next->second));
        actions.push_back(std::move(step.actions[i]));
    }
    step.actions = std::move(actions);
}

namespace {

const BufferUse* recomputed_among(const std::vector<BufferUse>& uses) {
    const auto found = std::ranges::find(uses, BufferRole::recomputed, &BufferUse::role);
    return found == uses.end() ? nullptr : &*found;
}

// The recompute for `reader`, a part's backward pass.
Action recompute_for(const Action& reader, RecomputeKind kind) {
    Action action{.kind = ActionKind::recompute,
                  .part = reader.part,
                  .micro_batch = reader.micro_batch,
                  .chunk = reader.chunk,
                  .slot = reader.slot};
    for (const BufferUse& use : reader.reads) {
        const bool parameters = use.role == BufferRole::parameters;
        const bool input = use.role == BufferRole::residual || use.role == BufferRole::chunk_input;
        if (parameters || input || use.role == BufferRole::saved) action.reads.push_back(use);
        // The mean and rstd of layernorms are written again, with the same values.
        const bool statistics = use.role == BufferRole::saved && kind == RecomputeKind::selective;
        if (statistics || use.role == BufferRole::recomputed) action.writes.push_back(use);
    }
    return action;
}

}  // namespace

void insert_recomputes(Step& step) {
    std::vector<Action> actions;
    // by index: the part and micro-batch whose activations are there
    std::map<int, std::pair<int, int>> there;
    for (Action& action : step.actions) {
        if (const BufferUse* use = recomputed_among(action.writes))
            there[use->index] = {use->unit, action.micro_batch};
        if (const BufferUse* use = recomputed_among(action.reads)) {
            const std::pair needed = {use->unit, action.micro_batch};
            const auto found = there.find(use->index);
            if (found == there.end() || found->second != needed)
                actions.push_back(recompute_for(action, step.recompute.kind));
            there[use->index] = needed;
        }
        actions.push_back(std::move(action));
    }
    step.actions = std::move(actions);
}

}  // namespace llmc
