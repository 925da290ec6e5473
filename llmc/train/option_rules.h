// What the options of a run say together: what one that was not given follows from, and what is out of range.
#pragma once

#include "llmc/train/options.h"

namespace llmc {

// The values of settings that were not given, but for those that wait for the device and the plan.
void resolve(Options& options);
// UserError for a value that is out of its range, or does not go with another. Of resolved options.
void check_ranges(const Options& options);

}  // namespace llmc
