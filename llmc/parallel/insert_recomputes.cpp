#include "llmc/parallel/insert_recomputes.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace llmc {

namespace {

const BufferUse* recomputed_among(const std::vector<BufferUse>& uses) {
    const auto found = std::ranges::find(uses, BufferRole::recomputed, &BufferUse::role);
    return found == uses.end() ? nullptr : &*found;
}

// What reads them: a part's backward.
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
        // The layernorms' mean and rstd are written again, as they are.
        const bool statistics = use.role == BufferRole::saved && kind == RecomputeKind::selective;
        if (statistics || use.role == BufferRole::recomputed) action.writes.push_back(use);
    }
    return action;
}

}  // namespace

void insert_recomputes(Step& step) {
    std::vector<Action> actions;
    std::map<int, std::pair<int, int>> there;  // by index, whose they are now: the part and the micro-batch
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
