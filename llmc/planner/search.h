// Finds the fastest run of a model: over tensor-parallel ranks, pipeline stages and their schedule, stages of ZeRO,
// recomputation and micro-batches, and over GPUs and their number where these are open. Given options stay fixed.
#pragma once

#include <string>
#include <vector>

#include "llmc/planner/planned_run.h"

namespace llmc {

// Searches what the command line with --search leaves open, and plans the fastest run; where the number of GPUs is
// open, that with the fewest that fit, or that end the run in --days. UserError if there is nothing to compare.
PlannedRun searched_run(const std::vector<std::string>& arguments);

}  // namespace llmc
