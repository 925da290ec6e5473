// Divides the global batch among data-parallel ranks and into micro-batches.
#pragma once

#include <cstdint>

#include "llmc/plan/run_plan.h"

namespace llmc {

// UserError if the mesh cannot divide the global batch evenly.
void check_global_batch(const RunSpec& spec);

// The sequences of a micro-batch: the given number, or one that suits the device. UserError if the given one
// does not divide the rank's sequences.
std::int64_t choose_micro_batch(const RunSpec& spec);

// The largest divisor of `n` that is at most `limit`.
std::int64_t largest_divisor(std::int64_t n, std::int64_t limit);

// The largest micro-batch of at most `limit` sequences. If the batch allows it, the number of micro-batches
// is a multiple of the pipeline stages. With fewer micro-batches than stages some stage is idle, and the
// interleaved schedule requires a multiple.
std::int64_t best_micro_batch(const RunSpec& spec, std::int64_t limit);

// UserError if the schedule is interleaved and the number of micro-batches of this size is not a multiple of
// the number of stages.
void check_groups(const RunSpec& spec, std::int64_t micro_batch);

// The largest number of micro-batches that a step may have. UserError if it has more with
// micro-batches of this size.
std::int64_t most_micro_batches(std::int64_t layers);
std::int64_t most_micro_batches(const RunSpec& spec);
void check_micro_batches(const RunSpec& spec, std::int64_t micro_batch);
// The same limit for a step of `micro_batches`: UserError if there are too many layers.
void check_layers(const RunSpec& spec, std::int64_t micro_batches);

}  // namespace llmc
