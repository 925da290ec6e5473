// Measures the pipeline of a run's steps, for --pipeline-timeline. Each process keeps the passes of its last few steps;
// at the end they are brought together, by rank 0's clock. What is made of them: pipeline_report.h.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "llmc/comm/communicator.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/measured_passes.h"

namespace llmc {

struct MeasuredPipeline {
    std::int64_t step = 0;             // the one whose passes took the median time, in all
    std::vector<MeasuredPass> passes;  // of that step
    Timeline timeline;                 // of these
    int steps = 0;                     // that were kept
    std::vector<PassTimes> times;      // what the passes of each chunk usually took
    double explained = 1;              // of a step, by the simulation with its own means: the median of steps
    double clock_error = 0;            // seconds; by so much at most the stages' clocks differ
};

// Seconds since some time.
using Clock = std::function<double()>;
double steady_seconds();  // the host's steady clock

// Of stages on several machines, which have a clock each, this is what is to be added to a process's to have that of rank
// 0, in seconds.
struct ClockOffset {
    double offset = 0;
    double error = 0;
};
// Asks rank 0 for its time, several times: what comes back fastest is off by half that time at most. An offset that is
// smaller than this is taken for none, as it is between processes of one machine. `ranks` are those that want to know,
// and rank 0 is none of them; all ranks of the world call it.
ClockOffset clock_offset(Communicator& world, std::span<const int> ranks, const Clock& now = steady_seconds);

class PipelineWatch {
  public:
    // Both outlive it. `now` is the clock of the times that it is given.
    PipelineWatch(const RunPlan& plan, Communicator& world, Clock now = steady_seconds)
        : plan_(plan), world_(world), now_(std::move(now)) {}

    // After a training step: when its actions ran.
    void see(std::int64_t step, std::span<const ActionTime> times);

    // All ranks call it at once, and receive the same, of the first rank of each stage; nothing if no step was seen. A
    // run's first step makes what later ones use: it counts only if it is the only one.
    std::optional<MeasuredPipeline> gather();

  private:
    struct Seen {
        std::int64_t step;
        std::vector<MeasuredPass> passes;
    };
    std::vector<std::vector<MeasuredPass>> passes_of_all();

    const RunPlan& plan_;
    Communicator& world_;
    Clock now_;
    std::deque<Seen> seen_;
    bool has_first_ = true;  // whether the run's first step is among them
    double clock_error_ = 0;
};

}  // namespace llmc
