// Training with the model's state sharded. Every way to shard it trains the same run bit by bit, sends the
// bytes of its list, and leaves all ranks with equal state.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "mpi_test.h"
#include "training_run.h"

namespace llmc {
namespace {

using test::TrainingResult;
using test::world;

// No size is a multiple of 8, and no number of ranks here divides the number of parameters.
constexpr GPTConfig config{.layers = 3, .heads = 2, .channels = 20, .sequence_length = 7, .vocabulary = 37};
constexpr int sequences_of_a_rank = 4;

struct Setting {
    DType dtype = DType::fp32, gradients = DType::fp32;
    int micro_batches = 1, steps = 50;
    bool each = false;  // the gradients of each micro-batch are reduced
};

// A run on the ranks of `data`, with a batch of `sequences` over all ranks.
TrainingResult train(Communicator& data, Sharding sharding, const Setting& setting, int sequences) {
    sharding.reduces_each_micro_batch = setting.each;
    const test::TrainingSetting training{.config = config,
                                         .dtype = setting.dtype,
                                         .gradients = setting.gradients,
                                         .sharding = sharding,
                                         .sequences = sequences,
                                         .micro_batches = setting.micro_batches,
                                         .steps = setting.steps};
    SCOPED_TRACE(to_string(training));
    TrainingResult result = test::train(data, training);
    expect_bytes_of_list(result);
    return result;
}

// One process and several add in different orders. The bound holds for up to 50 steps with a learning rate of
// 1e-3 in fp32.
void expect_near(const TrainingResult& a, const TrainingResult& b) { expect_near_losses(a, b, 1e-5); }

// All ways to shard over this many ranks, except stage 0. With `powers_of_two`, the number of shards is a
// power of two or the number of ranks; without it, only the other numbers.
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
    const TrainingResult whole = train(world(), {.shards = ranks}, setting, sequences);
    EXPECT_LT(whole.losses.back(), whole.losses.front());
    for (const Sharding& sharding : shardings(ranks, true)) {
        SCOPED_TRACE(sharding.description());
        const TrainingResult sharded = train(world(), sharding, setting, sequences);
        expect_same(sharded, whole);
    }
    if (setting.dtype != DType::fp32) return;
    const auto alone = world().split(world().rank(), 0);
    Setting at_once = setting;
    at_once.micro_batches = 1;
    expect_near(whole, train(*alone, {}, at_once, sequences));
}

INSTANTIATE_TEST_SUITE_P(Settings, ShardedTraining, testing::ValuesIn([] {
                             std::vector<Setting> all = {{}, {.dtype = DType::bf16}};
                             for (const bool each : {false, true}) {
                                 for (const auto& [dtype, gradients] : {std::pair{DType::fp32, DType::fp32},
                                                                        {DType::bf16, DType::fp32},
                                                                        {DType::bf16, DType::bf16}})
                                     all.push_back({dtype, gradients, 4, 20, each});  // 80 passes
                             }
                             return all;
                         }()),
                         [](const auto& setting) {
                             const Setting& s = setting.param;
                             return fmt::format("{}{}{}{}", llmc::name_of(s.dtype),
                                                s.gradients == DType::bf16 ? "_gradients_too" : "",
                                                s.micro_batches > 1 ? "_accumulated" : "",
                                                s.each ? "_reduced_each" : "");
                         });

TEST(HybridSharding, WithGroupsOfThreeIsNearTheWholeRun) {
    if (world().size() < 6) GTEST_SKIP() << "takes 6 ranks";
    const bool takes_part = world().rank() < 6;
    const auto six = world().split(takes_part ? 0 : 1, world().rank());
    if (!takes_part) return;
    const TrainingResult whole = train(*six, {.shards = 6}, {}, 24);
    for (const Sharding& sharding : shardings(6, false)) {
        SCOPED_TRACE(sharding.description());
        const TrainingResult sharded = train(*six, sharding, {}, 24);
        expect_near(sharded, whole);
    }
}

// A dtype of half the size takes half the bytes.
TEST(GradientBytes, AreHalfInBf16) {
    const Setting halved{.dtype = DType::bf16, .gradients = DType::bf16};
    const int ranks = world().size();
    const TrainingResult whole = train(world(), {.shards = ranks}, {.dtype = DType::bf16}, ranks);
    const TrainingResult half = train(world(), {.shards = ranks}, halved, ranks);
    EXPECT_EQ(whole.listed.inside, 2 * half.listed.inside);
    EXPECT_EQ(half.listed.inside > 0, ranks > 1);
}

}  // namespace
}  // namespace llmc
