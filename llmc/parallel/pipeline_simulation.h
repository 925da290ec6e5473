// When each pass of a pipeline runs. A Timeline is what a simulation finds, or what a run has measured; from it come
// the time that stages wait (the "bubble") and the activations that they hold. pipeline_timeline.h draws it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "llmc/parallel/pipeline_schedule.h"

namespace llmc {

// Of one chunk and micro-batch, in seconds.
struct PassTimes {
    double forward = 0;
    double backward_input = 0;   // a pass of kind `backward` takes
    double backward_weight = 0;  // the sum of both
    // From the end of a pass until its result has arrived on another stage. Both stages compute meanwhile.
    double communication = 0;
    // What of a backward pass takes nothing of the chunk behind: recomputing, which is done before that has arrived.
    double backward_prepared = 0;
};
double duration(const Pass& pass, const PassTimes& times);
// All chunks alike.
std::vector<PassTimes> equal_times(const PipelineSpec& spec, const PassTimes& times);

// Of one pass, in seconds.
struct PassTime {
    double duration = 0;
    double prepared =
        0;  // of that, what does not take what another stage sends: done before that has arrived
    double communication = 0;  // until its result has arrived on another stage
};

struct Span {
    int stage = 0;
    Pass pass;
    double begin = 0, end = 0;  // seconds
};
struct Timeline {
    int stages = 1;
    int virtual_stages = 1;
    std::vector<Span>
        spans{};  // of a stage in the order in which they ran; those of one stage do not overlap
    // What its times are in, as a plural ("block forwards"); empty: seconds.
    std::string unit{};

    // "1.25 ms", or "12.5 block forwards".
    std::string text_of(double time) const;
    double begin() const;  // of the first pass; 0 if there is none
    double total() const;  // from there to the end of the last
    double work(int stage) const;
    double idle(int stage) const { return total() - work(stage); }
    // The most activations that a stage holds, in micro-batches of the whole stage: one of v chunks counts 1/v. They are
    // held from the begin of the forward pass to the end of the backward pass (its weight part).
    double peak_in_flight(int stage) const;
};

// The same, where a chunk of which `is_split` says no has all of its backward pass in the first part of it: that is the pass
// then, and the second part is left out.
Timeline without_empty_parts(const Timeline& timeline, const std::function<bool(int chunk)>& is_split);

// The share of time in which stages wait, all stages together. Literature has both.
struct Bubble {
    double over_total = 0;   // idle / (idle + work)
    double over_useful = 0;  // idle / work
};
Bubble bubble(const Timeline& timeline);

// Each stage runs its passes in their order, each as soon as its source has arrived, but for what can be prepared: that
// counts as if it were done right before. `times` has one of each chunk of
// the model. A ProgrammingError if the passes never end; check_passes says why.
Timeline simulate(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                  const std::vector<PassTimes>& times);
// The same with times for each pass.
Timeline simulate(const PipelineSpec& spec, const std::vector<std::vector<Pass>>& passes,
                  const std::function<PassTime(const Pass&)>& time_of);

}  // namespace llmc
