// How the global batch is divided: among data-parallel ranks, and in micro-batches.
#pragma once

#include <cstdint>

#include "llmc/plan/run_plan.h"

namespace llmc {

// UserError for a global batch that the mesh cannot share evenly.
void check_global_batch(const RunSpec& spec);

// Sequences of a micro-batch, as they were given, or as many as suit the device. UserError for what does not divide.
std::int64_t choose_micro_batch(const RunSpec& spec);

// The largest divisor of `n` that is at most `limit`.
std::int64_t largest_divisor(std::int64_t n, std::int64_t limit);

// The largest micro-batch of at most so many sequences. In a pipeline, where the batch allows it, one that makes micro-batches
// in groups of as many as there are stages: with fewer some stage has nothing to do, and interleaved takes no others.
std::int64_t best_micro_batch(const RunSpec& spec, std::int64_t limit);

// UserError where micro-batches of so many sequences are not the groups that interleaved stages take.
void check_groups(const RunSpec& spec, std::int64_t micro_batch);

// Micro-batches that a step may have; UserError if a plan has more.
std::int64_t most_micro_batches(const RunSpec& spec);
void check_micro_batches(const RunPlan& plan);

}  // namespace llmc
