#include "training_run.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <set>
#include <span>

#include "llmc/device/device.h"
#include "llmc/parallel/step/executor.h"
#include "llmc/parallel/zero/unit_transfer.h"
#include "llmc/plan/run_plan.h"

namespace llmc::test {

namespace {

// One device for all runs, so that the primitives of its products are made once.
Device& device() {
    static const std::unique_ptr<Device> one = make_cpu_device(1);
    return *one;
}

std::uint64_t bytes_of(const Communicator& ranks, CallKind kind) { return ranks.traffic(kind).bytes; }

// The bytes counted so far.
BytesSent counted_by(const MeshGroups& groups, const Mesh& mesh) {
    BytesSent sent;
    sent.inside =
        bytes_of(groups.shards(), CallKind::reduce_scatter) + bytes_of(groups.shards(), CallKind::all_gather);
    if (mesh.sharding.replicas > 1) sent.across = bytes_of(groups.replicas(), CallKind::all_reduce);
    if (mesh.tensor > 1) {
        const TensorParallel ranks = groups.tensor_parallel();
        for (const CallKind kind : {CallKind::all_reduce, CallKind::all_gather, CallKind::reduce_scatter})
            sent.tensor += bytes_of(ranks.group(), kind);
    }
    if (!groups.has_stages()) return sent;
    std::set<const Communicator*> tied;
    for (const auto& [unit, ranks] : groups.tied()) {
        if (tied.insert(ranks.get()).second) sent.tied += bytes_of(*ranks, CallKind::all_reduce);
    }
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

// Expects the same bytes as the first rank's.
void expect_like_first(Communicator& ranks, const Tensor& own, std::string_view what) {
    std::vector<std::byte> first(own.data, own.data + own.bytes());
    ranks.broadcast({first.data(), own.dtype, own.shape}, 0);
    // A rank without elements has no memory that could be compared.
    EXPECT_TRUE(own.bytes() == 0 || std::memcmp(first.data(), own.data, own.bytes()) == 0) << what;
}

void expect_replicas_alike(const ParameterStore& store, const MeshGroups& groups, const Mesh& mesh) {
    for (int unit = 0; unit < store.units(); ++unit) {
        if (!store.has(unit)) continue;
        const UnitBuffers& own = store.buffers(unit);
        if (mesh.sharding.replicas > 1)
            expect_like_first(groups.replicas(), own.parameter_shard, "shards of two groups");
        if (mesh.sharding.keeps_parameters_whole())
            expect_like_first(groups.data(), own.parameters, "parameters of data ranks");
    }
    for (const auto& [unit, stages] : groups.tied()) {
        const UnitBuffers& own = store.buffers(unit);
        for (const Tensor& tensor : {own.parameter_shard, own.state[0].values, own.state[1].values})
            expect_like_first(*stages, tensor, "what stages share");
    }
}

}  // namespace

Model model_of(const TrainingSetting& s) { return s.model ? *s.model : gpt2(s.config); }

void fill_tokens(const Model& model, std::int64_t first_sequence, int step, std::span<std::int32_t> inputs,
                 std::span<std::int32_t> targets) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
        const auto token = static_cast<std::int64_t>(i) + first_sequence * model.sequence_length;
        inputs[i] = static_cast<std::int32_t>((7 * token + step) % model.vocabulary);
        targets[i] = static_cast<std::int32_t>((5 * inputs[i] + 1) % model.vocabulary);
    }
}

namespace {

// The losses of the first sequence, from each of the lists that compute losses. Every data rank reads the
// same.
void read(Communicator& ranks, const Model& model, const RunPlan& plan, Executor& executor,
          TrainingResult& result) {
    const std::int64_t T = model.sequence_length;
    std::vector<std::int32_t> text(static_cast<std::size_t>(T)), next(text.size());
    fill_tokens(model, 0, 0, text, next);
    const auto load = [&](int, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        for (std::size_t i = 0; i < inputs.size(); ++i) {
            inputs[i] = text[i % text.size()];
            targets[i] = next[i % text.size()];
        }
    };
    const Mesh& mesh = plan.spec.mesh;
    executor.run(plan.evaluation, {.load = load, .sequences = plan.micro_batch});
    result.evaluated = executor.results().loss_sum /
                       static_cast<double>(mesh.data_ranks() * mesh.pipeline * plan.micro_batch);
    executor.run(plan.diagnosis, {.load = load, .sequences = 1});
    result.diagnosed = executor.results().loss_sum / mesh.data_ranks();
    // The first three rows at once, then one row at a time.
    for (std::int64_t position = 0; position < T; ++position) {
        const RowRange rows{position < 3 ? 0 : position, position < 3 ? position + 1 : 1};
        const auto load_rows = [&](int, std::span<std::int32_t> inputs, std::span<std::int32_t>) {
            std::copy_n(text.begin() + rows.position, rows.count, inputs.begin());
        };
        executor.run(plan.generation, {.load = load_rows, .sequences = 1, .rows = rows});
        if (mesh.stage() + 1 < mesh.pipeline) continue;
        device().synchronize();
        with_dtype(plan.spec.dtype, [&](auto element) {
            const std::span<decltype(element)> logits = executor.logits().span<decltype(element)>();
            double sum = 0;
            for (const auto x : logits.first(static_cast<std::size_t>(model.vocabulary)))
                sum += std::exp(static_cast<double>(to_float(x)));
            result.generated +=
                std::log(sum) -
                static_cast<double>(
                    to_float(logits[static_cast<std::size_t>(next[static_cast<std::size_t>(position)])]));
        });
    }
    ranks.broadcast({reinterpret_cast<std::byte*>(&result.generated), DType::fp64, {1}},
                    mesh.rank_of(mesh.pipeline - 1, 0, 0));
}

}  // namespace

std::string to_string(const TrainingSetting& s) {
    return fmt::format(
        "family {}, {}, gradients {}, {} stages ({}, {} chunks each) x {} data ranks x {}{}, stage {} of "
        "ZeRO in {} "
        "shards, "
        "{} micro-batches, reduced each {}, recompute {} every {}",
        s.family, name_of(s.dtype), name_of(s.gradients), s.pipeline, name_of(s.schedule), s.virtual_stages,
        s.sharding.ranks(), s.tensor, s.sequence_parallel ? " of some tokens" : "", s.sharding.stage,
        s.sharding.shards, s.micro_batches, s.sharding.reduces_each_micro_batch, name_of(s.recompute.kind),
        s.recompute.every);
}

TrainingResult train(Communicator& ranks, const TrainingSetting& setting) {
    const Model model = model_of(setting);
    const Mesh mesh{.pipeline = setting.pipeline,
                    .tensor = setting.tensor,
                    .sequence_parallel = setting.sequence_parallel,
                    .sharding = setting.sharding,
                    .rank = ranks.rank()};
    const std::int64_t tokens = setting.sequences * model.sequence_length;
    const RunPlan plan =
        plan_run({.model = model,
                  .dtype = setting.dtype,
                  .gradient_dtype = setting.gradients,
                  .mesh = mesh,
                  .pipeline_schedule = setting.schedule,
                  .virtual_stages = setting.virtual_stages,
                  .recompute = setting.recompute,
                  .global_batch_tokens = tokens,
                  .micro_batch_sequences = setting.sequences / mesh.data_ranks() / setting.micro_batches},
                 device().sizes(), 0);
    const Arenas arenas(device(), plan.memory);
    ParameterStore store(device(), arenas, plan.store, 0.1, mesh.shard());
    device().ops().set_workspace(arenas[plan.workspace]);
    const MeshGroups groups(ranks, mesh, plan.parts, setting.virtual_stages > 1);
    Executor executor(*plan.lists, device(), groups, store, bind(plan.activations, arenas),
                      setting.micro_batches, true);
    store.initialize(1);
    executor.run(plan.parameter_gathers, {});

    TrainingResult result;
    std::optional<Update> pending;
    const BytesSent before = counted_by(groups, mesh);
    for (int step = 1; step <= setting.steps; ++step) {
        const auto load = [&](int micro_batch, std::span<std::int32_t> inputs,
                              std::span<std::int32_t> targets) {
            const std::int64_t first =
                mesh.data_rank() * plan.rank_sequences() + micro_batch * plan.micro_batch;
            fill_tokens(model, first, step, inputs, targets);
        };
        executor.run(plan.training, {.load = load,
                                     .sequences = plan.micro_batch,
                                     .loss_scale = 1.0F / static_cast<float>(tokens),
                                     .update = pending});
        pending = Update{.step = {step, learning_rate, {0.9, 0.95, 1e-8}, 1.0}};
        const StepResults results = executor.results();
        result.losses.push_back(results.loss_sum);
        result.norms.push_back(results.norm_squared);
    }
    executor.run(plan.update, {.update = pending});
    result.counted = difference(counted_by(groups, mesh), before);
    result.listed = times(plan.sent, setting.steps);
    for (int unit = 0; unit < store.units(); ++unit) {
        if (!store.part().counts_unit(unit)) continue;
        const std::int64_t blocks = store.elements(unit) / norm_block_elements / mesh.sharding.shards;
        result.of_squares +=
            static_cast<std::uint64_t>(blocks * (mesh.sharding.shards - 1) * setting.steps) * sizeof(float);
    }

    // If tensor-parallel ranks alone share the model, they also exchange the sums of squares.
    if (setting.tensor > 1 && setting.pipeline == 1) {
        const auto n = static_cast<std::uint64_t>(arenas[plan.activations.norm_partials].elements());
        const auto t = static_cast<std::uint64_t>(setting.tensor);
        result.of_all_squares = static_cast<std::uint64_t>(setting.steps) * (t - 1) *
                                (2 * (n - n % t) / t + n % t) * sizeof(float);
    }

    if (setting.reads) read(ranks, model, plan, executor, result);
    UnitTransfer transfer(store, ranks, mesh, plan.parts);
    for (const Kept kept : {Kept::master, Kept::state1, Kept::state2}) {
        for (int unit = 0; unit < store.units(); ++unit) {
            const std::span<const float> values = transfer.collect(unit, kept);
            const auto elements = transfer.units()[static_cast<std::size_t>(unit)].elements();
            if (transfer.is_root())
                result.state.insert(result.state.end(), values.begin(), values.begin() + elements);
        }
    }
    expect_replicas_alike(store, groups, mesh);
    return result;
}

void expect_same(const TrainingResult& a, const TrainingResult& b) {
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.norms, b.norms);
    ASSERT_EQ(a.state.size(), b.state.size());
    EXPECT_TRUE(a.state.empty() ||
                std::memcmp(a.state.data(), b.state.data(), a.state.size() * sizeof(float)) == 0);
}

void expect_near_losses(const TrainingResult& result, const TrainingResult& expected, double relative) {
    ASSERT_EQ(result.losses.size(), expected.losses.size());
    for (std::size_t i = 0; i < expected.losses.size(); ++i) {
        EXPECT_NEAR(result.losses[i], expected.losses[i], relative * std::abs(expected.losses[i]))
            << "step " << i + 1;
    }
}

void expect_bytes_of_list(const TrainingResult& result) {
    EXPECT_EQ(result.counted.inside, result.listed.inside + result.of_squares);
    EXPECT_EQ(result.counted.tensor, result.listed.tensor + result.of_all_squares);
    EXPECT_EQ(result.counted.across, result.listed.across);
    EXPECT_EQ(result.counted.tied, result.listed.tied);
    EXPECT_EQ(result.counted.stages, result.listed.stages);
}

}  // namespace llmc::test
