// When most of the activations arena is in use.
#pragma once

#include <cstddef>

#include "llmc/plan/run_plan.h"

namespace llmc {

struct ActivationPeak {
    std::size_t action = 0;  // the first action of plan.training at which most bytes are in use
    std::size_t bytes = 0;   // of plan.memory.bytes(ArenaKind::activations)
};

// A buffer is in use from the action that first writes its values to the last one that reads them. What every action
// may use, such as the scratch memory of operations, is always in use.
ActivationPeak activation_peak(const RunPlan& plan);

}  // namespace llmc
