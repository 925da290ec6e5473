// What lists of actions are made of, for tests.
#pragma once

#include <functional>
#include <utility>

#include "llmc/parallel/build_step.h"
#include "llmc/parallel/step_streams.h"

namespace llmc {

// Of a whole model.
inline StepSpec whole_spec(int layers, const Sharding& sharding, int micro_batches,
                           bool rounds_gradients = false) {
    return {.part = whole_model(layers),
            .pipeline = {.schedule = PipelineSchedule::naive, .micro_batches = micro_batches},
            .sharding = sharding,
            .rounds_gradients = rounds_gradients};
}

// Performs actions by a function; what is begun is done at once.
class PerformBy final : public Performer {
  public:
    explicit PerformBy(std::function<void(const Action&)> f) : f_(std::move(f)) {}
    void perform(const Action& action) override { f_(action); }
    bool is_done(const Action&) override { return true; }

  private:
    std::function<void(const Action&)> f_;
};

// Runs a list so.
inline void run_with(StepStreams& streams, const Step& step, std::function<void(const Action&)> f) {
    PerformBy performer(std::move(f));
    streams.run(step, performer);
}

}  // namespace llmc
