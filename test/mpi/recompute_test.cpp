// Training with activations that are made again: whatever recomputes, how often, and at every stage of ZeRO, it is the same
// run to the bit, and sends the same.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "llmc/device/arenas.h"
#include "llmc/parallel/executor.h"
#include "llmc/parallel/unit_transfer.h"
#include "llmc/plan/run_plan.h"
#include "mpi_test.h"

namespace llmc {
namespace {

using test::world;

// Of 4 blocks all recompute, or the second and the last, or the third alone.
constexpr GPTConfig config{.layers = 4, .heads = 2, .channels = 20, .sequence_length = 7, .vocabulary = 37};
constexpr int steps = 21, sequences_of_a_rank = 4;

struct Setting {
    DType dtype = DType::fp32;
    int micro_batches = 1;
};

struct Result {
    std::vector<double> losses, norms;
    std::vector<float> state;  // weights and moments, of all units, on the root
    std::uint64_t sent = 0, listed = 0;
};

// One for all runs, so that the primitives of its products are made once.
Device& device() {
    static const std::unique_ptr<Device> one = make_cpu_device(1);
    return *one;
}

Result train(Communicator& data, const Setting& setting, int stage, const Recompute& recompute) {
    const Sharding sharding{
        .stage = stage, .shards = data.size(), .reduces_each_micro_batch = setting.micro_batches > 1};
    const Mesh mesh{.sharding = sharding, .rank = data.rank()};
    const std::int64_t T = config.sequence_length, tokens = sequences_of_a_rank * data.size() * T;
    const RunPlan plan = plan_run({.config = config,
                                   .dtype = setting.dtype,
                                   .mesh = mesh,
                                   .recompute = recompute,
                                   .global_batch_tokens = tokens,
                                   .micro_batch_sequences = sequences_of_a_rank / setting.micro_batches},
                                  device().ops(), 0);
    const Arenas arenas(device(), plan.memory);
    ParameterStore store(device(), arenas, plan.store, 0.1, mesh.shard());
    device().ops().set_workspace(arenas[plan.workspace]);
    const MeshGroups groups(data, mesh);
    Executor executor(config, device(), groups, store, bind(plan.activations, arenas), setting.micro_batches,
                      true);
    store.initialize(1);
    executor.run(plan.publication, {});

    Result result;
    const auto sent = [&] { return groups.shards().traffic(CallKind::all_gather).bytes; };
    const std::uint64_t before = sent();
    for (int step = 1; step <= steps; ++step) {
        const auto load = [&](int micro_batch, std::span<std::int32_t> inputs,
                              std::span<std::int32_t> targets) {
            const std::int64_t first = data.rank() * plan.rank_sequences() + micro_batch * plan.micro_batch;
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                const std::int64_t token = static_cast<std::int64_t>(i) + first * T;
                inputs[i] = static_cast<std::int32_t>((7 * token + step) % 37);
                targets[i] = (5 * inputs[i] + 1) % 37;
            }
        };
        executor.run(plan.training, {.load = load,
                                     .sequences = plan.micro_batch,
                                     .loss_scale = 1.0F / static_cast<float>(tokens),
                                     .adamw = {step, 1e-3, 0.9, 0.95, 1e-8, 1.0},
                                     .rounding_seed = {}});
        const StepResults results = executor.results();
        result.losses.push_back(results.loss_sum);
        result.norms.push_back(results.norm_squared);
    }
    result.sent = sent() - before;
    result.listed = plan.sent.inside;

    UnitTransfer transfer(device(), store, data, mesh, plan.parts);
    for (const auto flat : {&UnitBuffers::master, &UnitBuffers::m, &UnitBuffers::v}) {
        for (int unit = 0; unit < store.units(); ++unit) {
            const std::span<const float> values = transfer.collect(unit, flat);
            result.state.insert(result.state.end(), values.begin(), values.end());
        }
    }
    return result;
}

void expect_same(const Result& a, const Result& b) {
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.norms, b.norms);
    ASSERT_EQ(a.state.size(), b.state.size());
    EXPECT_EQ(std::memcmp(a.state.data(), b.state.data(), a.state.size() * sizeof(float)), 0);
}

class RecomputedTraining : public testing::TestWithParam<Setting> {};

TEST_P(RecomputedTraining, IsTheSameRun) {
    const Setting setting = GetParam();
    const int ranks = world().size();
    // The whole matrix on one and two ranks.
    const std::vector<int> intervals = ranks <= 2 ? std::vector{1, 2, 3} : std::vector{2};
    const Result plain = train(world(), setting, 0, {});
    EXPECT_LT(plain.losses.back(), plain.losses.front());
    for (int stage = 0; stage <= (ranks > 1 ? 3 : 0); ++stage) {
        const Result kept = train(world(), setting, stage, {});
        expect_same(kept, plain);
        for (const RecomputeKind kind : {RecomputeKind::selective, RecomputeKind::block}) {
            for (const int every : intervals) {
                SCOPED_TRACE(fmt::format("stage {}, {}, every {}", stage, name_of(kind), every));
                const Result made_again = train(world(), setting, stage, {.kind = kind, .every = every});
                expect_same(made_again, plain);
                EXPECT_EQ(made_again.sent, kept.sent);
                EXPECT_EQ(made_again.listed, kept.listed);
            }
        }
    }
}

INSTANTIATE_TEST_SUITE_P(Settings, RecomputedTraining,
                         testing::Values(Setting{}, Setting{.micro_batches = 4},
                                         Setting{.dtype = DType::bf16},
                                         Setting{.dtype = DType::bf16, .micro_batches = 4}),
                         [](const auto& setting) {
                             return fmt::format("{}{}", llmc::name_of(setting.param.dtype),
                                                setting.param.micro_batches > 1 ? "_accumulated" : "");
                         });

}  // namespace
}  // namespace llmc
