// Training with the model's state in shards: every way to shard it trains the same run to the bit, sends the bytes that
// its list says, and leaves all ranks alike.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
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

// No size is a multiple of anything, and no number of ranks here divides the number of parameters.
constexpr GPTConfig config{.layers = 3, .heads = 2, .channels = 20, .sequence_length = 7, .vocabulary = 37};
constexpr int sequences_of_a_rank = 4, steps = 50;

struct Setting {
    DType dtype = DType::fp32, gradients = DType::fp32;
    int micro_batches = 1;
    bool each = false;  // of them is reduced
};

struct Result {
    std::vector<double> losses, norms;
    std::vector<float> state;  // weights and moments, of all units, on the root
    std::uint64_t inside = 0, across = 0;
    BytesSent of_list;
    std::uint64_t of_squares = 0;
};

std::string name_of(const Setting& setting, const Sharding& sharding) {
    return fmt::format("{}, gradients {}, {} micro-batches, each {}, stage {}, {} x {}",
                       name_of(setting.dtype), name_of(setting.gradients), setting.micro_batches,
                       setting.each, sharding.stage, sharding.replicas, sharding.shards);
}

// Adds a unit of the state to a vector on the root.
void append(std::vector<float>& to, std::span<const float> values) {
    to.insert(to.end(), values.begin(), values.end());
}

std::uint64_t bytes_of(const Communicator& ranks, std::initializer_list<CallKind> kinds) {
    std::uint64_t bytes = 0;
    for (const CallKind kind : kinds) bytes += ranks.traffic(kind).bytes;
    return bytes;
}

// One for all runs, so that the primitives of its products are made once.
Device& device() {
    static const std::unique_ptr<Device> one = make_cpu_device(1);
    return *one;
}

// A run on the ranks of `data`, whose batch is `sequences` in all.
Result train(Communicator& data, Sharding sharding, const Setting& setting, int sequences) {
    sharding.reduces_each_micro_batch = setting.each;
    const Mesh mesh{.sharding = sharding, .rank = data.rank()};
    const RunPlan plan = plan_run({.config = config,
                                   .dtype = setting.dtype,
                                   .gradient_dtype = setting.gradients,
                                   .mesh = mesh,
                                   .global_batch_tokens = sequences * config.sequence_length,
                                   .micro_batch_sequences = sequences / data.size() / setting.micro_batches},
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
    const auto inside = [&] {
        return bytes_of(groups.shards(), {CallKind::reduce_scatter, CallKind::all_gather});
    };
    const auto across = [&] {
        return sharding.replicas > 1 ? bytes_of(groups.replicas(), {CallKind::all_reduce}) : 0;
    };
    const std::uint64_t inside_before = inside(), across_before = across();
    for (int step = 1; step <= steps; ++step) {
        const auto load = [&](int micro_batch, std::span<std::int32_t> inputs,
                              std::span<std::int32_t> targets) {
            const std::int64_t first = data.rank() * plan.rank_sequences() + micro_batch * plan.micro_batch;
            for (std::size_t i = 0; i < inputs.size(); ++i) {
                const auto token = static_cast<std::int64_t>(i) + first * config.sequence_length;
                inputs[i] = static_cast<std::int32_t>((7 * token + step) % 37);
                targets[i] = (5 * inputs[i] + 1) % 37;
            }
        };
        const auto tokens = static_cast<double>(sequences * config.sequence_length);
        executor.run(plan.training, {.load = load,
                                     .sequences = plan.micro_batch,
                                     .loss_scale = static_cast<float>(1 / tokens),
                                     .adamw = {step, 1e-3, 0.9, 0.95, 1e-8, 1.0},
                                     .rounding_seed = {}});
        const StepResults results = executor.results();
        result.losses.push_back(results.loss_sum / tokens);
        result.norms.push_back(results.norm_squared);
    }
    result.inside = inside() - inside_before;
    result.across = across() - across_before;

    std::vector<UnitBytes> bytes;
    for (int unit = 0; unit < store.units(); ++unit) {
        const UnitBuffers& buffers = store.buffers(unit);
        bytes.push_back({.parameters = buffers.parameters.bytes(), .gradients = buffers.gradients.bytes()});
        const std::int64_t blocks = store.elements(unit) / norm_block_elements / sharding.shards;
        result.of_squares += static_cast<std::uint64_t>(blocks * (sharding.shards - 1)) * sizeof(float);
    }
    result.of_list = bytes_sent(plan.training, bytes, {});

    UnitTransfer transfer(device(), store, data, mesh, plan.parts);
    for (const auto flat : {&UnitBuffers::master, &UnitBuffers::m, &UnitBuffers::v}) {
        for (int unit = 0; unit < store.units(); ++unit) append(result.state, transfer.collect(unit, flat));
    }
    // Ranks that have the same are alike.
    for (int unit = 0; unit < store.units(); ++unit) {
        const Tensor& own = store.buffers(unit).parameter_shard;
        std::vector<std::byte> first(own.data, own.data + own.bytes());
        if (sharding.replicas > 1) groups.replicas().broadcast({first.data(), own.dtype, own.shape}, 0);
        EXPECT_EQ(std::memcmp(first.data(), own.data, own.bytes()), 0);
        if (!sharding.keeps_parameters_whole()) continue;
        const Tensor& whole = store.buffers(unit).parameters;
        std::vector<std::byte> of_first(whole.data, whole.data + whole.bytes());
        data.broadcast({of_first.data(), whole.dtype, whole.shape}, 0);
        EXPECT_EQ(std::memcmp(of_first.data(), whole.data, whole.bytes()), 0);
    }
    return result;
}

void expect_same(const Result& a, const Result& b) {
    EXPECT_EQ(a.losses, b.losses);
    EXPECT_EQ(a.norms, b.norms);
    ASSERT_EQ(a.state.size(), b.state.size());
    EXPECT_EQ(std::memcmp(a.state.data(), b.state.data(), a.state.size() * sizeof(float)), 0);
}

void expect_bytes_of_list(const Result& result) {
    EXPECT_EQ(result.inside, steps * (result.of_list.inside + result.of_squares));
    EXPECT_EQ(result.across, steps * result.of_list.across);
}

// One process and several add in different orders: 50 steps with a learning rate of 1e-3 in fp32.
void expect_near(const Result& a, const Result& b) {
    for (std::size_t i = 0; i < b.losses.size(); ++i)
        EXPECT_NEAR(a.losses[i], b.losses[i], 1e-5 * std::abs(b.losses[i])) << "step " << i + 1;
}

// All ways to shard on the ranks of `data`, but the first, which is stage 0.
std::vector<Sharding> shardings(int ranks, bool powers_of_two) {
    std::vector<Sharding> all;
    for (int shards = 2; shards <= ranks; ++shards) {
        const bool is_power = (shards & (shards - 1)) == 0 || shards == ranks;
        if (ranks % shards != 0 || is_power != powers_of_two) continue;
        for (int stage = 1; stage <= 3; ++stage)
            all.push_back({.stage = stage, .shards = shards, .replicas = ranks / shards});
    }
    return all;
}

class ShardedTraining : public testing::TestWithParam<Setting> {};

TEST_P(ShardedTraining, IsTheSameRunAtEveryStage) {
    const Setting setting = GetParam();
    const int ranks = world().size(), sequences = sequences_of_a_rank * ranks;
    const Result whole = train(world(), {.shards = ranks}, setting, sequences);
    expect_bytes_of_list(whole);
    EXPECT_LT(whole.losses.back(), whole.losses.front());
    for (const Sharding& sharding : shardings(ranks, true)) {
        SCOPED_TRACE(name_of(setting, sharding));
        // Gradients in bf16 are rounded once more between a group's sum and that over groups.
        if (sharding.replicas > 1 && setting.gradients == DType::bf16) continue;
        const Result sharded = train(world(), sharding, setting, sequences);
        expect_same(sharded, whole);
        expect_bytes_of_list(sharded);
    }
    if (setting.dtype != DType::fp32) return;
    const auto alone = world().split(world().rank(), 0);
    Setting at_once = setting;
    at_once.micro_batches = 1;
    expect_near(whole, train(*alone, {}, at_once, sequences));
}

INSTANTIATE_TEST_SUITE_P(
    Settings, ShardedTraining,
    testing::Values(Setting{}, Setting{.micro_batches = 4}, Setting{.micro_batches = 4, .each = true},
                    Setting{.dtype = DType::bf16}, Setting{.dtype = DType::bf16, .micro_batches = 4},
                    Setting{.dtype = DType::bf16, .micro_batches = 4, .each = true},
                    Setting{.dtype = DType::bf16, .gradients = DType::bf16, .micro_batches = 4},
                    Setting{
                        .dtype = DType::bf16, .gradients = DType::bf16, .micro_batches = 4, .each = true}),
    [](const auto& setting) {
        const Setting& s = setting.param;
        return fmt::format("{}{}{}{}", llmc::name_of(s.dtype),
                           s.gradients == DType::bf16 ? "_gradients_too" : "",
                           s.micro_batches > 1 ? "_accumulated" : "", s.each ? "_reduced_each" : "");
    });

TEST(HybridSharding, WithGroupsOfThreeIsNearTheWholeRun) {
    if (world().size() < 6) GTEST_SKIP() << "takes 6 ranks";
    const bool takes_part = world().rank() < 6;
    const auto six = world().split(takes_part ? 0 : 1, world().rank());
    if (!takes_part) return;
    const Result whole = train(*six, {.shards = 6}, {}, 24);
    for (const Sharding& sharding : shardings(6, false)) {
        SCOPED_TRACE(name_of({}, sharding));
        const Result sharded = train(*six, sharding, {}, 24);
        expect_near(sharded, whole);
        expect_bytes_of_list(sharded);
    }
}

// Half the bytes, for half the dtype.
TEST(GradientBytes, AreHalfInBf16) {
    const Setting halved{.dtype = DType::bf16, .gradients = DType::bf16};
    const int ranks = world().size();
    const Result whole = train(world(), {.shards = ranks}, {.dtype = DType::bf16}, ranks);
    const Result half = train(world(), {.shards = ranks}, halved, ranks);
    EXPECT_EQ(whole.of_list.inside, 2 * half.of_list.inside);
    EXPECT_EQ(half.of_list.inside > 0, ranks > 1);
}

}  // namespace
}  // namespace llmc
