// Specifications of lists of actions, for tests.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <functional>
#include <utility>
#include <vector>

#include "llmc/parallel/pipeline/pipeline_partition.h"
#include "llmc/parallel/step/build_step.h"
#include "llmc/parallel/step/step_streams.h"
#include "test/gpt2_units.h"

namespace llmc {

// The specification of a whole model.
inline StepSpec whole_spec(int layers, const Sharding& sharding, int micro_batches,
                           bool rounds_gradients = false) {
    return {.part = whole_model(layers),
            .pipeline = {.schedule = PipelineSchedule::naive, .micro_batches = micro_batches},
            .sharding = sharding,
            .rounds_gradients = rounds_gradients};
}

// The specifications of all stages of a pipeline with `layers` layers. `spec` gives the other settings.
inline std::vector<StepSpec> stage_specs(const PipelineSpec& pipeline, int layers, const StepSpec& spec) {
    const std::vector<BlockRange> chunks =
        stages_of_layers(layers, pipeline.chunks(), pipeline.stages, {.head = 1.5});
    std::vector<StepSpec> specs;
    for (int stage = 0; stage < pipeline.stages; ++stage) {
        StepSpec& of = specs.emplace_back(spec);
        of.part =
            pipeline.chunks() == 1 ? whole_model(layers) : part_of_stage(chunks, pipeline.stages, stage);
        of.stage = stage;
        of.pipeline = pipeline;
        of.sharding.rounds_are_consecutive =
            pipeline.schedule == PipelineSchedule::breadth_first && pipeline.chunks() == layers;
    }
    return specs;
}

// Calls f with pipelines of 1 to 5 stages, each with 1 to 3 chunks.
inline void for_all_pipelines(const std::function<void(const PipelineSpec&)>& f) {
    for (const PipelineSchedule schedule : all_pipeline_schedules) {
        const bool is_interleaved = schedule == PipelineSchedule::interleaved;
        const bool has_chunks = is_interleaved || schedule == PipelineSchedule::breadth_first;
        for (int p = is_interleaved ? 2 : 1; p <= 5; ++p) {
            for (int v = is_interleaved ? 2 : 1; v <= (has_chunks ? 3 : 1); ++v) {
                for (const int m : {1, 2, 3, 5, 8}) {
                    if (is_interleaved && m % p != 0) continue;
                    const PipelineSpec spec{
                        .schedule = schedule, .stages = p, .virtual_stages = v, .micro_batches = m};
                    SCOPED_TRACE(fmt::format("{}, {} stages of {} chunks, {} micro-batches",
                                             name_of(schedule), p, v, m));
                    f(spec);
                }
            }
        }
    }
}

// Calls f with every way to shard, reduce, round and recompute.
inline void for_all_settings(const std::function<void(const StepSpec&)>& f) {
    std::vector<Sharding> shardings = {{.shards = 1}};
    for (int stage = 0; stage <= 3; ++stage) {
        shardings.push_back({.stage = stage, .shards = 2});
        if (stage > 0) shardings.push_back({.stage = stage, .shards = 2, .replicas = 2});
    }
    shardings.push_back({.stage = 3, .shards = 2, .prefetch_units = 0});
    shardings.push_back({.stage = 3, .shards = 2, .prefetch_units = 3, .reshards_after_forward = false});
    for (const int stage : {0, 1, 3}) {
        shardings.push_back(
            {.stage = stage,
             .shards = 2,
             .prefetch_units = 2,
             .offload = {.state = Tier::host, .parameters = Tier::host, .has_own_memory = true}});
        shardings.push_back(
            {.stage = stage, .shards = 2, .prefetch_units = 2, .offload = {.parameters = Tier::disk}});
    }
    for (Sharding& sharding : shardings) {
        for (const bool each : {false, true}) {
            sharding.reduces_each_micro_batch = each;
            f({.sharding = sharding});
            f({.sharding = sharding, .recompute = {.kind = RecomputeKind::block}});
            f({.sharding = sharding,
               .rounds_gradients = true,
               .recompute = {.kind = RecomputeKind::selective, .every = 2}});
        }
    }
}

// Performs a list as Executor::run does.
inline void run_on(StepStreams& streams, const Step& step, const Perform& perform) {
    streams.begin(step, perform);
    try {
        for (int place = 0; place < std::ssize(step.actions); ++place) {
            const Action& action = step.actions[static_cast<std::size_t>(place)];
            if (streams.is_on_lane(action)) continue;
            streams.wait_before(place);
            streams.record(place, perform(action));
        }
        streams.finish();
    } catch (...) {
        streams.cancel();
        throw;
    }
}

// The same with a function whose actions are done when it returns.
inline void run_with(StepStreams& streams, const Step& step, const std::function<void(const Action&)>& f) {
    run_on(streams, step, [&](const Action& action) {
        f(action);
        return TransferTest{};
    });
}

}  // namespace llmc
