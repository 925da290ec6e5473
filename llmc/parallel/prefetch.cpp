#include "llmc/parallel/prefetch.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace llmc {

namespace {

// A block's backward after its recompute is the same part of the model once more.
bool goes_on_with(const Action& action, const Action& before) {
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

    std::map<int, int> held;                     // by place: the unit whose parameters are whole there
    std::map<int, std::size_t> free_since;       // by place: the first action after the last that used it
    std::vector<std::size_t> parts;              // the actions that read parameters
    std::multimap<std::size_t, Action> gathers;  // by the action that they stand before
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
        if (reads && (parts.empty() || !goes_on_with(action, step.actions[parts.back()]))) parts.push_back(i);
    }

    std::vector<Action> actions;
    auto next = gathers.begin();
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        for (; next != gathers.end() && next->first == i; ++next) actions.push_back(std::move(next->second));
        actions.push_back(std::move(step.actions[i]));
    }
    step.actions = std::move(actions);
}

}  // namespace llmc
