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
    const auto expected = small_run().trainer().generate({.prompt = prompt, .count = count}, go_on);
    test::TrainerRun run = small_run();
    const Tensor positions = run.trainer().store().buffers(wpe_unit).parameters;
    ASSERT_EQ(positions.dtype, DType::fp32);
    constexpr std::ptrdiff_t channels = 32;
    std::ptrdiff_t computed = std::ssize(prompt);
    const auto forget = [&](std::int32_t) {
        std::fill_n(positions.as<float>(), channels * computed++, std::numeric_limits<float>::quiet_NaN());
    };
    EXPECT_EQ(run.trainer().generate({.prompt = prompt, .count = count, .take = forget}, go_on), expected);
    EXPECT_EQ(computed, std::ssize(prompt) + count);
}

// A text that goes on from an earlier one computes only the rows behind their common beginning, and the last.
TEST(Generation, KeepsTheContextOfTheLastText) {
    using Tokens = std::vector<std::int32_t>;
    test::TrainerRun run = small_run(), other = small_run();
    KeptContext kept;
    // The rows that a text computes. Its tokens are those of a run that keeps nothing.
    const auto rows_of = [&](const Tokens& prompt, std::int64_t count) {
        const std::int64_t before = kept.computed_rows;
        EXPECT_EQ(run.trainer().generate({.prompt = prompt, .count = count, .kept = &kept}, go_on),
                  other.trainer().generate({.prompt = prompt, .count = count}, go_on));
        return kept.computed_rows - before;
    };
    EXPECT_EQ(rows_of({3, 141, 59}, 1), 3);
    EXPECT_EQ(kept.tokens, (Tokens{3, 141, 59}));
    EXPECT_EQ(rows_of({3, 141, 59}, 2), 1 + 1);  // the last row gives the first token
    ASSERT_EQ(kept.tokens.size(), 4U);
    const std::int32_t first = kept.tokens[3];
    EXPECT_EQ(rows_of({3, 141, 59, first, 26, 5}, 1), 2);
    EXPECT_EQ(rows_of({3, 141, 27}, 1), 1);
    EXPECT_EQ(kept.tokens, (Tokens{3, 141, 27}));
}

TEST(Generation, EndsBeforeAnEndToken) {
    const std::vector<std::int32_t> prompt = {3, 141, 59};
    test::TrainerRun run = small_run();
    const auto all = run.trainer().generate({.prompt = prompt, .count = 5}, go_on).value();
    const std::vector<std::int32_t> ends = {all[2], 1'000'000};
    std::vector<std::int32_t> taken;
    const auto take = [&](std::int32_t token) { taken.push_back(token); };
    const auto some =
        run.trainer().generate({.prompt = prompt, .count = 5, .ends = ends, .take = take}, go_on).value();
    EXPECT_EQ(some, std::vector(all.begin(), std::ranges::find(all, all[2])));
    EXPECT_EQ(taken, some);
}

}  // namespace
}  // namespace llmc
