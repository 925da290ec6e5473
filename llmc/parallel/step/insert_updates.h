// Puts the updates of a step into the list of the next one.
#pragma once

#include <vector>

#include "llmc/parallel/step/step.h"

namespace llmc {

// The units of a list, in the order in which its actions first use their parameters or gradients.
std::vector<int> units_by_first_use(const Step& step);

// Inserts a list of updates, in its order, which is that of units_by_first_use. A unit's update comes one unit
// ahead of the first action that uses the unit, so that what is gathered after it arrives meanwhile; at ZeRO
// stage 3, where gathers come ahead themselves, right before that action. In a pipeline all come first: each
// stage then updates while it would wait for its first input.
void insert_updates(Step& step, Step updates);

}  // namespace llmc
