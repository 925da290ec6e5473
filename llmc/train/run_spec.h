// What the plan of a run needs to know of its options.
#pragma once

#include "llmc/device/sizes.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/options.h"

namespace llmc {

// The options must be complete.
RunSpec run_spec(const Options& options, const Mesh& mesh, const DeviceSizes& sizes);

}  // namespace llmc
