#include "llmc/parallel/step/insert_updates.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

namespace llmc {

namespace {

template <class F>
void for_each_unit_of(const Action& action, F&& f) {
    for (const auto* uses : {&action.reads, &action.writes}) {
        for (const BufferUse& use : *uses)
            if (belongs_to_unit(use.role)) f(use.unit);
    }
}

// Whether an action brings parameters for their update: from a disk, or to a device that makes it or gathers them. The
// copy of what the host has updated comes after the update.
bool comes_before_update(const Action& action, const Sharding& sharding) {
    return action.kind == ActionKind::read_parameters ||
           (action.kind == ActionKind::upload_parameters && !sharding.updates_what_is_uploaded());
}

}  // namespace

std::vector<int> units_by_first_use(const Step& step) {
    std::vector<int> units;
    std::set<int> seen;
    for (const Action& action : step.actions) {
        if (comes_before_update(action, step.sharding)) continue;
        for_each_unit_of(action, [&](int unit) {
            if (step.part.trains(unit) && seen.insert(unit).second) units.push_back(unit);
        });
    }
    return units;
}

void insert_updates(Step& step, Step updates) {
    std::vector<Action>& before = updates.actions;
    if (step.stages > 1) {
        std::ranges::move(step.actions, std::back_inserter(before));
        step.actions = std::move(before);
        return;
    }
    std::map<int, std::ptrdiff_t> ends;  // by unit: the end of its updates
    std::map<int, int> following;        // the unit after it
    int last = -1;
    for (std::ptrdiff_t i = 0; i < std::ssize(before); ++i) {
        const Action& action = before[static_cast<std::size_t>(i)];
        if (action.kind == ActionKind::read_state || action.kind == ActionKind::write_state) continue;
        if (last >= 0 && last != action.unit) following[last] = action.unit;
        last = action.unit;
        ends[last] = i + 1;
    }
    std::vector<Action> actions;
    const Sharding& sharding = step.sharding;
    // The kind of action that needs the device's buffer of an offloaded unit, and the units for which one came so far.
    const ActionKind fetch =
        sharding.offload.has_own_memory ? ActionKind::upload_parameters : ActionKind::read_parameters;
    std::set<int> fetched;
    auto next = before.begin();
    const auto update = [&](int unit) {
        const auto end = before.begin() + ends[unit];
        for (; next < end; ++next) actions.push_back(std::move(*next));
    };
    // An update by the host comes early enough with the copy of its parameters to the device.
    const auto may_be_ahead = [&](int unit) {
        const bool is_offloaded = are_parameters_offloaded(sharding, unit, step.part);
        if (!sharding.keeps_parameters_whole() || (is_offloaded && sharding.updates_what_is_uploaded()))
            return false;
        return !is_offloaded || fetched.contains(unit);
    };
    for (Action& action : step.actions) {
        if (action.kind == fetch) fetched.insert(action.unit);
        if (!comes_before_update(action, sharding)) {
            for_each_unit_of(action, [&](int unit) {
                if (!ends.contains(unit)) return;
                update(unit);
                const auto found = following.find(unit);
                if (found != following.end() && may_be_ahead(found->second)) update(found->second);
            });
        }
        actions.push_back(std::move(action));
    }
    std::move(next, before.end(), std::back_inserter(actions));
    step.actions = std::move(actions);
}

}  // namespace llmc
