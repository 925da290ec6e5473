// --print-model: the model of a run as a person reads it.
#pragma once

#include <string>

#include "llmc/plan/run_plan.h"

namespace llmc {

// Parts, parameters with this mesh's shards, operations with what is kept for the backward pass and what is made again,
// floating-point operations and bytes sent; of one sequence. Of sizes that no machine could bear too.
std::string model_text(const RunSpec& spec);

}  // namespace llmc
