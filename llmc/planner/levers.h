// What fits a planned run's GPUs, and what each option would save and cost.
#pragma once

#include "llmc/planner/planned_run.h"

namespace llmc {

// Of a run that has a plan: the largest micro-batch and the longest context that fit, with as many micro-batches a
// step; and each option alone and in pairs, the ones that cost least time first.
Levers levers_of(const PlannedRun& run);

}  // namespace llmc
