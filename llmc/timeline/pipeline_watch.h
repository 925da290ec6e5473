// Measures the pipeline of a run's steps, for --pipeline-timeline. Each process keeps the passes of its last
// few steps. At the end they are collected, with times on rank 0's clock. train/pipeline_report.h writes the
// report.
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
#include "llmc/timeline/measured_passes.h"

namespace llmc {

struct MeasuredPipeline {
    std::int64_t step = 0;             // The step whose total time is the median.
    std::vector<MeasuredPass> passes;  // In that step.
    Timeline timeline;                 // From these passes.
    int steps = 0;                     // How many were kept.
    std::vector<PassTimes> times;      // Typical times of the passes of each chunk.
    double explained = 1;              // The median over steps of share_explained.
    double clock_error = 0;            // Seconds by which the stages' clocks differ at most.
};

// Seconds since some fixed time.
using Clock = std::function<double()>;
double steady_seconds();  // the host's steady clock

// The seconds to add to a process's clock to get rank 0's, and its error. Stages on several machines have
// different clocks.
struct ClockOffset {
    double offset = 0;
    double error = 0;
};
// Asks rank 0 for its time several times. Uses the answer with the shortest round trip; its error is at most
// half of that. An offset below the error counts as 0, as between processes of one machine. `ranks` are those
// that ask, without rank 0. All ranks of the world call it.
ClockOffset clock_offset(Communicator& world, std::span<const int> ranks, const Clock& now = steady_seconds);

class PipelineWatch {
  public:
    // Both references must outlive it. `now` is the clock of the times given to see().
    PipelineWatch(const RunPlan& plan, Communicator& world, Clock now = steady_seconds)
        : plan_(plan), world_(world), now_(std::move(now)) {}

    // Records when the actions of a training step ran.
    void see(std::int64_t step, std::span<const ActionTime> times);

    // All ranks call it at once and get the same result, from the first rank of each stage; empty if no step
    // was recorded. A run's first step includes one-time set-up, so it is used only if no other step was
    // recorded.
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
    bool has_first_ = true;  // whether the run's first step is in `seen_`
    double clock_error_ = 0;
};

}  // namespace llmc
