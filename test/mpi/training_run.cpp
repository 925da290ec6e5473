#include "training_run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <span>

#include "llmc/device/arenas.h"
#include "llmc/parallel/executor.h"
#include "llmc/parallel/unit_transfer.h"
#include "llmc/plan/run_plan.h"
#include "llmc/train/replicas.h"

namespace llmc::test {

namespace {

// One for all runs, so that the primitives of its products are made once.
Device& device() {
    static const std::unique_ptr<Device> one = make_cpu_device(1);
    return *one;
}

std::uint64_t bytes_of(const Communicator& ranks, CallKind kind) { return ranks.traffic(kind).bytes; }

// So far.
BytesSent counted_by(const MeshGroups& groups, const Mesh& mesh) {
    BytesSent sent;
    sent.inside =
        bytes_of(groups.shards(), CallKind::reduce_scatter) + bytes_of(groups.shards(), CallKind::all_gather);
    if (mesh.sharding.replicas > 1) sent.across = bytes_of(groups.replicas(), CallKind::all_reduce);
    if (mesh.tensor > 1) {
        const Communicator& tensor = groups.tensor_parallel().group();
        for (const CallKind kind : {CallKind::all_reduce, CallKind::reduce_scatter, CallKind::all_gather})
            sent.tensor += bytes_of(tensor, kind);
    }
    if (!groups.has_stages()) return sent;
    if (mesh.stage() == 0 || mesh.stage() + 1 == mesh.pipeline)
        sent.tied = bytes_of(groups.tied(), CallKind::all_reduce);
    for (const ActionKind kind : {ActionKind::send_activation, ActionKind::send_gradient}) {
        if (groups.link(kind).pair) sent.stages += bytes_of(*groups.link(kind).pair, CallKind::send);
    }
    return sent;
}

BytesSent difference(const BytesSent& a, const BytesSent& b) {
    return {a.inside - b.inside, a.across - b.across, a.tied - b.tied, a.stages - b.stages,
            a.tensor - b.tensor};
}

BytesSent times(const BytesSent& sent, int n) {
    const auto count = static_cast<std::uint64_t>(n);
    return {sent.inside * count, sent.across * count, sent.tied * count, sent.stages * count,
            sent.tensor * count};
}

BytesSent beside_lists(const ParameterStore& store, const Mesh& mesh) {
    const int shards = mesh.sharding.shards, ranks = mesh.tensor;
    std::int64_t own_blocks = 0, blocks = 0;
    for (int unit = 0; unit < store.units(); ++unit) {
        blocks += store.elements(unit) / norm_block_elements;
        if (store.part().counts_unit(unit)) own_blocks += store.elements(unit) / norm_block_elements / shards;
    }
    BytesSent beside;
    beside.inside = static_cast<std::uint64_t>(own_blocks * (shards - 1)) * sizeof(float);
    // Where these ranks are all that share the model, they sum what each has counted.
    if (mesh.pipeline == 1) {
        const std::int64_t sums = 2 * (blocks / ranks) + blocks % ranks;
        beside.tensor = static_cast<std::uint64_t>(sums * (ranks - 1)) * sizeof(float);
    }
    return beside;
}

}  // namespace

std::string to_string(const TrainingSetting& s) {
    return fmt::format(
        "{}, gradients {}, {} stages ({}, {} chunks each) x {} data ranks x {}{}, stage {} of ZeRO in {} "
        "shards, "
        "{} micro-batches, reduced each {}, recompute {} every {}",
        name_of(s.dtype), name_of(s.gradients), s.pipeline, name_of(s.schedule), s.virtual_stages,
        s.sharding.ranks(), s.tensor, s.sequence_parallel ? " by tokens" : "", s.sharding.stage,
        s.sharding.shards, s.micro_batches, s.sharding.reduces_each_micro_batch, name_of(s.recompute.kind),
        s.recompute.every);
}

TrainingResult train(Communicator& ranks, const TrainingSetting& setting) {
    const GPTConfig& config = setting.config;
    const Mesh mesh{.pipeline = setting.pipeline,
                    .tensor = setting.tensor,
                    .sequence_parallel = setting.sequence_parallel,
                    .sharding = setting.sharding,
                    .rank = ranks.rank()};
    const std::int64_t tokens = setting.sequences * config.sequence_length;
    const RunPlan plan =
        plan_run({.config = config,
                  .dtype = setting.dtype,
                  .gradient_dtype = setting.gradients,
                  .mesh = mesh,
                  .pipeline_schedule = setting.schedule,
                  .virtual_stages = setting.virtual_stages,
                  .recompute = setting.recompute,
                  .global_batch_tokens = tokens,
                  .micro_batch_sequences = setting.sequences / mesh.data_ranks() / setting.micro_batches},
                 device().ops(), 0);
    const Arenas arenas(device(), plan.memory);
    ParameterStore store(device(), arenas, plan.store, 0.1, mesh.shard());
    device().ops().set_workspace(arenas[plan.workspace]);
    const MeshGroups groups(ranks, mesh, setting.virtual_stages > 1);
    Executor executor(config, device(), groups, store, bind(plan.activations, arenas), setting.micro_batches,
                      true);
    store.initialize(1);
    executor.run(plan.publication, {});

    TrainingResult result;
    const BytesSent before = counted_by(groups, mesh);
    for (int step = 1; step <= setting.steps; ++step) {
        const auto load = [&](int micro_batch, std::span<std::int32_t> inputs,
                              std::span<std::int32_t> targets) {
            const std::int64_t first =
                mesh.data_rank() * plan.rank_sequences() + micro_batch * plan.micro_batch;
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                const auto token = static_cast<std::int64_t>(i) + first * config.sequence_length;
                inputs[i] = static_cast<std::int32_t>((7 * token + step) % config.vocabulary);
                targets[i] = static_cast<std::int32_t>((5 * inputs[i] + 1) % config.vocabulary);
            }
        };
        executor.run(plan.training, {.load = load,
                                     .sequences = plan.micro_batch,
                                     .loss_scale = 1.0F / static_cast<float>(tokens),
                                     .adamw = {step, learning_rate, 0.9, 0.95, 1e-8, 1.0},
                                     .rounding_seed = {}});
        const StepResults results = executor.results();
        result.losses.push_back(results.loss_sum);
        result.norms.push_back(results.norm_squared);
    }
    result.counted = difference(counted_by(groups, mesh), before);
    result.listed = times(plan.sent, setting.steps);
    result.beside = times(beside_lists(store, mesh), setting.steps);

    UnitTransfer transfer(device(), store, ranks, mesh, plan.parts);
    for (const auto flat : {&UnitBuffers::master, &UnitBuffers::m, &UnitBuffers::v}) {
        for (int unit = 0; unit < store.units(); ++unit) {
            const std::span<const float> values = transfer.collect(unit, flat);
            const auto elements =
                static_cast<std::size_t>(transfer.units()[static_cast<std::size_t>(unit)].elements());
            if (transfer.is_root())
                result.state.insert(result.state.end(), values.begin(), values.begin() + elements);
        }
    }
    EXPECT_EQ(differing_replica(device(), store, ranks), std::nullopt);
    return result;
}

void expect_same(const TrainingResult& a, const TrainingResult& b) {
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.norms, b.norms);
    ASSERT_EQ(a.state.size(), b.state.size());
    EXPECT_EQ(std::memcmp(a.state.data(), b.state.data(), a.state.size() * sizeof(float)), 0);
}

void expect_near_losses(const TrainingResult& result, const TrainingResult& expected, double relative) {
    ASSERT_EQ(result.losses.size(), expected.losses.size());
    for (std::size_t i = 0; i < expected.losses.size(); ++i) {
        EXPECT_NEAR(result.losses[i], expected.losses[i], relative * std::abs(expected.losses[i]))
            << "step " << i + 1;
    }
}

void expect_bytes_of_list(const TrainingResult& result) {
    EXPECT_EQ(result.counted.inside, result.listed.inside + result.beside.inside);
    EXPECT_EQ(result.counted.across, result.listed.across);
    EXPECT_EQ(result.counted.tied, result.listed.tied);
    EXPECT_EQ(result.counted.stages, result.listed.stages);
    EXPECT_EQ(result.counted.tensor, result.listed.tensor + result.beside.tensor);
}

}  // namespace llmc::test
