// The trainer avoids repeated work that would not change its results. Each row of an evaluation is computed
// on one data rank, and each token of a text once.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "mpi_test.h"
#include "test/gpt2_units.h"
#include "trainer_run.h"

namespace llmc {
namespace {

using test::world;

// All ranks are data-parallel.
test::TrainerRun small_run() { return test::TrainerRun({"--temperature=0"}); }

bool go_on(double) { return true; }

TEST(Evaluation, IsSharedByTheDataRanks) {
    test::TrainerRun run = small_run();
    constexpr std::int64_t rows = 53;
    std::vector<double> reads(rows);
    const auto read = [&](std::int64_t row, std::span<std::int32_t> inputs, std::span<std::int32_t> targets) {
        reads.at(static_cast<std::size_t>(row)) += 1;
        std::ranges::fill(inputs, static_cast<std::int32_t>(row));
        std::ranges::fill(targets, static_cast<std::int32_t>(row + 1));
    };
    const auto losses = run.trainer().losses_of_rows(rows, read, go_on);
    ASSERT_TRUE(losses);
    EXPECT_GT(std::ranges::min(*losses), 0);
    world().all_reduce({reinterpret_cast<std::byte*>(reads.data()), DType::fp64, {rows}});
    EXPECT_EQ(reads, std::vector<double>(rows, 1));
}

// Computed positions are not needed any more: generation continues unchanged without their embeddings.
TEST(Generation, ComputesNoPositionTwice) {
    const std::vector<std::int32_t> prompt = {3, 141, 59};
    constexpr std::int64_t count = 5;  // fills the rest of the context
    const auto expected = small_run().trainer().generate(prompt, count, go_on);
    test::TrainerRun run = small_run();
    const Tensor positions = run.trainer().store().buffers(wpe_unit).parameters;
    ASSERT_EQ(positions.dtype, DType::fp32);
    constexpr std::ptrdiff_t channels = 32;
    std::ptrdiff_t computed = std::ssize(prompt);
    const auto forget = [&](std::int32_t) {
        std::fill_n(positions.as<float>(), channels * computed++, std::numeric_limits<float>::quiet_NaN());
    };
    EXPECT_EQ(run.trainer().generate(prompt, count, go_on, forget), expected);
    EXPECT_EQ(computed, std::ssize(prompt) + count);
}

}  // namespace
}  // namespace llmc
