// What a run may change so that it fits the machine's memory: the size of its micro-batches, which is chosen here where nobody
// gave one, and else the options that a message names.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "llmc/plan/run_plan.h"

namespace llmc {

// The plan of a run with micro-batches of so many sequences, whatever memory that takes.
using MakePlan = std::function<RunPlan(const RunSpec& spec, std::int64_t micro_batch)>;

// With the largest micro-batches, of at most so many sequences, that fit the memory; with the smallest if none do.
RunPlan plan_that_fits(const RunSpec& spec, const MakePlan& make_plan, std::int64_t micro_batch);

// The options with which the run would fit, the one that costs least first: recompute, then ZeRO, then both; gradients in
// bf16; and more GPUs. Empty where none would do.
std::string what_would_fit(const RunSpec& spec, const MakePlan& make_plan, std::int64_t micro_batch);

}  // namespace llmc
