// The plan of a run: how the available memory determines the micro-batches.
#include "llmc/plan/run_plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <regex>
#include <string>
#include <tuple>

#include "llmc/core/error.h"
#include "test/gpt2_config.h"

namespace llmc {
namespace {

void expect_needs(const RunPlan& plan, const RunNeeds& needs) {
    const RunSpec& spec = plan.spec;
    ASSERT_EQ(needs.stages.size(), plan.stages.size());
    EXPECT_EQ(needs.micro_batch, plan.micro_batch);
    for (std::size_t stage = 0; stage < plan.stages.size(); ++stage) {
        const std::string where =
            fmt::format("{}, stage {} of {}, {} layers, {} micro-batches, ZeRO {}, recompute {}",
                        name_of(spec.pipeline_schedule), stage, spec.mesh.pipeline, spec.model.layers(),
                        plan.micro_batches, spec.mesh.sharding.stage, name_of(spec.recompute.kind));
        for (const ArenaKind arena : all_arenas)
            EXPECT_EQ(needs.stages[stage].memory.bytes(arena), plan.stages[stage].memory.bytes(arena))
                << name_of(arena) << ", " << where;
        for (const auto kind : {&BytesSent::inside, &BytesSent::across, &BytesSent::tied, &BytesSent::stages,
                                &BytesSent::tensor})
            EXPECT_EQ(needs.stages[stage].sent.*kind, plan.stages[stage].sent.*kind) << where;
    }
}

class Plans : public testing::Test {
  protected:
    RunPlan plan(std::size_t available, std::int64_t micro_batch = 0, int processes = 1,
                 const Mesh& mesh = {}, const Recompute& recompute = {}) {
        return plan_run({.model = gpt2({2, 2, 32, 64, 256}),
                         .mesh = mesh,
                         .recompute = recompute,
                         .global_batch_tokens = std::int64_t{64} * 24,
                         .micro_batch_sequences = micro_batch,
                         .machine = {.bytes = available, .processes = processes}},
                        device_->sizes(), 0);
    }
    // The end of the line that refuses a run; empty if it fits.
    std::string last_advice(const RunSpec& spec) {
        try {
            plan_run(spec, device_->sizes(), 0);
        } catch (const UserError& fault) {
            const std::string line = fault.what();
            return line.substr(line.find_last_of(';') + 2);
        }
        return "";
    }

    std::unique_ptr<Device> device_ = make_cpu_device(1);
};

TEST_F(Plans, MicroBatchIsTheLargestThatFits) {
    EXPECT_EQ(plan(0).micro_batch, 24);
    std::int64_t last = 24;
    for (const std::int64_t fits : {24, 12, 8, 6, 4, 3, 2, 1}) {
        const std::size_t bytes = plan(0, fits).memory.total_bytes();
        EXPECT_EQ(plan(bytes).micro_batch, fits);
        EXPECT_EQ(plan(2 * bytes, 0, 2).micro_batch, fits) << "two processes share the memory";
        EXPECT_EQ(plan(bytes).memory.total_bytes(), bytes);
        last = fits;
    }
    EXPECT_EQ(last, 1);
}

// Parameters and, in bf16, the master copies that they are rounded from, on one rank and sharded.
TEST_F(Plans, WithoutTrainingThereAreNoGradientsOrMoments) {
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        for (const int stage : {0, 1, 2, 3}) {
            Mesh mesh;
            if (stage > 0) mesh.sharding = {.stage = stage, .shards = 2};
            RunSpec spec{.model = gpt2({2, 2, 32, 64, 256}),
                         .dtype = dtype,
                         .gradient_dtype = dtype,
                         .mesh = mesh,
                         .global_batch_tokens = 128,
                         .micro_batch_sequences = 1};
            const RunPlan trains = plan_run(spec, device_->sizes(), 0);
            spec.trains = false;
            const RunPlan generates = plan_run(spec, device_->sizes(), 0);
            for (const ArenaKind arena : all_arenas) {
                const bool is_gone = arena == ArenaKind::gradients || arena == ArenaKind::moments;
                EXPECT_EQ(generates.memory.bytes(arena), is_gone ? 0 : trains.memory.bytes(arena))
                    << name_of(arena) << ", stage " << stage;
            }
        }
    }
}

// The needs follow from short steps, and are those of the whole plan on every schedule.
TEST_F(Plans, NeedsAreThoseOfTheWholePlan) {
    struct Size {
        std::int64_t layers, micro_batches;
        int pipeline, virtual_stages;
    };
    const std::vector<Size> sizes = {{3, 1, 1, 1},  {3, 2, 1, 1},   {4, 37, 1, 1},  {6, 2, 2, 1},
                                     {6, 5, 2, 1},  {6, 31, 2, 1},  {8, 12, 4, 2},  {8, 44, 4, 2},
                                     {9, 57, 3, 3}, {13, 60, 5, 2}, {13, 61, 5, 1}, {12, 4, 4, 3}};
    for (const auto& [layers, micro_batches, pipeline, virtual_stages] : sizes) {
        for (const PipelineSchedule schedule : all_pipeline_schedules) {
            const bool is_breadth_first = schedule == PipelineSchedule::breadth_first;
            if (!is_breadth_first && (schedule == PipelineSchedule::interleaved) != (virtual_stages > 1))
                continue;
            for (const int zero : {0, 1, 2, 3}) {
                for (const RecomputeKind kind :
                     {RecomputeKind::none, RecomputeKind::selective, RecomputeKind::block}) {
                    const RunSpec spec{
                        .model = gpt2({layers, 2, 32, 16, 256}),
                        .dtype = DType::bf16,
                        .gradient_dtype = zero == 1 ? DType::bf16 : DType::fp32,
                        .mesh = {.pipeline = pipeline,
                                 .tensor = 2,
                                 .sequence_parallel = true,
                                 .sharding = {.stage = zero,
                                              .shards = zero == 0 ? 4 : 2,
                                              .replicas = zero == 0 ? 1 : 2,
                                              .reduces_each_micro_batch =
                                                  zero == 2 || (zero == 3 && !is_breadth_first),
                                              .rounds_are_consecutive =
                                                  is_breadth_first && layers % pipeline == 0}},
                        .pipeline_schedule = schedule,
                        .virtual_stages =
                            is_breadth_first ? static_cast<int>(layers / pipeline) : virtual_stages,
                        .recompute = {.kind = kind, .every = 2},
                        .copies_checkpoints = micro_batches % 2 == 1,
                        .global_batch_tokens = micro_batches * 4 * 16,
                        .micro_batch_sequences = 1};
                    expect_needs(plan_run(spec, device_->sizes(), 4096),
                                 needs_of(spec, device_->sizes(), 4096));
                }
            }
        }
    }
}

// Steps that are too long for a run, and very many layers, which are dealt to the stages.
TEST_F(Plans, NeedsOfLongSteps) {
    for (const auto& [layers, pipeline, micro_batches] :
         {std::tuple<std::int64_t, int, std::int64_t>{96, 16, 1 << 20}, {2000, 16, 8}}) {
        const RunSpec spec{.model = gpt2({layers, 2, 32, 64, 256}),
                           .mesh = {.pipeline = pipeline, .sharding = {.stage = 3, .shards = 1024}},
                           .global_batch_tokens = micro_batches * 1024 * 64,
                           .micro_batch_sequences = 1};
        const RunNeeds needs = needs_of(spec, device_->sizes(), 0);
        EXPECT_GT(needs.stages.front().sent.inside, 1U << 20);
        if (micro_batches > 8) {
            EXPECT_THROW(plan_run(spec, device_->sizes(), 0), UserError);
        }
    }
}

TEST_F(Plans, WhatDoesNotFitIsRefused) {
    const std::size_t least = plan(0, 1).memory.total_bytes();
    EXPECT_THROW(plan(least - 1), UserError);
    // A requested micro-batch is not made smaller.
    EXPECT_THROW(plan(least, 2), UserError);
}

TEST_F(Plans, ARefusalNamesTheLargestArenasAndWhatWouldFit) {
    const auto refusal = [&](std::size_t available, std::int64_t micro_batch, int processes = 1) {
        try {
            plan(available, micro_batch, processes);
        } catch (const UserError& fault) {
            return std::string(fault.what());
        }
        return std::string();
    };
    const std::size_t six = plan(0, 6).memory.total_bytes();
    const std::string of_arenas =
        R"( need \d+\.\d [KM]iB of memory \(the largest arenas are activations .*B, \w+ .*B and \w+ .*B\))";
    EXPECT_TRUE(std::regex_match(
        refusal(six, 12),
        std::regex("--micro-batch-size 12: 35,[0-9]* parameters and a micro-batch of 12 sequences" +
                   of_arenas + ", but this machine has .*B free; --micro-batch-size 6 would fit")))
        << refusal(six, 12);
    EXPECT_TRUE(refusal(2 * six - 1, 24, 2).ends_with("; --micro-batch-size 4 would fit"));
    EXPECT_NE(refusal(2 * six - 1, 24, 2).find(") in each of 2 processes, but"), std::string::npos);
    // Not even one sequence fits, whether or not the micro-batch was requested.
    const std::size_t least = plan(0, 1).memory.total_bytes();
    for (const std::int64_t micro_batch : {0, 1, 24}) {
        const std::string line = refusal(least - 1, micro_batch);
        EXPECT_TRUE(std::regex_match(
            line,
            std::regex(
                "too large a model: .* parameters and a micro-batch of 1 sequence" + of_arenas +
                ", but this machine has .*B free; give a smaller --model; --recompute block would fit")))
            << line;
    }
}

TEST_F(Plans, ARefusalNamesRecomputeBeforeZeroAndBothLast) {
    constexpr Recompute all{.kind = RecomputeKind::block};
    const auto mesh = [](int stage) {
        return Mesh{.sharding = {.stage = stage, .shards = 8, .reduces_each_micro_batch = stage >= 2}};
    };
    const auto bytes = [&](int stage, const Recompute& recompute) {
        return plan(0, 1, 1, mesh(stage), recompute).memory.total_bytes();
    };
    const auto advice = [&](std::size_t available, const Recompute& recompute) {
        try {
            plan(available, 0, 1, mesh(0), recompute);
        } catch (const UserError& fault) {
            const std::string line = fault.what();
            return line.substr(line.find("; ") + 2);
        }
        return std::string();
    };
    constexpr std::string_view smaller = "give a smaller --model";
    EXPECT_EQ(advice(bytes(0, all), {}), fmt::format("{}; --recompute block would fit", smaller));
    EXPECT_EQ(advice(bytes(0, all), {.kind = RecomputeKind::selective}),
              fmt::format("{}; --recompute block would fit", smaller));
    EXPECT_EQ(advice(bytes(0, all), {.kind = RecomputeKind::block, .every = 2}),
              fmt::format("{}; --recompute block --recompute-every 1 would fit", smaller));
    EXPECT_EQ(advice(bytes(1, all), all), fmt::format("{}; --zero-stage 1 would fit", smaller));
    ASSERT_LT(bytes(1, all), std::min(bytes(0, all), bytes(1, {})));
    EXPECT_EQ(advice(bytes(0, all) - 1, {}), fmt::format("{}; --zero-stage 1 would fit", smaller));
    std::size_t least = bytes(0, {});
    for (const int stage : {1, 2, 3}) least = std::min(least, bytes(stage, {}));
    EXPECT_EQ(advice(least - 1, {}), fmt::format("{}; --recompute block --zero-stage 1 would fit", smaller));
    EXPECT_EQ(advice(10000, {}), smaller);
}

// On the CPU, the disk takes what changes nothing but the time.
TEST_F(Plans, ARefusalNamesADiskOnTheCpu) {
    const RunSpec asked{.model = gpt2({8, 2, 128, 64, 256}),
                        .least_piece = 1 << 12,
                        .mesh = {},
                        .recompute = {.kind = RecomputeKind::block},
                        .global_batch_tokens = 64,
                        .micro_batch_sequences = 1};
    const auto advice = [&](std::size_t available) {
        RunSpec spec = asked;
        spec.machine = {.bytes = available};
        return last_advice(spec);
    };
    RunSpec on_disk = asked;
    on_disk.mesh.sharding.offload.state = Tier::disk;
    const std::size_t with_state = plan_run(on_disk, device_->sizes(), 0).memory.total_bytes();
    on_disk.mesh.sharding.offload.parameters = Tier::disk;
    on_disk.mesh.sharding.prefetch_units = 2;
    const std::size_t with_both = plan_run(on_disk, device_->sizes(), 0).memory.total_bytes();
    EXPECT_LT(with_both, with_state);
    EXPECT_EQ(advice(with_state), "--offload-optimizer nvme --nvme-dir DIR would fit");
    EXPECT_EQ(advice(with_state - 1),
              "--offload-optimizer nvme --offload-parameters nvme --nvme-dir DIR would fit");
    EXPECT_EQ(advice(with_both),
              "--offload-optimizer nvme --offload-parameters nvme --nvme-dir DIR would fit");
    EXPECT_EQ(advice(with_both - 1), "give a smaller --model");
    // A part of it was given.
    RunSpec with_parameters = asked;
    with_parameters.mesh.sharding.offload.parameters = Tier::disk;
    with_parameters.machine = {.bytes = with_both};
    EXPECT_EQ(last_advice(with_parameters), "--offload-optimizer nvme would fit");
}

// Beside a GPU, the host's memory takes it first, where it is known; and what exceeds that is refused.
TEST_F(Plans, ARefusalNamesTheHostsMemoryBesideAGpu) {
    RunSpec spec{.model = gpt2({8, 2, 128, 64, 256}),
                 .least_piece = 1 << 12,
                 .mesh = {.sharding = {.offload = {.has_own_memory = true}}},
                 .recompute = {.kind = RecomputeKind::block},
                 .global_batch_tokens = 64,
                 .micro_batch_sequences = 1};
    RunSpec on_host = spec;
    on_host.mesh.sharding.offload.state = Tier::host;
    const RunPlan plan = plan_run(on_host, device_->sizes(), 0);
    const std::size_t host = plan.memory.host_sizes().total_bytes();
    EXPECT_EQ(host, plan.stages.front().host.total_bytes());
    spec.machine = {.bytes = plan.memory.total_bytes(), .host_bytes = host, .is_of_cpu = false};
    EXPECT_EQ(last_advice(spec), "--offload-optimizer cpu would fit");
    RunSpec on_disk = on_host;
    on_disk.mesh.sharding.offload.state = Tier::disk;
    spec.machine.host_bytes = plan_run(on_disk, device_->sizes(), 0).memory.host_sizes().total_bytes();
    EXPECT_LT(spec.machine.host_bytes, host);
    EXPECT_EQ(last_advice(spec), "--offload-optimizer nvme --nvme-dir DIR would fit");
    spec.machine.host_bytes = 0;
    EXPECT_EQ(last_advice(spec), "give a smaller --model");
    on_host.machine = {.host_bytes = 2 * host - 1, .host_processes = 2, .is_of_cpu = false};
    EXPECT_EQ(last_advice(on_host), "a disk holds it: --offload-optimizer nvme --nvme-dir DIR");
    // Gradients remain.
    on_host.machine.host_bytes = spec.model.layers();
    EXPECT_EQ(last_advice(on_host), "offload less, or take more machines");
}

// It makes no micro-batch smaller, and a run without it is not refused.
TEST_F(Plans, ACopyOfCheckpointsTakesWhatIsLeft) {
    RunSpec spec{.model = gpt2({2, 2, 32, 64, 256}),
                 .mesh = {},
                 .copies_checkpoints = true,
                 .global_batch_tokens = std::int64_t{64} * 24};
    const RunPlan with = plan_run(spec, device_->sizes(), 0);
    const std::size_t copy = with.memory.bytes(ArenaKind::checkpoint);
    // Weights and AdamW's two numbers, in fp32, and at most an alignment for each buffer.
    std::size_t elements = 0;
    for (const UnitLayout& unit : with.store.units)
        elements += static_cast<std::size_t>(unit.padded_elements(1));
    EXPECT_GE(elements, count_parameters(spec.model));
    EXPECT_GE(copy, 12 * elements);
    EXPECT_LT(copy, 12 * elements + 3 * with.copy.size() * buffer_alignment);
    EXPECT_EQ(with.lacking_copy, 0);
    spec.machine.bytes = with.memory.total_bytes() - 1;
    const RunPlan without = plan_run(spec, device_->sizes(), 0);
    EXPECT_EQ(without.micro_batch, 24);
    EXPECT_EQ(without.lacking_copy, copy);
    EXPECT_FALSE(without.spec.copies_checkpoints);
    EXPECT_EQ(without.memory.total_bytes(), with.memory.total_bytes() - copy);
    // Beside a GPU it is in the host's memory.
    spec.mesh.sharding.offload.has_own_memory = true;
    spec.machine = {.host_bytes = copy, .is_of_cpu = false};
    const RunPlan on_host = plan_run(spec, device_->sizes(), 0);
    EXPECT_EQ(on_host.memory.bytes(ArenaKind::checkpoint), 0);
    EXPECT_EQ(on_host.memory.host_sizes().bytes(ArenaKind::checkpoint), copy);
    spec.machine.host_bytes = copy - 1;
    EXPECT_EQ(plan_run(spec, device_->sizes(), 0).lacking_copy, copy);
}

// Gradients in bf16 change the sums of a run, and more GPUs its cost. So the message names both after
// everything else.
TEST_F(Plans, ARefusalNamesGradientsInBf16AndMoreGpusLast) {
    const RunSpec asked{.model = gpt2({8, 2, 32, 64, 256}),
                        .dtype = DType::bf16,
                        .mesh = {},
                        .recompute = {.kind = RecomputeKind::block},
                        .global_batch_tokens = std::int64_t{64} * 24,
                        .micro_batch_sequences = 1};
    const auto bytes = [&](DType gradients, int stage, int ranks) {
        RunSpec spec = asked;
        spec.gradient_dtype = gradients;
        spec.mesh.sharding = {.stage = stage, .shards = ranks, .reduces_each_micro_batch = stage >= 2};
        return plan_run(spec, device_->sizes(), 0).memory.total_bytes();
    };
    const auto advice = [&](std::size_t available, bool gpus, const Recompute& recompute,
                            DType gradients = DType::fp32) {
        RunSpec spec = asked;
        spec.gradient_dtype = gradients;
        spec.recompute = recompute;
        spec.machine = {
            .bytes = available, .name = "the GPU", .more_processes_bring_more = gpus, .is_of_cpu = false};
        return last_advice(spec);
    };
    const std::size_t rounded = bytes(DType::bf16, 0, 1);
    ASSERT_LT(rounded, bytes(DType::fp32, 0, 1));
    EXPECT_EQ(advice(rounded, true, asked.recompute), "--gradient-dtype bf16 would fit");
    EXPECT_EQ(advice(rounded, true, {}), "--recompute block --gradient-dtype bf16 would fit");
    EXPECT_EQ(advice(rounded - 1, false, asked.recompute), "give a smaller --model");
    EXPECT_EQ(advice(bytes(DType::fp32, 1, 2), true, asked.recompute), "2 GPUs and --zero-stage 1 would fit");
    EXPECT_EQ(advice(bytes(DType::fp32, 3, 8), true, {}),
              "8 GPUs and --recompute block --zero-stage 3 would fit");
    // 16 GPUs cannot share 24 sequences equally.
    EXPECT_EQ(advice(bytes(DType::fp32, 3, 8) / 2, true, {}), "give a smaller --model");
}

// The advised ZeRO stage fits with the gradients that --reduce-every asks for.
TEST_F(Plans, ARefusalKeepsTheReductionThatWasAskedFor) {
    RunSpec spec{.model = gpt2({16, 2, 32, 8, 256}),
                 .mesh = {},
                 .recompute = {.kind = RecomputeKind::block},
                 .global_batch_tokens = std::int64_t{8} * 24,
                 .micro_batch_sequences = 1};
    const auto bytes = [&](int stage, bool each) {
        spec.mesh.sharding = {.stage = stage, .shards = 8, .reduces_each_micro_batch = each};
        return plan_run(spec, device_->sizes(), 0).memory.total_bytes();
    };
    const std::size_t in_shards = bytes(2, true), whole = bytes(2, false), all_in_shards = bytes(3, false);
    ASSERT_LT(in_shards, std::min(bytes(1, true), bytes(1, false)));
    ASSERT_LT(in_shards, whole);
    ASSERT_LT(all_in_shards, whole);
    const auto advice = [&](std::size_t available, bool by_default, bool each) {
        RunSpec other = spec;
        other.mesh.sharding = {.shards = 8, .reduces_each_micro_batch = each};
        other.default_reduction = by_default;
        other.machine.bytes = available;
        try {
            plan_run(other, device_->sizes(), 0);
        } catch (const UserError& fault) {
            const std::string line = fault.what();
            return line.substr(line.find_last_of(';') + 2);
        }
        return std::string();
    };
    EXPECT_EQ(advice(in_shards, true, false), "--zero-stage 2 would fit");
    EXPECT_EQ(advice(in_shards, false, true), "--zero-stage 2 would fit");
    EXPECT_NE(advice(in_shards, false, false), "--zero-stage 2 would fit");
    EXPECT_EQ(advice(all_in_shards, false, false), "--zero-stage 3 would fit");
}

TEST_F(Plans, ARefusalNamesTheStageOfZeroThatWouldFit) {
    const auto mesh = [](int stage) {
        return Mesh{.sharding = {.stage = stage, .shards = 8, .reduces_each_micro_batch = stage >= 2}};
    };
    std::size_t before = plan(0, 1, 1, mesh(0)).memory.total_bytes();
    for (const int stage : {1, 2, 3}) {
        const std::size_t bytes = plan(0, 1, 1, mesh(stage)).memory.total_bytes();
        if (bytes >= before)
            continue;  // in so small a model, the buffers that blocks share may outweigh the
                       // savings
        try {
            plan(bytes, 0, 1, mesh(0));
            ADD_FAILURE() << "it fits";
        } catch (const UserError& fault) {
            const std::string line = fault.what();
            EXPECT_TRUE(line.ends_with(fmt::format("; --zero-stage {} would fit", stage))) << line;
        }
        before = bytes;
    }
    EXPECT_LT(before, plan(0, 1, 1, mesh(0)).memory.total_bytes());
}

}  // namespace
}  // namespace llmc
