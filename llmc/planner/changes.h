// Options that mend a run which no machine can have.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llmc/planner/planned_run.h"

namespace llmc {

// planned_run(), with a change for each broken rule: options with which the run breaks no rule, or nothing if none are
// known. Where memory lacks on GPUs, they are the fastest that fit.
std::optional<PlannedRun> explained_run(const std::vector<std::string>& arguments, std::string& text);

}  // namespace llmc
