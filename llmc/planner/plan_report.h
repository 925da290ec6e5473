// A planned run as text for people, and as JSON (docs/interface.md).
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "llmc/planner/planned_run.h"
#include "llmc/train/console.h"

namespace llmc {

void show(Console& console, const PlannedRun& run);
nlohmann::ordered_json to_json(const PlannedRun& run);

}  // namespace llmc
