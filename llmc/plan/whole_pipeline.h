// The stages of a pipeline share the checked sizes of a run, its parts and its micro-batches. The plan and the
// needs of each stage (run_plan.cpp) are made from these.
#pragma once

#include <cstdint>

#include "llmc/parallel/step/build_step.h"
#include "llmc/plan/run_plan.h"

namespace llmc {

// Throws UserError if the mesh does not fit the model.
void check_sizes_of(const RunSpec& spec);
// The sequences in a micro-batch; throws UserError if the batch cannot be divided into micro-batches.
std::int64_t micro_batch_of(const RunSpec& spec);

// The plan without the parts that differ between stages.
RunPlan plan_of_whole_pipeline(const RunSpec& spec, std::int64_t micro_batch);

// The training step of one stage.
StepSpec step_spec(const RunPlan& plan, int stage);

}  // namespace llmc
