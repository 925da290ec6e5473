// --print-model: the model of a run as text.
#pragma once

#include <string>

#include "llmc/plan/run_plan.h"

namespace llmc {

// Lists the parts, the parameters with this mesh's shards, and the operations. For each operation it gives
// the activations that are kept or recomputed, the FLOPs and the bytes sent, for one sequence. Any size is
// accepted, however large.
std::string model_text(const RunSpec& spec);

}  // namespace llmc
