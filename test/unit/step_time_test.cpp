// The time of a step from its lists.
#include "llmc/plan/step_time.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "llmc/device/gpu_sizes.h"
#include "llmc/model/family.h"
#include "llmc/plan/pipeline_estimate.h"
#include "llmc/plan/whole_pipeline.h"

namespace llmc {
namespace {

constexpr StepRates peaks{.products = 1e15,
                          .attention = 1e15,
                          .memory = 3e12,
                          .node = {.bytes = 400e9},
                          .network = {.bytes = 50e9},
                          .ranks_of_node = 8,
                          .is_bound = true};

RunSpec spec_of(const Mesh& mesh, std::int64_t micro_batches, PipelineSchedule schedule) {
    return {.model = make_model(family_of("gpt2-xl"), choices_of("gpt2-xl")),
            .dtype = DType::bf16,
            .mesh = mesh,
            .pipeline_schedule = schedule,
            .global_batch_tokens = micro_batches * mesh.data_ranks() * 8 * 1024,
            .micro_batch_sequences = 8};
}

StepTime time_of(const Mesh& mesh, std::int64_t micro_batches, const StepRates& rates,
                 PipelineSchedule schedule = PipelineSchedule::one_f_one_b) {
    const cuda::GpuSizes sizes(cuda::sm_90);
    return step_time(short_plans(spec_of(mesh, micro_batches, schedule), sizes, 0, 8), rates);
}

// Without memory traffic, one rank takes the model's operations at the peak. (The count of model.h has four products of
// attention's backward pass where there are five, and no padding of the vocabulary.)
TEST(StepTime, OfOneRankIsThatOfItsOperations) {
    StepRates rates = peaks;
    rates.memory = 1e30;
    const StepTime time = time_of({}, 4, rates);
    const double flops = training_flops_per_token(spec_of({}, 1, {}).model) * 4 * 8 * 1024;
    EXPECT_GT(time.seconds, flops / rates.products);
    EXPECT_LT(time.seconds, 1.05 * flops / rates.products);
    EXPECT_NEAR(time.seconds, time.compute, 1e-9 * time.seconds);
}

// The times of a stage's computations and waits.
TEST(StepTime, PartsAddUp) {
    for (const Mesh& mesh : {Mesh{}, Mesh{.pipeline = 4}, Mesh{.tensor = 5},
                             Mesh{.sharding = {.stage = 3, .shards = 8, .reduces_each_micro_batch = true}}}) {
        for (const std::int64_t micro_batches : {4, 100}) {
            const StepTime time = time_of(mesh, micro_batches, peaks);
            EXPECT_NEAR(time.parts.total(), time.seconds, 1e-9 * time.seconds);
            EXPECT_EQ(time.parts[TimePart::tensor_exchange] > 0, mesh.tensor > 1);
            EXPECT_EQ(time.parts[TimePart::stages] > 0, mesh.pipeline > 1);
            EXPECT_EQ(time.parts[TimePart::data_exchange] > 0, mesh.sharding.shards > 1);
        }
    }
}

TEST(StepTime, GrowsEvenlyWithMicroBatches) {
    for (const PipelineSchedule schedule :
         {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b, PipelineSchedule::zb_h1}) {
        const Mesh mesh{.pipeline = 4};
        const double at_12 = time_of(mesh, 12, peaks, schedule).seconds,
                     at_24 = time_of(mesh, 24, peaks, schedule).seconds,
                     at_36 = time_of(mesh, 36, peaks, schedule).seconds;
        EXPECT_NEAR(at_36 - at_24, at_24 - at_12, 1e-6 * at_12) << name_of(schedule);
    }
}

// The simulation of actions idles as that of passes does, whose times come from the operations alone.
TEST(StepTime, PipelinesIdleAsPassesDo) {
    StepRates rates = peaks;
    rates.memory = rates.node.bytes = rates.network.bytes = 1e30;
    const cuda::GpuSizes sizes(cuda::sm_90);
    for (const PipelineSchedule schedule : {PipelineSchedule::gpipe, PipelineSchedule::one_f_one_b}) {
        const RunSpec spec = spec_of({.pipeline = 4}, 8, schedule);
        const double expected = estimated_timeline(plan_of_whole_pipeline(spec, 8), rates.products).total();
        const double seconds = step_time(short_plans(spec, sizes, 0, 8), rates).seconds;
        EXPECT_NEAR(seconds / expected, 1, 0.05) << name_of(schedule);
    }
}

TEST(StepTime, CommunicationHidesBehindComputation) {
    const Mesh mesh{.sharding = {.stage = 3, .shards = 8, .reduces_each_micro_batch = true}};
    const StepTime fast = time_of(mesh, 4, peaks);
    EXPECT_LT(fast.seconds, 1.2 * fast.compute);
    // A link that carries all parameters two times and the gradients once, for each micro-batch, sets the pace.
    StepRates slow = peaks;
    slow.node.bytes = 1e9;
    const double parameters = parameters_about(spec_of({}, 1, {}).model);
    const double bytes = 4 * parameters * (2 + 2 + 4) * 7 / 8;
    EXPECT_NEAR(time_of(mesh, 4, slow).seconds / (bytes / 1e9), 1, 0.1);
    // On two machines, the network does.
    slow = peaks;
    slow.ranks_of_node = 4;
    slow.network.bytes = 1e8;
    EXPECT_GT(time_of(mesh, 4, slow).seconds, 5 * fast.seconds);
}

// Layer by layer, all micro-batches of a layer share its gathers, behind which those of a short step hide.
TEST(StepTime, ManyMicroBatchesTakeAsLongAsTheyCompute) {
    StepRates slow = peaks;
    slow.node.bytes = 1e9;
    const cuda::GpuSizes sizes(cuda::sm_90);
    const auto time = [&](std::int64_t micro_batches) {
        RunSpec spec = spec_of({.sharding = {.stage = 3, .shards = 8, .rounds_are_consecutive = true}},
                               micro_batches, PipelineSchedule::breadth_first);
        spec.virtual_stages = static_cast<int>(spec.model.layers());
        return step_time(short_plans(spec, sizes, 0, 8), slow);
    };
    const StepTime few = time(4), many = time(400);
    EXPECT_GT(few.seconds, 2 * few.compute);
    EXPECT_NEAR(many.compute, 100 * few.compute, 0.05 * many.compute);
    EXPECT_GE(many.seconds, many.compute);
    EXPECT_LT(many.seconds, many.compute + few.seconds);
}

TEST(StepTime, TensorParallelSumsAreExposed) {
    StepRates slow = peaks;
    slow.node.bytes = 1e9;
    const Mesh mesh{.tensor = 5};
    const double difference = time_of(mesh, 4, slow).seconds - time_of(mesh, 4, peaks).seconds;
    // Two sums forward and two backward of each layer, 2 (R-1)/R times its residual stream in bf16.
    const double bytes = 4.0 * 48 * 4 * 2 * 4 / 5 * (8 * 1024 * 1600 * 2);
    EXPECT_NEAR(difference / (bytes / 1e9), 1, 0.1);
}

}  // namespace
}  // namespace llmc
