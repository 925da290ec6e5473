// Adds the gathers of sharded parameters and the recomputes to a list.
#include "llmc/parallel/step/gathers_and_recomputes.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "llmc/parallel/step/unit_actions.h"

namespace llmc {

namespace {

// Whether an action continues the one before: a part's backward pass after its recompute.
bool is_backward_after_recompute(const Action& action, const Action& before) {
    return before.kind == ActionKind::recompute && action.part == before.part &&
           action.micro_batch == before.micro_batch;
}

// Whether both actions are of a chunk that is a single layer, in the same direction. Its parameters stay from one
// micro-batch to the next.
bool is_of_same_layer(const Step& step, const Action& action, const Action& before) {
    const auto is_forward = [](const Action& of) { return of.kind == ActionKind::forward; };
    return action.part >= 0 && before.part >= 0 && action.chunk == before.chunk &&
           is_forward(action) == is_forward(before) && step.chunk_of(action).layers() == 1 &&
           action.micro_batch != before.micro_batch;
}

// The actions that bring units' parameters into a buffer before other actions read them there.
struct Fetch {
    ActionKind kind;
    StreamKind stream;
    BufferRole into;
    Tier tier;  // of the buffer
    int ahead;  // parts of the model
};

// `source` is where a unit's parameters come from. Those of units without a source are always there.
template <class Source>
void insert_fetches(Step& step, const Fetch& fetch, const Source& source) {
    std::map<int, int> held;                     // By buffer: the unit whose parameters it holds.
    std::map<int, std::size_t> free_since;       // By buffer: the first action after its last use.
    std::vector<std::size_t> parts;              // The actions that read parameters.
    std::multimap<std::size_t, Action> fetches;  // By the action before which they are inserted.
    const bool are_released = fetch.into == BufferRole::parameters && fetch.tier == Tier::device;
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        if (action.kind == ActionKind::release) {
            const BufferUse& released = action.writes.front();
            if (!are_released) continue;
            held.erase(released.index);
            free_since[released.index] = i + 1;
            continue;
        }
        bool reads = false;
        for (const BufferUse& use : action.reads) {
            if (use.role != fetch.into || use.tier != fetch.tier) continue;
            reads = true;
            const std::optional<BufferUse> from = source(use.unit);
            if (!from) continue;
            const auto found = held.find(use.index);
            if (found == held.end() || found->second != use.unit) {
                const auto ahead = static_cast<std::size_t>(fetch.ahead);
                const std::size_t earliest = ahead == 0             ? i
                                             : parts.size() < ahead ? 0
                                                                    : parts[parts.size() - ahead];
                fetches.emplace(std::max(earliest, free_since[use.index]), Action{.kind = fetch.kind,
                                                                                  .stream = fetch.stream,
                                                                                  .unit = use.unit,
                                                                                  .reads = {*from},
                                                                                  .writes = {use}});
                held[use.index] = use.unit;
            }
            if (!are_released) free_since[use.index] = i + 1;
        }
        if (!reads) continue;
        const Action* const before = parts.empty() ? nullptr : &step.actions[parts.back()];
        const bool continues = before && (is_backward_after_recompute(action, *before) ||
                                          (action.unit >= 0 && action.unit == before->unit) ||
                                          is_of_same_layer(step, action, *before));
        if (!continues) parts.push_back(i);
    }

    std::vector<Action> actions;
    auto next = fetches.begin();
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        for (; next != fetches.end() && next->first == i; ++next) actions.push_back(std::move(next->second));
        actions.push_back(std::move(step.actions[i]));
    }
    step.actions = std::move(actions);
}

}  // namespace

void insert_gathers(Step& step) {
    const Sharding& sharding = step.sharding;
    const Offload& offload = sharding.offload;
    const StagePart& part = step.part;
    const bool gathers = !sharding.keeps_parameters_whole();
    if (gathers) {
        insert_fetches(
            step,
            {ActionKind::gather_parameters, StreamKind::communication, BufferRole::parameters, Tier::device,
             sharding.gathered_ahead()},
            [&](int unit) {
                return std::optional(UnitActions::parameters_in(Tier::device, sharding, unit, part));
            });
    }
    if (!offload.has_parameters()) return;
    // The fetches below come ahead of these actions, which are ahead themselves.
    int ahead = gathers ? sharding.gathered_ahead() : 0;
    const auto fetch = [&](ActionKind kind, StreamKind stream, Tier from, Tier to, int ahead_of_parts) {
        insert_fetches(step,
                       {kind, stream, gathers ? BufferRole::parameter_shard : BufferRole::parameters, to,
                        ahead_of_parts - ahead},
                       [&](int unit) {
                           return are_parameters_offloaded(sharding, unit, part)
                                      ? std::optional(UnitActions::parameters_in(from, sharding, unit, part))
                                      : std::nullopt;
                       });
        ahead = ahead_of_parts;
    };
    if (offload.has_own_memory)
        fetch(ActionKind::upload_parameters, StreamKind::to_device, Tier::host, Tier::device,
              sharding.uploaded_ahead());
    if (offload.parameters == Tier::disk)
        fetch(ActionKind::read_parameters, StreamKind::disk_in, Tier::disk,
              offload.has_own_memory ? Tier::host : Tier::device, sharding.read_ahead());
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
