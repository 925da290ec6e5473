// Learning-rate schedules at their corner cases. test/python/test_training_against_pytorch.py compares whole
// curves with PyTorch's.
#include "llmc/optim/schedule.h"

#include <gtest/gtest.h>

namespace llmc {
namespace {

constexpr double tolerance = 1e-15;  // a few roundings of numbers below 1

double rate(ScheduleKind kind, std::int64_t step, std::int64_t warmup = 0) {
    return learning_rate(
        {.kind = kind, .peak = 1, .min_fraction = 0.1, .warmup_steps = warmup, .total_steps = 100}, step);
}

TEST(Schedule, RisesThroughTheWarmup) {
    for (const auto kind :
         {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::constant, ScheduleKind::wsd}) {
        EXPECT_NEAR(rate(kind, 1, 10), 0.1, tolerance);
        EXPECT_NEAR(rate(kind, 10, 10), 1, tolerance);
        EXPECT_NEAR(rate(kind, 11, 10), 1, tolerance);
    }
}

TEST(Schedule, BeginsAtThePeakWithoutWarmup) {
    for (const auto kind :
         {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::constant, ScheduleKind::wsd}) {
        EXPECT_NEAR(rate(kind, 1), 1, tolerance);
    }
}

TEST(Schedule, FallsToItsMinimumAndStaysThere) {
    for (const auto kind : {ScheduleKind::cosine, ScheduleKind::linear, ScheduleKind::wsd}) {
        EXPECT_NEAR(rate(kind, 101), 0.1, tolerance);
        EXPECT_NEAR(rate(kind, 1000), 0.1, tolerance);
        EXPECT_GT(rate(kind, 99), 0.1);
    }
    EXPECT_EQ(rate(ScheduleKind::constant, 1000), 1);
}

TEST(Schedule, IsHalfwayInTheMiddle) {
    EXPECT_NEAR(rate(ScheduleKind::linear, 51), 0.55, tolerance);
    EXPECT_NEAR(rate(ScheduleKind::cosine, 51), 0.55, tolerance);
    EXPECT_NEAR(rate(ScheduleKind::wsd, 80), 1, tolerance);
    EXPECT_NEAR(rate(ScheduleKind::wsd, 90), 0.55, tolerance);
}

// Also the shortest run's last fifth has a step.
TEST(Schedule, DecaysInTheLastFifth) {
    for (const std::int64_t steps : {5, 7, 100}) {
        const auto at = [&](std::int64_t step) {
            return learning_rate(
                {.kind = ScheduleKind::wsd, .peak = 1, .min_fraction = 0.1, .total_steps = steps}, step);
        };
        EXPECT_EQ(at(4 * steps / 5), 1);
        EXPECT_LT(at(4 * steps / 5 + 1), 1);
        EXPECT_NEAR(at(steps), 0.1, tolerance);
    }
}

TEST(Schedule, SurvivesAWarmupLongerThanTheRun) {
    EXPECT_NEAR(rate(ScheduleKind::cosine, 100, 200), 0.5, tolerance);
}

}  // namespace
}  // namespace llmc
