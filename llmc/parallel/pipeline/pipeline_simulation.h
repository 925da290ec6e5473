// Finds when each pass of a pipeline runs. A Timeline is the result of a simulation or of a measurement. From
// it follow the idle time of stages (the "bubble") and the activations that they hold. pipeline_timeline.h
// draws it.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/parallel/pipeline/pipeline_schedule.h"

namespace llmc {

// The times of one chunk's passes of one micro-batch, in seconds or in the Timeline's unit.
struct PassTimes {
    double forward = 0;
    double backward_input = 0;  // a pass of kind `backward` takes the sum of both
    double backward_weight = 0;
    // From the end of a pass until its result has arrived on another stage. Both stages compute meanwhile.
    double communication = 0;
    // The part of a backward pass that can run before the gradient arrives: recomputation.
    double backward_prepared = 0;
};
double duration(const Pass& pass, const PassTimes& times);
// The same times for all chunks.
std::vector<PassTimes> equal_times(const PipelineSpec& spec, const PassTimes& times);

// The times of one pass, in seconds.
struct PassTime {
    double duration = 0;
    // The part of `duration` that can run before the data from another stage arrives.
    double prepared = 0;
    double communication = 0;  // until its result has arrived on another stage
};

struct Span {
    int stage = 0;
    Pass pass;
    double begin = 0, end = 0;  // seconds
};
// The share of time in which stages wait, over all stages. The literature uses both definitions.
struct Bubble {
    double over_total = 0;   // idle / (idle + work)
    double over_useful = 0;  // idle / work
};

struct Timeline {
    int stages = 1;
    int virtual_stages = 1;
    // The passes of each stage, in the order in which they ran. Passes of one stage do not overlap.
    std::vector<Span> spans{};
    // The unit of its times, as a plural ("block forwards"); empty: seconds.
    std::string unit{};
    // The bubble of the step, if these are the passes of its first micro-batches alone.
    std::optional<Bubble> bubble_of_step{};

    // "1.25 ms", or "12.5 block forwards".
    std::string text_of(double time) const;
    double begin() const;  // the start of the first pass; 0 if there is none
    double total() const;  // from begin() to the end of the last pass
    double work(int stage) const;
    double idle(int stage) const { return total() - work(stage); }
    // The most activations that a stage holds at once, in micro-batches of the whole stage: with v chunks per
    // stage, one chunk's activations count 1/v. They are held from the start of the forward pass to the end
    // of the backward pass (backward_weight, if split).
    double peak_in_flight(int stage) const;
};

// The same timeline, with whole backward passes for chunks that `is_split` excludes. Their backward_input
// becomes `backward`, and their backward_weight is left out.
Timeline without_empty_halves(const Timeline& timeline, const std::function<bool(int chunk)>& is_split);

Bubble bubble(const Timeline& timeline);
// The same of a step with more micro-batches than `timeline`: `times` what `longer` has more of work and idle time.
Bubble bubble(const Timeline& timeline, const Timeline& longer, double times);

// Simulates a pipeline. Each stage runs its passes in order, each as soon as its source has arrived. The
// prepared part of a pass runs earlier, but counts as if it ran right before the rest. `times` has one entry
// per chunk of the model. Throws a ProgrammingError if the passes never end; check_passes says why.
Timeline simulate(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                  const std::vector<PassTimes>& times);
// The same, with a time for each pass.
Timeline simulate(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                  const std::function<PassTime(const Pass&)>& time_of);

}  // namespace llmc
