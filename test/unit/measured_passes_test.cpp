// From the times of actions to those of passes. The lists of every schedule are run in a model of time, each
// action as early as possible. The passes measured there must be the passes of the simulation.
#include "llmc/timeline/measured_passes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "llmc/core/error.h"
#include "llmc/parallel/pipeline/pipeline_partition.h"
#include "llmc/parallel/step/build_step.h"
#include "test/gpt2_units.h"

namespace llmc {
namespace {

// In seconds, as sums of powers of two, so that nothing is rounded.
constexpr double start = 1024, sending = 0.0625;
double duration_of(const Step& step, const Action& action) {
    const bool is_block = layer_of(step.part, action.part) >= 0;
    switch (action.kind) {
        case ActionKind::load:
            return 0.125;
        case ActionKind::forward:
            return is_block ? 1 : 0.25;
        case ActionKind::recompute:
            return 0.75;
        case ActionKind::backward:
            return is_block ? 2 : 1.5;
        case ActionKind::backward_input:
        case ActionKind::backward_weight:
            return action.kind == ActionKind::backward_input ? 1.25 : 0.5;
        case ActionKind::update:
            return 3;
        default:
            return 0;
    }
}

struct Example {
    PipelineSpec spec;
    bool uneven = false;  // micro-batches take different times
    std::vector<Step> steps;
    std::vector<std::vector<ActionTime>> times;

    // The measured passes of all stages.
    std::vector<MeasuredPass> passes() const {
        std::vector<MeasuredPass> all(spec.size());
        for (std::size_t stage = 0; stage < steps.size(); ++stage) {
            const std::vector<MeasuredPass> own = measured_passes(steps[stage], spec, times[stage]);
            for (std::size_t i = 0; i < own.size(); ++i) {
                if (own[i].end == 0) continue;
                EXPECT_EQ(all[i].end, 0) << "a pass of two stages";
                all[i] = own[i];
            }
        }
        return all;
    }
};

bool is_receipt(const Action& action) {
    return action.kind == ActionKind::receive_activation || action.kind == ActionKind::receive_gradient;
}

// The time at which an action's input was sent; nothing if it is not yet known.
std::optional<double> sent_at(const Example& example, std::size_t stage, const Action& receipt) {
    const bool forward = receipt.kind == ActionKind::receive_activation;
    const int from = example.steps[stage].chunk_of(receipt).number + (forward ? -1 : 1);
    const auto source = static_cast<std::size_t>(example.spec.stage_of(from));
    const Step& step = example.steps[source];
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        const auto kind = forward ? ActionKind::send_activation : ActionKind::send_gradient;
        if (action.kind != kind || action.micro_batch != receipt.micro_batch ||
            step.chunk_of(action).number != from)
            continue;
        if (example.times[source][i].begin == 0) return std::nullopt;
        return example.times[source][i].begin;
    }
    ADD_FAILURE() << "nobody sends what is received";
    return start;
}

// Runs one stage as far as possible. Returns whether it advanced. A stream runs its actions in order.
bool run_on(Example& example, std::size_t stage) {
    const Step& step = example.steps[stage];
    std::vector<ActionTime>& times = example.times[stage];
    bool moved = false;
    double computed = start;  // when the compute stream becomes free
    for (std::size_t i = 0; i < step.actions.size(); ++i) {
        const Action& action = step.actions[i];
        ActionTime& time = times[i];
        const bool computes = action.stream == StreamKind::compute;
        if (time.end == 0) {
            double begin = computes ? computed : start;
            for (const int place : action.after) {
                const double end = times[static_cast<std::size_t>(place)].end;
                if (end == 0) return moved;
                begin = std::max(begin, end);
            }
            if (time.begin == 0) moved = true;
            time.begin = begin;
            if (is_receipt(action)) {
                const auto sent = sent_at(example, stage, action);
                // Later actions in the list may go on, unless they wait for this one.
                if (!sent) continue;
                time.end = std::max(begin, *sent + sending);
            } else {
                const bool longer = example.uneven && action.micro_batch % 3 == 1;
                time.end = begin + duration_of(example.steps[stage], action) * (longer ? 1.5 : 1);
            }
            moved = true;
        }
        if (computes) computed = time.end;
    }
    return moved;
}

Example run_through_lists(const PipelineSpec& spec, int layers, Recompute recompute = {},
                          bool uneven = false) {
    Example example{.spec = spec, .uneven = uneven, .steps = {}, .times = {}};
    const std::vector<BlockRange> chunks = stages_of_layers(layers, spec.chunks(), spec.stages, {});
    for (int stage = 0; stage < spec.stages; ++stage) {
        example.steps.push_back(build_training_step({.part = part_of_stage(chunks, spec.stages, stage),
                                                     .stage = stage,
                                                     .pipeline = spec,
                                                     .recompute = recompute}));
        example.times.emplace_back(example.steps.back().actions.size());
    }
    for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t stage = 0; stage < example.steps.size(); ++stage)
            moved = run_on(example, stage) || moved;
    }
    return example;
}

std::vector<PipelineSpec> some_specs() {
    std::vector<PipelineSpec> specs;
    for (const PipelineSchedule schedule : all_pipeline_schedules)
        for (const int p : {2, 3, 4})
            for (const int groups : {1, 2, 3})
                specs.push_back({.schedule = schedule,
                                 .stages = p,
                                 .virtual_stages = schedule == PipelineSchedule::interleaved ? 2 : 1,
                                 .micro_batches = groups * p});
    return specs;
}

std::string name_of(const PipelineSpec& spec) {
    return std::string(name_of(spec.schedule)) + ", " + std::to_string(spec.stages) + " stages, " +
           std::to_string(spec.micro_batches) + " micro-batches";
}

TEST(MeasuredPasses, AreThoseOfTheSimulation) {
    for (const PipelineSpec& spec : some_specs()) {
        SCOPED_TRACE(name_of(spec));
        const Example example = run_through_lists(spec, 2 * spec.chunks() + 1);
        const std::vector<MeasuredPass> passes = example.passes();
        const std::vector<PassTimes> times =
            typical_times(spec, std::vector<std::vector<MeasuredPass>>{passes});
        for (int number = 0; number < spec.chunks(); ++number) {
            const Step& step = example.steps[static_cast<std::size_t>(spec.stage_of(number))];
            const Chunk& chunk = step.part.chunks[static_cast<std::size_t>(number / spec.stages)];
            const PassTimes& time = times[static_cast<std::size_t>(number)];
            const double ends = (chunk.takes_tokens ? 1.5 : 0) + (chunk.makes_losses ? 0.125 + 1.5 : 0);
            EXPECT_EQ(time.forward, chunk.layers() + (chunk.takes_tokens ? 0.125 + 0.25 : 0));
            EXPECT_EQ(time.backward_input, chunk.layers() * (spec.splits_backward() ? 1.25 : 2) + ends);
            EXPECT_EQ(time.backward_weight, spec.splits_backward() ? chunk.layers() * 0.5 : 0);
            EXPECT_EQ(time.communication, sending);
        }
        const Timeline measured = measured_timeline(spec, passes);
        Timeline simulated = simulate(spec, pipeline_passes(spec), times);
        ASSERT_EQ(measured.spans.size(), simulated.spans.size());
        const double begin = measured.begin();  // after the updates of the step before
        EXPECT_EQ(measured.total(), simulated.total());
        EXPECT_EQ(share_explained(spec, passes), 1);
        for (int stage = 0; stage < spec.stages; ++stage)
            EXPECT_EQ(measured.work(stage), simulated.work(stage));
        // The simulation visits one stage after another.
        std::ranges::stable_sort(simulated.spans, {}, &Span::stage);
        for (std::size_t i = 0; i < measured.spans.size(); ++i) {
            EXPECT_EQ(measured.spans[i].pass, simulated.spans[i].pass);
            EXPECT_EQ(measured.spans[i].begin, begin + simulated.spans[i].begin);
        }
    }
}

// This includes recomputing, which does not wait for the gradient.
TEST(MeasuredPasses, OfAnUnevenStepAreThoseOfTheSimulationWithTheirOwnTimes) {
    for (const PipelineSpec& spec : some_specs()) {
        for (const int layers : {spec.chunks(), 2 * spec.chunks() + 1}) {
            for (const RecomputeKind kind : {RecomputeKind::none, RecomputeKind::block}) {
                SCOPED_TRACE(name_of(spec) + ", recompute " + std::string(name_of(kind)));
                const std::vector<MeasuredPass> passes =
                    run_through_lists(spec, layers, {.kind = kind}, true).passes();
                const double begin = measured_timeline(spec, passes).begin();
                for (const Span& span : replayed_timeline(spec, passes).spans)
                    EXPECT_EQ(passes[spec.index_of(span.pass)].begin, begin + span.begin);
            }
        }
    }
}

// The passes follow one another: their means add up to the step, even if they are uneven.
TEST(MeasuredPasses, ThatFollowEachOtherAreExplainedByTheirMeans) {
    const PipelineSpec spec{.schedule = PipelineSchedule::naive, .stages = 3, .micro_batches = 5};
    const std::vector<MeasuredPass> passes = run_through_lists(spec, 6, {}, true).passes();
    EXPECT_NEAR(share_explained(spec, passes), 1, 1e-12);
    const double by_medians = simulate(spec, pipeline_passes(spec),
                                       typical_times(spec, std::vector<std::vector<MeasuredPass>>{passes}))
                                  .total();
    EXPECT_GT(std::abs(by_medians / measured_timeline(spec, passes).total() - 1), 0.01);
}

// A recompute does not wait for the gradient. It runs before the gradient arrives, and counts as if it ran
// after.
TEST(MeasuredPasses, WaitingForAnotherStageIsNoPartOfThem) {
    for (const PipelineSpec& spec : some_specs()) {
        if (spec.splits_backward()) continue;
        SCOPED_TRACE(name_of(spec));
        const Example example = run_through_lists(spec, spec.stages == 3 ? 2 * spec.chunks() : spec.chunks(),
                                                  {.kind = RecomputeKind::block});
        const std::vector<MeasuredPass> passes = example.passes();
        const Timeline timeline = measured_timeline(spec, passes);
        for (int stage = 0; stage < spec.stages; ++stage) {
            double end = 0;
            for (const Span& span : timeline.spans) {
                if (span.stage != stage) continue;
                EXPECT_GE(span.begin, end);
                end = span.end;
                const Step& step = example.steps[static_cast<std::size_t>(stage)];
                const Chunk& chunk =
                    step.part.chunks[static_cast<std::size_t>(span.pass.chunk / spec.stages)];
                if (span.pass.kind != PassKind::backward || chunk.makes_losses) continue;
                // The last block's forward pass may have left everything that its backward pass needs.
                const double least = chunk.layers() * 2.75 - 0.75 + (chunk.takes_tokens ? 1.5 : 0);
                EXPECT_GE(span.end - span.begin, least);
                EXPECT_LE(span.end - span.begin, least + 0.75);
            }
        }
    }
}

// A zero-bubble schedule has no weight parts for blocks that recompute.
TEST(MeasuredPasses, WithoutAnythingToDoTakeNoTime) {
    const PipelineSpec spec{.schedule = PipelineSchedule::zb_h1, .stages = 3, .micro_batches = 6};
    for (const int every : {1, 2}) {
        const Example example = run_through_lists(spec, 6, {.kind = RecomputeKind::block, .every = every});
        const std::vector<MeasuredPass> passes = example.passes();
        for (const Span& span : measured_timeline(spec, passes).spans) {
            if (span.pass.kind == PassKind::backward_weight) {
                EXPECT_EQ(span.end - span.begin, every == 1 ? 0 : 0.5);
            }
        }
        const double begin = measured_timeline(spec, passes).begin();
        for (const Span& span : replayed_timeline(spec, passes).spans)
            EXPECT_EQ(passes[spec.index_of(span.pass)].begin, begin + span.begin);
    }
}

TEST(MeasuredPasses, TimesAreMediansOverMicroBatchesAndSteps) {
    const PipelineSpec spec{.stages = 2, .micro_batches = 2};
    std::vector<std::vector<MeasuredPass>> steps(3, std::vector<MeasuredPass>(spec.size()));
    double length = 1;
    for (std::vector<MeasuredPass>& passes : steps) {
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
            passes[spec.index_of({PassKind::forward, 0, micro_batch})] = {.begin = 10, .end = 10 + length};
            // By the stages' clocks, one of six arrivals is before its sending. For another one, the receiver
            // began to wait late.
            passes[spec.index_of({PassKind::forward, 1, micro_batch})] = {.begin = 50,
                                                                          .end = 51,
                                                                          .awaited = length == 8 ? 20.0 : 1.0,
                                                                          .arrived = length == 8 ? 20.5
                                                                                     : length == 1
                                                                                         ? 9.0
                                                                                         : 10 + 1.5 * length};
            length *= 2;
        }
    }
    const std::vector<PassTimes> times = typical_times(spec, steps);
    EXPECT_EQ(times[0].forward, (4 + 8) / 2.0);
    EXPECT_EQ(times[1].forward, 1);
    // Half of each length: 1, 2, 8, 16. The arrival before its sending counts as 0, and the one that was
    // awaited late does not count.
    EXPECT_EQ(times[0].communication, 2);
    // All were awaited late.
    for (std::vector<MeasuredPass>& passes : steps) {
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch)
            passes[spec.index_of({PassKind::forward, 1, micro_batch})].awaited = 49;
    }
    EXPECT_EQ(typical_times(spec, steps)[0].communication, 0);
}

TEST(MeasuredPasses, AreComplete) {
    const PipelineSpec spec{.stages = 2, .micro_batches = 2};
    const Example example = run_through_lists(spec, 2);
    std::vector<MeasuredPass> passes = example.passes();
    EXPECT_EQ(measured_timeline(spec, passes).spans.size(), 8U);
    passes[spec.index_of({PassKind::backward, 1, 1})] = {};
    EXPECT_THROW(measured_timeline(spec, passes), ProgrammingError);
}

}  // namespace
}  // namespace llmc
