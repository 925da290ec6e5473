// How long the passes of a run's pipeline take, as far as can be said before it: from the floating-point operations of
// their products. What is measured in a run is in train/measured_passes.h.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "llmc/parallel/pipeline_simulation.h"
#include "llmc/plan/run_plan.h"

namespace llmc {

// Of each chunk of the model, for a micro-batch; communication takes no time. In seconds at `peak`, the floating-point
// operations a second of the device that it promises; without it in forward passes of a block.
//
// Operations are those of model.h: a backward pass takes twice its forward, of which the products once make the gradients of
// weights; block recompute adds a forward. The losses' forward runs in the backward pass of its chunk, which is not split for
// the losses, what comes before the first layer and layers that recompute.
std::vector<PassTimes> estimated_times(const RunPlan& plan, std::optional<double> peak);

// Whether the backward passes of a chunk come in two parts: the schedule splits them, and something is left for the second.
bool splits_backward(const RunPlan& plan, int chunk);
// The schedule as it is performed: "1f1b", or of one that splits no backward pass, since all blocks recompute,
// "zb-h1 (all blocks recompute: in the order of 1f1b)".
std::string schedule_name(const RunPlan& plan);
// A timeline of the plan's pipeline, without parts in which nothing is done.
Timeline as_performed(const RunPlan& plan, const Timeline& timeline);

// The step's passes with these times.
Timeline estimated_timeline(const RunPlan& plan, std::optional<double> peak);

}  // namespace llmc
