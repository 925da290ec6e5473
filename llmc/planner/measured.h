// A measured step corrects the plans of other runs on the same machines.
#pragma once

#include <string>
#include <vector>

#include "llmc/planner/planned_run.h"

namespace llmc {

// How many times as long as planned a step takes, by --measured of these arguments, which `given` has read: the folder
// of a run, by its options and its median step, or the seconds of a step of these options. UserError if there is no
// such step or no planned time. `text` says it in words.
double measured_ratio(const std::vector<std::string>& arguments, const PlannedRun& given, std::string& text);

}  // namespace llmc
