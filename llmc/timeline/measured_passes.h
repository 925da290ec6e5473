// Derives the times of a pipeline's passes from the times of a step's actions (step_streams.h), and from them
// the input of pipeline_simulation.h. step_streams.h measures the times, and pipeline_watch.h collects those
// of all stages.
#pragma once

#include <span>
#include <vector>

#include "llmc/parallel/pipeline/pipeline_simulation.h"
#include "llmc/parallel/step/step.h"
#include "llmc/parallel/step/step_streams.h"

namespace llmc {

// The times of a pass, in seconds of one clock; 0 if not measured. All members are doubles, so that an
// all-reduce can combine the stages' values.
struct MeasuredPass {
    double begin = 0, end = 0;
    // For its input from another stage: when it could be received, and when it had arrived.
    double awaited = 0, arrived = 0;
    double prepared = 0;  // seconds of its work that were done before its input had arrived
};

// The passes of a stage's training step, each at PipelineSpec::index_of; those of other stages stay 0.
//
// A pass is all work of the compute stream for one chunk and micro-batch. This includes recomputing, zeroing
// and rounding gradients, and waiting for parameters. Work that is done before the input has arrived counts
// as if it ended when the input arrived. So waiting for another stage is not part of a pass, as in the
// simulation. If all blocks recompute, passes for weight gradients are empty: they have length 0, at the end
// of the pass before.
std::vector<MeasuredPass> measured_passes(const Step& step, const PipelineSpec& spec,
                                          std::span<const ActionTime> times);

// The timeline of all stages, with each pass once. Throws a ProgrammingError if a pass was not measured.
Timeline measured_timeline(const PipelineSpec& spec, std::span<const MeasuredPass> passes);

// The simulation with each pass's own times. It lacks only the time that stages lose between passes.
Timeline replayed_timeline(const PipelineSpec& spec, std::span<const MeasuredPass> passes);

// The typical times of each chunk's passes: the median over micro-batches and steps. If backward passes are not
// split, `backward_input` has their whole time. `communication` is the time of the chunk's transfers, in
// either direction.
std::vector<PassTimes> typical_times(const PipelineSpec& spec,
                                     std::span<const std::vector<MeasuredPass>> steps);

// The simulated time of a step as a share of its measured time. Each pass takes the mean time of its chunk
// and kind in that step. Means are used because they keep the sum of consecutive passes; medians do not. A
// slowdown of the whole step affects both times.
double share_explained(const PipelineSpec& spec, std::span<const MeasuredPass> passes);

}  // namespace llmc
