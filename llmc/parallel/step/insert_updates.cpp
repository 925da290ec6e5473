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

}  // namespace

std::vector<int> units_by_first_use(const Step& step) {
    std::vector<int> units;
    std::set<int> seen;
    for (const Action& action : step.actions)
        for_each_unit_of(action, [&](int unit) {
            if (seen.insert(unit).second) units.push_back(unit);
        });
    return units;
}

void insert_updates(Step& step, Step updates) {
    std::vector<Action>& before = updates.actions;
    if (step.stages > 1) {
        std::ranges::move(step.actions, std::back_inserter(before));
        step.actions = std::move(before);
        return;
    }
    // By unit: the end of its updates, and of those of the unit after it.
    std::map<int, std::size_t> ends;
    std::vector<int> units;
    for (std::size_t i = 0; i < before.size(); ++i) {
        if (before[i].kind != ActionKind::update && before[i].kind != ActionKind::gather_parameters) continue;
        if (units.empty() || units.back() != before[i].unit) units.push_back(before[i].unit);
        ends[units.back()] = i + 1;
        if (units.size() > 1) ends[units[units.size() - 2]] = i + 1;
    }
    std::vector<Action> actions;
    auto next = before.begin();
    for (Action& action : step.actions) {
        for_each_unit_of(action, [&](int unit) {
            const auto end = before.begin() + static_cast<std::ptrdiff_t>(ends[unit]);
            for (; next < end; ++next) actions.push_back(std::move(*next));
        });
        actions.push_back(std::move(action));
    }
    std::move(next, before.end(), std::back_inserter(actions));
    step.actions = std::move(actions);
}

}  // namespace llmc
