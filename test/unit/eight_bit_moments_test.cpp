// State in 8 bits: the table, its nearest entries, and AdamW with blocks of them.
#include "llmc/device/eight_bit_state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <span>
#include <vector>

#include "cpu_test_support.h"

namespace llmc::cpu_test {
namespace {

TEST(EightBitMoments, HaveATableOfSevenDecades) {
    for (const bool has_sign : {false, true}) {
        const EightBitTable table = eight_bit_table(has_sign);
        EXPECT_EQ(std::set<float>(table.begin(), table.end()).size(), 256U);
        EXPECT_TRUE(std::ranges::is_sorted(table));
        EXPECT_EQ(table.back(), 1);
        EXPECT_EQ(table.front(), has_sign ? -1 : 0);
        EXPECT_EQ(std::ranges::count(table, 0.0F), 1);
        // 1, 2, 4 ... 64 numbers of each sign in the decades up to 10^-6 ... 1, and 1 itself.
        for (int decade = 0; decade < 7; ++decade) {
            const double high = std::pow(10.0, decade - 6);
            const auto inside =
                std::ranges::count_if(table, [&](float x) { return x > high / 10 && x < high; });
            EXPECT_EQ(inside, (has_sign ? 1 : 2) << decade) << high;
        }
    }
}

TEST(EightBitMoments, TakeTheNearestEntry) {
    const RandomStream random(1, "entries");
    for (const bool has_sign : {false, true}) {
        const EightBitTable table = eight_bit_table(has_sign);
        for (std::uint64_t i = 0; i < 20000; ++i) {
            const double sign = has_sign && random.below(3 * i, 2) == 1 ? -1 : 1;
            const auto x = static_cast<float>(sign * random.uniform(3 * i + 1) *
                                              std::pow(10.0, -7 * random.uniform(3 * i + 2)));
            std::uint8_t number = 0;
            nearest_entries(&number, std::span(&x, 1), table);
            const float entry = table[number];
            for (const float other : table) ASSERT_LE(std::fabs(entry - x), std::fabs(other - x)) << x;
            ASSERT_TRUE(entry == 0 || (entry > 0) == (x > 0));
        }
        std::vector<std::uint8_t> all(table.size());
        nearest_entries(all.data(), table, table);
        for (std::size_t i = 0; i < table.size(); ++i) EXPECT_EQ(all[i], i);
    }
}

// However small beside the block's greatest: a first moment beside 0 would be divided by eps.
TEST(EightBitMoments, KeepPositiveSecondMomentsPositive) {
    std::vector<float> values(eight_bit_block, 0.0F);
    values[0] = 3.0F;
    for (std::size_t i = 1; i < 100; ++i) values[i] = std::ldexp(3.0F, -static_cast<int>(i));
    std::vector<std::uint8_t> entries(eight_bit_block);
    to_8_bits(entries.data(), values, table_in_8_bits(false));
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(entries[i] > 0, values[i] > 0) << i;
    to_8_bits(entries.data(), values, table_in_8_bits(true));
    EXPECT_EQ(table_in_8_bits(true)[entries[99]], 0);
}

// A block that is stored and read stays what it is, also if its greatest number is negative.
TEST(EightBitMoments, AreTheSameAfterARoundTrip) {
    const RandomStream random(1, "block");
    std::vector<float> values(eight_bit_block), read(eight_bit_block);
    std::vector<std::uint8_t> entries(eight_bit_block), again(eight_bit_block);
    for (std::uint64_t block = 0; block < 100; ++block) {
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] =
                static_cast<float>(random.normal(block * 256 + i) * std::exp2(-10 * random.uniform(i)));
        values[block] = -9 * std::exp2(static_cast<float>(block) / 3);
        const EightBitTable& table = table_in_8_bits(true);
        const float amax = to_8_bits(entries.data(), values, table);
        EXPECT_EQ(amax, -values[block]);
        from_8_bits(read, entries.data(), amax, table);
        EXPECT_EQ(read[block], values[block]);
        EXPECT_EQ(to_8_bits(again.data(), read, table), amax);
        EXPECT_EQ(again, entries);
    }
    std::ranges::fill(values, 0.0F);
    EXPECT_EQ(to_8_bits(entries.data(), values, table_in_8_bits(false)), 0);
    from_8_bits(read, entries.data(), 0, table_in_8_bits(false));
    EXPECT_EQ(read, values);
}

// The update is that of the state in fp32, which is then stored in 8 bits. Two tensors and padding share a block;
// the small tensor's state stays in fp32 and counts as 0 in it.
TEST(EightBitMoments, AreUpdatedInFp32) {
    constexpr std::int64_t n = 4 * eight_bit_block, small = 40;
    const std::vector<UpdateSegment> segments = {{0, 300, 0.1}, {384, 384 + small, 0.0, 8}, {512, 1000, 0.2}};
    const UpdateStep step{3, 1e-2, {0.9, 0.95, 1e-8}, 1.0};
    const OwnedTensor norm = filled(DType::fp64, {1}, 4.0), gradients = normal(DType::fp32, {n}, "gradients");
    for (const DType dtype : {DType::fp32, DType::bf16}) {
        OwnedTensor master = normal(DType::fp32, {n}, "master"),
                    wide_master = normal(DType::fp32, {n}, "master");
        OwnedTensor rounded = filled(DType::bf16, {n}, 1.0), wide_rounded = filled(DType::bf16, {n}, 1.0);
        std::vector<OwnedTensor> entries, amax, of_small, wide;
        for (const bool is_first : {true, false}) {
            const EightBitTable& table = table_in_8_bits(is_first);
            OwnedTensor values = normal(DType::fp32, {n}, is_first ? "m" : "v", 0.1);
            for (std::int64_t i = 0; i < n; ++i) {
                const bool is_large = std::ranges::any_of(segments, [&](const UpdateSegment& segment) {
                    return segment.in_packed < 0 && segment.begin <= i && i < segment.end;
                });
                values.set(i, !is_large ? 0.0 : is_first ? values.get(i) : std::fabs(values.get(i)));
            }
            OwnedTensor in_8_bits(DType::uint8, {n}), greatest(DType::fp32, {n / eight_bit_block}),
                kept = normal(DType::fp32, {small + 16}, "small", 0.1);
            for (std::int64_t i = 0; i < kept->elements(); ++i) kept.set(i, std::fabs(kept.get(i)));
            for (std::int64_t block = 0; block < n / eight_bit_block; ++block) {
                const auto of_block = values->span<float>().subspan(
                    static_cast<std::size_t>(block * eight_bit_block), eight_bit_block);
                std::uint8_t* const to = in_8_bits->as<std::uint8_t>() + block * eight_bit_block;
                greatest.set(block, to_8_bits(to, of_block, table));
                from_8_bits(of_block, to, static_cast<float>(greatest.get(block)), table);
            }
            for (std::int64_t i = 0; i < small; ++i) values.set(384 + i, kept.get(8 + i));
            entries.push_back(std::move(in_8_bits));
            amax.push_back(std::move(greatest));
            of_small.push_back(std::move(kept));
            wide.push_back(std::move(values));
        }
        const bool has_master = dtype != DType::fp32;
        Operations ops(2);
        ops->run(OptimizerUpdate{OptimizerKind::adamw,
                                 has_master ? *rounded : *master,
                                 master,
                                 gradients,
                                 norm,
                                 {{{entries[0], amax[0], of_small[0]}, {entries[1], amax[1], of_small[1]}}},
                                 segments,
                                 step});
        ops->run(OptimizerUpdate{OptimizerKind::adamw,
                                 has_master ? *wide_rounded : *wide_master,
                                 wide_master,
                                 gradients,
                                 norm,
                                 {{{wide[0]}, {wide[1]}}},
                                 segments,
                                 step});
        EXPECT_EQ(master.bytes(), wide_master.bytes());
        EXPECT_EQ(rounded.bytes(), wide_rounded.bytes());
        for (const std::size_t which : {0U, 1U}) {
            const EightBitTable& table = table_in_8_bits(which == 0);
            for (std::int64_t i = 0; i < small; ++i) {
                EXPECT_EQ(of_small[which].get(8 + i), wide[which].get(384 + i));
                wide[which].set(384 + i, 0);
            }
            std::vector<std::uint8_t> expected(eight_bit_block);
            for (std::int64_t block = 0; block < n / eight_bit_block; ++block) {
                const auto of_block = wide[which]->span<float>().subspan(
                    static_cast<std::size_t>(block * eight_bit_block), eight_bit_block);
                EXPECT_EQ(amax[which].get(block), to_8_bits(expected.data(), of_block, table));
                EXPECT_TRUE(std::ranges::equal(
                    expected, entries[which]->span<std::uint8_t>().subspan(
                                  static_cast<std::size_t>(block * eight_bit_block), eight_bit_block)));
            }
        }
    }
}

}  // namespace
}  // namespace llmc::cpu_test
