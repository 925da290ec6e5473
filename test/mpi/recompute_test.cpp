// Training with recompute. For every kind and interval of recompute, and at every ZeRO stage, the run is the
// same bit by bit and sends the same bytes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <vector>

#include "mpi_test.h"
#include "training_run.h"

namespace llmc {
namespace {

using test::TrainingResult;
using test::world;

// 4 blocks: all of them recompute, or the second and the last, or only the third.
constexpr GPTConfig config{.layers = 4, .heads = 2, .channels = 20, .sequence_length = 7, .vocabulary = 37};
constexpr int steps = 21, sequences_of_a_rank = 4;

struct Setting {
    DType dtype = DType::fp32;
    int micro_batches = 1;
};

TrainingResult train(const Setting& setting, int stage, const Recompute& recompute) {
    const int ranks = world().size();
    return test::train(
        world(),
        {.config = config,
         .dtype = setting.dtype,
         .sharding = {.stage = stage, .shards = ranks, .reduces_each_micro_batch = setting.micro_batches > 1},
         .recompute = recompute,
         .sequences = sequences_of_a_rank * ranks,
         .micro_batches = setting.micro_batches,
         .steps = steps});
}

class RecomputedTraining : public testing::TestWithParam<Setting> {};

TEST_P(RecomputedTraining, IsTheSameRun) {
    const Setting setting = GetParam();
    const int ranks = world().size();
    if (ranks > 4) GTEST_SKIP() << "takes 4 ranks at most; the parallel matrix has more";
    // One and two ranks train with every interval.
    const std::vector<int> intervals = ranks <= 2 ? std::vector{1, 2, 3} : std::vector{2};
    const TrainingResult plain = train(setting, 0, {});
    EXPECT_LT(plain.losses.back(), plain.losses.front());
    for (int stage = 0; stage <= (ranks > 1 ? 3 : 0); ++stage) {
        const TrainingResult kept = train(setting, stage, {});
        expect_same(kept, plain);
        for (const RecomputeKind kind : {RecomputeKind::selective, RecomputeKind::block}) {
            for (const int every : intervals) {
                SCOPED_TRACE(fmt::format("stage {}, {}, every {}", stage, name_of(kind), every));
                const TrainingResult recomputed = train(setting, stage, {.kind = kind, .every = every});
                expect_same(recomputed, plain);
                EXPECT_EQ(recomputed.counted.inside, kept.counted.inside);
                EXPECT_EQ(recomputed.listed.inside, kept.listed.inside);
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
