// What is shown of a run that is only planned (Options::plans_only): the actions of its steps, or the timeline of its
// pipeline. What a run says of itself is report.h.
#pragma once

#include <cstddef>

#include "llmc/device/device.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/console.h"
#include "llmc/train/options.h"

namespace llmc {

// --print-step: the list of every stage's first rank. --pipeline-timeline: the chart, and its files where results go.
// `staging` as plan_run takes it. One process calls it. UserError if a file cannot be written.
void show_plan(const Options& options, const RunPlan& plan, Device& device, std::size_t staging,
               Console& console);

}  // namespace llmc
