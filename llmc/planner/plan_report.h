// A planned run as text for people, and as JSON (docs/interface.md).
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "llmc/planner/planned_run.h"
#include "llmc/train/console.h"

namespace llmc {

void show(Console& console, const PlannedRun& run);
nlohmann::ordered_json to_json(const PlannedRun& run);  // plan_json.cpp

// An action of a plan's list: "backward of layer 3, micro-batch 0".
std::string action_text(const RunPlan& plan, std::size_t number);

}  // namespace llmc
