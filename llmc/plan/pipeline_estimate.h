// Estimates the duration of a pipeline's passes before the run, from the floating-point operations of their
// products. For measured times see timeline/measured_passes.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llmc/parallel/pipeline/pipeline_simulation.h"
#include "llmc/plan/run_plan.h"

namespace llmc {

// The estimated times of each chunk of the model, for one micro-batch; communication takes no time. `peak` is
// the device's nominal floating-point operations per second, and times are in seconds. Without it, the unit
// is one forward pass of a block.
//
// Operations are counted as in model.h: a backward pass takes twice the operations of its forward pass, half
// of them for weight gradients. Block recompute adds one forward pass. The forward pass of the loss runs in
// the backward pass of its chunk. Three parts do not split their backward pass: the loss, the part before the
// first layer, and layers that recompute.
std::vector<PassTimes> estimated_times(const RunPlan& plan, std::optional<double> peak);

// Whether the chunk's backward passes run in two halves: the schedule splits them, and the second half is not
// empty.
bool splits_backward(const RunPlan& plan, int chunk);
// The schedule as it is performed: "1f1b", for example. A schedule that splits no backward pass, because all
// blocks recompute, gives "zb-h1 (all blocks recompute: in the order of 1f1b)".
std::string schedule_name(const RunPlan& plan);
// The timeline with the backward passes that the plan really splits (without_empty_halves).
Timeline as_performed(const RunPlan& plan, const Timeline& timeline);

// The timeline of a step with the estimated times.
Timeline estimated_timeline(const RunPlan& plan, std::optional<double> peak);

}  // namespace llmc
