// Looks at a list of actions, and changes it, for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "llmc/parallel/step/step.h"

namespace llmc {

inline std::int64_t count(const Step& step, ActionKind kind) {
    return std::ranges::count_if(step.actions, [&](const Action& action) { return action.kind == kind; });
}

inline std::size_t find(const Step& step, const std::function<bool(const Action&)>& wanted) {
    const auto found = std::ranges::find_if(step.actions, wanted);
    EXPECT_NE(found, step.actions.end());
    return static_cast<std::size_t>(found - step.actions.begin());
}

inline void erase_first(std::vector<Action>& actions, ActionKind kind) {
    actions.erase(std::ranges::find_if(actions, [&](const Action& action) { return action.kind == kind; }));
}

}  // namespace llmc
