// Measurements of a pipeline, collected from all stages: clocks with different times, the step that is shown,
// and which measurements are kept. test/unit/measured_passes_test.cpp tests the passes themselves.
#include "llmc/timeline/pipeline_watch.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "llmc/parallel/step/build_step.h"
#include "mpi_test.h"
#include "test/gpt2_units.h"

namespace llmc {
namespace {

using test::world;

TEST(PipelineWatch, ClocksOfOneMachineAreOne) {
    std::vector<int> others(static_cast<std::size_t>(world().size() - 1));
    std::iota(others.begin(), others.end(), 1);
    const ClockOffset clock = clock_offset(world(), others);
    EXPECT_EQ(clock.offset, 0);
    EXPECT_EQ(clock.error > 0, world().rank() > 0);
}

TEST(PipelineWatch, ClocksOfSeveralAreSetByThatOfRankZero) {
    // Every second rank plays a rank on another machine.
    std::vector<int> asking;
    for (int rank = 1; rank < world().size(); rank += 2) asking.push_back(rank);
    const double ahead = 1000.0 * world().rank();
    const ClockOffset clock = clock_offset(world(), asking, [&] { return steady_seconds() + ahead; });
    if (world().rank() % 2 == 1) {
        EXPECT_NEAR(clock.offset, -ahead, clock.error);
        EXPECT_LT(clock.error, 10);
    } else {
        EXPECT_EQ(clock.offset, 0);
    }
}

// One stage for each rank; each stage has two blocks.
RunPlan plan_of(int micro_batches) {
    RunPlan plan;
    const int stages = world().size();
    plan.spec.mesh = {.pipeline = stages, .rank = world().rank()};
    plan.pipeline = {.stages = stages, .micro_batches = micro_batches};
    const std::vector<BlockRange> chunks = stages_of_layers(2 * stages, stages, stages, {});
    plan.training = build_training_step({.part = part_of_stage(chunks, stages, world().rank()),
                                         .stage = world().rank(),
                                         .pipeline = plan.pipeline});
    return plan;
}

// Times as if every action took `each`, except updates, which belong to the step before and take none.
std::vector<ActionTime> times_of(const RunPlan& plan, double begin, double each) {
    std::vector<ActionTime> times;
    for (const Action& action : plan.training.actions) {
        const double end = begin + (action.kind == ActionKind::update ? 0 : each);
        times.push_back({begin, end});
        begin = end;
    }
    return times;
}

TEST(PipelineWatch, ShowsTheStepOfTheMedianTime) {
    const RunPlan plan = plan_of(3);
    PipelineWatch watch(plan, world());
    // The first times are forgotten. The lower median of steps 5 to 12 is 0.25, the time of step 9: three
    // steps are shorter, and four are longer.
    const std::vector<double> each = {9, 9, 9, 9, 0.125, 2, 2, 0.125, 0.25, 0.5, 0.125, 0.5};
    for (std::size_t i = 0; i < each.size(); ++i)
        watch.see(static_cast<std::int64_t>(i) + 1,
                  times_of(plan, 1000.0 * static_cast<double>(i + 1), each[i]));
    const auto measured = watch.gather();
    ASSERT_TRUE(measured);
    EXPECT_EQ(measured->steps, 8);
    EXPECT_EQ(measured->step, 9);
    EXPECT_EQ(measured->timeline.spans.size(), static_cast<std::size_t>(2 * 3 * world().size()));
    EXPECT_EQ(measured->timeline.begin(), 9000);
    EXPECT_EQ(measured->times.size(), static_cast<std::size_t>(world().size()));
    EXPECT_EQ(measured->clock_error > 0, world().size() > 1);
}

TEST(PipelineWatch, TimesAreByTheClockOfRankZero) {
    const RunPlan plan = plan_of(1);
    const double ahead = 1000.0 * world().rank();
    PipelineWatch watch(plan, world(), [&] { return steady_seconds() + ahead; });
    watch.see(1, times_of(plan, 5000 + ahead, 1));
    const auto measured = watch.gather();
    ASSERT_TRUE(measured);
    // A list has fewer than a hundred actions.
    for (const Span& span : measured->timeline.spans)
        EXPECT_NEAR(span.begin, 5050, 50 + measured->clock_error);
}

TEST(PipelineWatch, AFirstStepCountsOnlyAlone) {
    const RunPlan plan = plan_of(1);
    PipelineWatch none(plan, world());
    EXPECT_FALSE(none.gather());
    for (const int steps : {1, 2, 3}) {
        PipelineWatch watch(plan, world());
        for (int step = 1; step <= steps; ++step) watch.see(step, times_of(plan, 100 * step, 1));
        const auto measured = watch.gather();
        ASSERT_TRUE(measured);
        EXPECT_EQ(measured->steps, steps == 1 ? 1 : steps - 1);
        EXPECT_EQ(measured->step, steps == 1 ? 1 : 2);
    }
}

}  // namespace
}  // namespace llmc
