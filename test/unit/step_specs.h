// What lists of actions are made of, for tests.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "llmc/parallel/build_step.h"
#include "llmc/parallel/pipeline_partition.h"
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

// Of each stage of a pipeline, with as many layers as there are; `spec` says the rest.
inline std::vector<StepSpec> stage_specs(const PipelineSpec& pipeline, int layers, const StepSpec& spec) {
    const std::vector<BlockRange> chunks = stages_of_layers(layers, pipeline.chunks(), {.head = 1.5});
    std::vector<StepSpec> specs;
    for (int stage = 0; stage < pipeline.stages; ++stage) {
        StepSpec& of = specs.emplace_back(spec);
        of.part = pipeline.stages == 1 ? whole_model(layers) : part_of_stage(chunks, pipeline.stages, stage);
        of.stage = stage;
        of.pipeline = pipeline;
    }
    return specs;
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
