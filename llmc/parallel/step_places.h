// Which memory an action's buffers are, for what follows a list from action to action.
#pragma once

#include <compare>
#include <vector>

#include "llmc/parallel/step.h"

namespace llmc {

bool belongs_to_unit(BufferRole role);
bool belongs_to_micro_batch(BufferRole role);
// Whether each micro-batch in flight has buffers of its own.
bool lies_in_slot(BufferRole role);

// Two uses are of the same memory where these are equal.
struct Place {
    BufferRole role;
    int index;
    int slot;  // of a micro-batch's buffers
    auto operator<=>(const Place&) const = default;
};
inline Place place_of(const Action& action, const BufferUse& use) {
    return {use.role, use.index, lies_in_slot(use.role) ? action.slot : 0};
}

// For each action, the last earlier one of each other stream that it must wait for.
std::vector<std::vector<int>> dependencies(const Step& step);

}  // namespace llmc
