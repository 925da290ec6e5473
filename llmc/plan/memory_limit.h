// Whether a run fits the machine's memory, and what a person is told if it does not.
#pragma once

#include <cstddef>
#include <string>

#include "llmc/plan/run_plan.h"

namespace llmc {

// Whether all processes on a machine may take so many bytes each.
bool fits(const MachineMemory& machine, std::size_t bytes);

// Sizes that no machine could bear are refused by an estimate: they cannot even be planned.
void require_possible(const RunSpec& spec);

// `smaller`: with the largest micro-batch that would fit, or the smallest there is. `other`: options with which a run would
// fit that does not with any micro-batch; empty if there are none.
[[noreturn]] void refuse_memory(const RunPlan& plan, const RunPlan& smaller, const std::string& other);

}  // namespace llmc
