// The estimate of a pipeline before a run: it has as many operations as the model, divided by the schedule.
#include "llmc/plan/pipeline_estimate.h"

#include <gtest/gtest.h>

#include <memory>

#include "llmc/device/device.h"
#include "llmc/timeline/pipeline_timeline.h"
#include "test/gpt2_units.h"

namespace llmc {
namespace {

const GPTConfig config{6, 2, 32, 64, 256};

RunPlan plan_of(PipelineSchedule schedule, int virtual_stages, const Recompute& recompute = {}) {
    const std::unique_ptr<Device> device = make_cpu_device(1);
    return plan_run({.model = gpt2(config),
                     .mesh = {.pipeline = 3},
                     .pipeline_schedule = schedule,
                     .virtual_stages = virtual_stages,
                     .recompute = recompute,
                     .global_batch_tokens = std::int64_t{64} * 12,
                     .micro_batch_sequences = 2},
                    device->sizes(), 0);
}

double sum(const PassTimes& times) { return times.forward + times.backward_input + times.backward_weight; }

double sum_of(const std::vector<PassTimes>& chunks) {
    double all = 0;
    for (const PassTimes& times : chunks) all += sum(times);
    return all;
}

TEST(PipelineEstimate, HasAllOperationsOfTheModel) {
    const double block = block_cost(config);
    const double all = 3 * (6 * block + embedding_cost(config) + head_cost(config)), tokens = 2 * 64;
    for (const auto& [schedule, v] :
         {std::pair{PipelineSchedule::gpipe, 1}, {PipelineSchedule::interleaved, 2}}) {
        const RunPlan plan = plan_of(schedule, v);
        EXPECT_NEAR(sum_of(estimated_times(plan, std::nullopt)), all / block, 1e-9);
        EXPECT_NEAR(sum_of(estimated_times(plan, 1e6)), all * tokens / 1e6, 1e-9);
    }
    const RunPlan recomputing = plan_of(PipelineSchedule::gpipe, 1, {.kind = RecomputeKind::block});
    EXPECT_NEAR(sum_of(estimated_times(recomputing, std::nullopt)), all / block + 6, 1e-9);
    const RunPlan selective = plan_of(PipelineSchedule::gpipe, 1, {.kind = RecomputeKind::selective});
    EXPECT_NEAR(sum_of(estimated_times(selective, std::nullopt)), all / block, 1e-9);
}

// If a block recomputes, nothing is left for the weight parts of a zero-bubble schedule.
TEST(PipelineEstimate, WhatRecomputesIsNotSplit) {
    const auto times = [](const Recompute& recompute) {
        return estimated_times(plan_of(PipelineSchedule::zb_h1, 1, recompute), std::nullopt);
    };
    for (const RecomputeKind kind : {RecomputeKind::selective, RecomputeKind::block}) {
        const std::vector<PassTimes> whole = times({.kind = kind}), plain = times({});
        const int again = kind == RecomputeKind::block ? 6 : 0;
        EXPECT_NEAR(sum_of(whole), sum_of(plain) + again, 1e-9);
        for (const PassTimes& time : whole) EXPECT_EQ(time.backward_weight, 0);
        // If every second block recomputes, half of the weight parts are left.
        const std::vector<PassTimes> second = times({.kind = kind, .every = 2});
        EXPECT_NEAR(sum_of(second), sum_of(plain) + again / 2.0, 1e-9);
        const auto weights = [](const std::vector<PassTimes>& chunks) {
            double sum = 0;
            for (const PassTimes& time : chunks) sum += time.backward_weight;
            return sum;
        };
        EXPECT_NEAR(weights(second), weights(plain) / 2, 1e-9);
    }
}

// If all blocks recompute, the second parts of zero-bubble schedules are empty, and nothing is held for them.
TEST(PipelineEstimate, DrawsNoEmptyParts) {
    const auto drawn = [](PipelineSchedule schedule, const Recompute& recompute) {
        return estimated_timeline(plan_of(schedule, 1, recompute), std::nullopt);
    };
    const Timeline one_f_one_b = drawn(PipelineSchedule::one_f_one_b, {.kind = RecomputeKind::block}),
                   whole = drawn(PipelineSchedule::zb_h1, {.kind = RecomputeKind::block});
    ASSERT_EQ(whole.spans.size(), one_f_one_b.spans.size());
    for (const Span& span : whole.spans) {
        EXPECT_TRUE(span.pass.kind == PassKind::forward || span.pass.kind == PassKind::backward);
        EXPECT_GT(span.end, span.begin);
    }
    for (int stage = 0; stage < 3; ++stage)
        EXPECT_EQ(whole.peak_in_flight(stage), one_f_one_b.peak_in_flight(stage));
    EXPECT_NEAR(whole.total(), one_f_one_b.total(), 1e-9);
}

TEST(PipelineEstimate, DrawsThePartsOfChunksThatHaveThem) {
    // One layer in each chunk.
    const std::unique_ptr<Device> device = make_cpu_device(1);
    const RunPlan plan = plan_run({.model = gpt2(config),
                                   .mesh = {.pipeline = 6},
                                   .pipeline_schedule = PipelineSchedule::zb_h1,
                                   .recompute = {.kind = RecomputeKind::block, .every = 2},
                                   .global_batch_tokens = std::int64_t{64} * 12,
                                   .micro_batch_sequences = 2},
                                  device->sizes(), 0);
    const Timeline timeline = estimated_timeline(plan, std::nullopt);
    EXPECT_EQ(timeline.spans.size(), 6U * (3 * 3 + 3 * 2));
    for (const Span& span : timeline.spans) {
        EXPECT_GT(span.end, span.begin);
        if (span.pass.kind == PassKind::forward) continue;
        EXPECT_EQ(span.pass.kind == PassKind::backward, span.pass.chunk % 2 == 1) << to_string(span.pass);
        EXPECT_EQ(splits_backward(plan, span.pass.chunk), span.pass.chunk % 2 == 0);
    }
    const std::string picture = timeline_svg(timeline, "");
    EXPECT_NE(picture.find(">backward, or gradients of inputs<"), std::string::npos);
}

// Attention has no weights. So the gradients of a block's weights take less than its forward pass, and those
// of its input more.
TEST(PipelineEstimate, ABlockIsTheUnit) {
    const RunPlan plan = plan_of(PipelineSchedule::gpipe, 1);
    const std::vector<PassTimes> times = estimated_times(plan, std::nullopt);
    ASSERT_EQ(times.size(), 3U);
    for (int chunk = 0; chunk < 3; ++chunk) {
        const double blocks = plan.chunk(chunk).layers();
        const PassTimes& time = times[static_cast<std::size_t>(chunk)];
        EXPECT_NEAR(time.forward, blocks, chunk == 0 ? 0.01 : 0);
        EXPECT_LT(time.backward_weight, blocks);
        EXPECT_NEAR(time.backward_weight, blocks * 24 * 32 * 32 / block_cost(config), 1e-12);
        EXPECT_EQ(time.communication, 0);
    }
    // The head's forward pass is part of the backward pass of its chunk.
    const double blocks = plan.chunk(2).layers();
    EXPECT_NEAR(times[2].backward_input + times[2].backward_weight - 2 * blocks,
                3 * head_cost(config) / block_cost(config), 1e-9);
}

// The fastest split is chosen, also when recompute makes blocks cost more than the head.
TEST(PipelineEstimate, LayersAreBalancedWithTheirRecompute) {
    const auto device = make_cpu_device(1);
    const auto plan = [&](const std::string& layers) {
        return plan_run(
            {.model = gpt2(
                 {.layers = 12, .heads = 12, .channels = 768, .sequence_length = 256, .vocabulary = 50304}),
             .mesh = {.pipeline = 2},
             .pipeline_layers = layers,
             .recompute = {.kind = RecomputeKind::block},
             .global_batch_tokens = 8192,
             .micro_batch_sequences = 1},
            device->sizes(), 0);
    };
    EXPECT_EQ(layers_of(plan("").parts[0]), 8);
    const double chosen = estimated_timeline(plan(""), std::nullopt).total();
    for (const char* other : {"7,5", "9,3", "6,6"})
        EXPECT_LT(chosen, estimated_timeline(plan(other), std::nullopt).total());
}

TEST(PipelineEstimate, NamesTheScheduleAsItIsPerformed) {
    const auto name = [](PipelineSchedule schedule, const Recompute& recompute) {
        return schedule_name(plan_of(schedule, 1, recompute));
    };
    using enum PipelineSchedule;
    for (const RecomputeKind kind : {RecomputeKind::selective, RecomputeKind::block}) {
        EXPECT_EQ(name(zb_h1, {.kind = kind}), "zb-h1 (all blocks recompute: in the order of 1f1b)");
        EXPECT_EQ(name(zb_h1, {.kind = kind, .every = 2}), "zb-h1");
        EXPECT_EQ(name(gpipe, {.kind = kind}), "gpipe");
    }
    EXPECT_EQ(name(zb_h1, {}), "zb-h1");
}

TEST(PipelineEstimate, SaysItsUnit) {
    const RunPlan plan = plan_of(PipelineSchedule::one_f_one_b, 1);
    const Timeline blocks = estimated_timeline(plan, std::nullopt), seconds = estimated_timeline(plan, 1e9);
    EXPECT_EQ(blocks.text_of(12.25), "12.25 block forwards");
    EXPECT_EQ(seconds.text_of(0.00125), "1.25 ms");
    EXPECT_NEAR(seconds.total(), blocks.total() * block_cost(config) * 2 * 64 / 1e9, 1e-12);
    EXPECT_EQ(blocks.spans.size(), static_cast<std::size_t>(2 * 3 * 6));
}

}  // namespace
}  // namespace llmc
