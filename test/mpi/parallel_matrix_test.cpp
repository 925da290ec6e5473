// The parallel matrix of GPT-2: all settings for the number of ranks of this job. `make test-matrix` trains
// each. `make test` trains enough of them that every two values meet on some number of ranks.
//
// Runs that differ only in the schedule, the ZeRO stage or recompute agree bit by bit. In fp32, every run is
// near that of one process.
#include <gtest/gtest.h>

#include <algorithm>

#include "mpi_test.h"
#include "parallel_matrix.h"

namespace llmc {
namespace {

using test::Equals;
using test::TrainingSetting;

// Eight layers, so that each of 4 stages has 2 chunks. Two heads and an even number of tokens, so that ranks
// can share them. No other size is a multiple of 8.
constexpr GPTConfig config{.layers = 8, .heads = 2, .channels = 14, .sequence_length = 6, .vocabulary = 37};
const test::Matrix matrix{.plain = {.config = config, .sequences = 16, .steps = 30, .reads = true},
                          .meshes = test::meshes_of_powers_of_two()};

// These values must meet all together, because the order of the list depends on all of them. Some blocks
// recompute, and others do not, while shards of gradients are received.
bool must_be_in_part(const TrainingSetting& s) {
    return s.ranks() == 4 && s.schedule == PipelineSchedule::zb_h1 && s.sharding.stage == 2 &&
           s.sharding.reduces_each_micro_batch && s.micro_batches == 4 && s.dtype == DType::fp32 &&
           s.recompute == Recompute{.kind = RecomputeKind::block, .every = 2};
}

std::vector<Equals> part_of_matrix() { return test::part_of_matrix(whole_matrix(matrix), must_be_in_part); }

TEST(ParallelMatrix, EveryTwoValuesMeetInRunsThatAreTheSame) {
    for (const Equals& settings : part_of_matrix()) {
        if (fits_here(settings)) expect_one_run(matrix, settings);
    }
}

// The part does what its name says: every two values meet in it.
TEST(ParallelMatrix, HasAPartInWhichEveryTwoValuesMeet) {
    const std::vector<Equals> part = part_of_matrix();
    std::size_t count = 0;
    std::int64_t hard = 0;
    for (const Equals& settings : part) {
        count += settings.size();
        hard += std::ranges::count_if(settings, must_be_in_part);
    }
    EXPECT_EQ(hard, 1);
    EXPECT_EQ(count_unmet(whole_matrix(matrix), part), 0);
    EXPECT_LT(count, 100U);
}

class WholeMatrix : public testing::TestWithParam<Equals> {};

TEST_P(WholeMatrix, TrainsOneRun) {
    if (!fits_here(GetParam())) GTEST_SKIP() << "needs another number of ranks";
    expect_one_run(matrix, GetParam());
}

INSTANTIATE_TEST_SUITE_P(All, WholeMatrix, testing::ValuesIn(whole_matrix(matrix)),
                         [](const auto& run) { return name_of_run(run.param); });

}  // namespace
}  // namespace llmc
