// What a run of a step shows of its pipeline: from the times of single actions (step_streams.h) those of the passes, and
// from these what pipeline_simulation.h takes. Measuring is no part of this, nor is bringing the stages' times together.
#pragma once

#include <span>
#include <vector>

#include "llmc/parallel/pipeline_simulation.h"
#include "llmc/parallel/step.h"
#include "llmc/parallel/step_streams.h"

namespace llmc {

// In seconds of one clock, and lengths; 0 where nothing was measured. Of doubles alone, so that stages can add theirs up.
struct MeasuredPass {
    double begin = 0, end = 0;
    // Of what it takes from another stage: since when it could be received, and when it was there.
    double awaited = 0, arrived = 0;
    double prepared = 0;  // how much of it was done without that
};

// The passes of a stage's training step, each at PipelineSpec::index_of; those of other stages stay 0.
//
// A pass is all that the compute stream does for one chunk and micro-batch, recomputing and the zeroing and rounding of
// gradients included, and waiting within it for parameters too. What it does before its input has arrived counts as if
// it were done right before that, so that waiting for another stage is no part of it (as in the simulation). A pass for
// the gradients of weights is empty where all blocks recompute: it takes no time, behind the one before.
std::vector<MeasuredPass> measured_passes(const Step& step, const PipelineSpec& spec,
                                          std::span<const ActionTime> times);

// Of all stages, each pass once. A ProgrammingError if one was not measured.
Timeline measured_timeline(const PipelineSpec& spec, std::span<const MeasuredPass> passes);

// The simulation with each pass's own times, which lacks of the measured timeline only what stages lose between passes.
Timeline replayed_timeline(const PipelineSpec& spec, std::span<const MeasuredPass> passes);

// What the passes of each chunk usually take: the median over micro-batches and steps. The time of a `backward` pass is
// all in `backward_input`; `communication` is that of what the chunk sends, either way.
std::vector<PassTimes> usual_times(const PipelineSpec& spec,
                                   std::span<const std::vector<MeasuredPass>> steps);

// How much of a step's time the simulation explains with what its passes of a chunk and kind took on average in that very
// step: the share of the measured time. Where passes follow each other their sum counts, which means keep and medians do not;
// and what slowed a whole step down is on both sides.
double share_explained(const PipelineSpec& spec, std::span<const MeasuredPass> passes);

}  // namespace llmc
