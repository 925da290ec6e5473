// The sum of ranks' contributions as a tree of adjacent pairs, for any number of ranks, against the tree
// written out as text. The communicator's own tests run it with up to 8 ranks.

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "llmc/comm/tree_sum.h"

namespace llmc {
namespace {

template <class T>
std::vector<const std::byte*> pieces_of(const std::vector<std::vector<T>>& all) {
    std::vector<const std::byte*> pieces;
    for (const auto& piece : all) pieces.push_back(reinterpret_cast<const std::byte*>(piece.data()));
    return pieces;
}

template <class T>
std::vector<T> tree_sum_of(const std::vector<std::vector<T>>& all) {
    std::vector<T> sum(all[0].size());
    tree_sum<T>(sum.data(), pieces_of(all), sum.size());
    return sum;
}

float sum_of(const std::vector<float>& values) {
    std::vector<std::vector<float>> all;
    for (const float value : values) all.push_back({value});
    return tree_sum_of(all)[0];
}

// With u = 2^-24, half an ulp of 1, a sum shows its order: 1 + u is 1 again, but u + u is kept.
constexpr float u = 0x1p-24f;

TEST(TreeSum, AddsAdjacentPairs) {
    EXPECT_EQ(sum_of({1, u}), 1);
    EXPECT_EQ(sum_of({1, u, u}), 1);                      // (1+u) + u
    EXPECT_EQ(sum_of({u, u, 1}), 1 + 2 * u);              // (u+u) + 1
    EXPECT_EQ(sum_of({u, 1, u}), 1);                      // (u+1) + u
    EXPECT_EQ(sum_of({1, u, u, u}), 1 + 2 * u);           // (1+u) + (u+u); adding one by one would give 1
    EXPECT_EQ(sum_of({1, u, u, u, u}), 1 + 4 * u);        // (1+2u) + u: a tie goes to the even neighbour
    EXPECT_EQ(sum_of({1, 0, 0, 0, u, u}), 1 + 2 * u);     // the pair 4, 5 moves up together
    EXPECT_EQ(sum_of({1, 0, 0, 0, u, 0, u}), 1 + 2 * u);  // ((u+0) + u)
    EXPECT_EQ(sum_of({0, 0, 0, 0, 1, u, u}), 1);          // ((1+u) + u)
}

// A number of ranks in real use, written out.
TEST(TreeSum, ElevenAsWrittenOut) {
    std::vector<float> x;
    for (int i = 0; i < 11; ++i)
        x.push_back(std::ldexp(1.0f + static_cast<float>(i * i) * 0x1p-20f, (i * 7) % 13));
    const float written =
        (((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))) + ((x[8] + x[9]) + x[10]);
    EXPECT_EQ(sum_of(x), written);
    float one_by_one = 0;
    for (const float value : x) one_by_one += value;
    EXPECT_NE(written, one_by_one) << "the values are to tell the orders apart";
}

// 1 and 2^-8 fit bf16, but their sum does not. Eight of 2^-8 make 2^-5 only if they are added before
// rounding.
TEST(TreeSum, Bf16IsRoundedOnceAtTheEnd) {
    std::vector<std::vector<bfloat16>> all(9, {to_bfloat16(0x1p-8f)});
    all[0] = {to_bfloat16(1)};
    // 1 + 8 * 2^-8 = 1.03125 is a bf16 number. With a rounding after each addition, 1 + 2^-8 would be 1
    // again.
    EXPECT_EQ(to_float(tree_sum_of(all)[0]), 1.03125f);
}

TEST(TreeSum, Fp64IsAddedInFp64) {
    const std::vector<std::vector<double>> all = {{1.0}, {0x1p-50}};
    EXPECT_EQ(tree_sum_of(all)[0], 1.0 + 0x1p-50);
}

TEST(TreeSum, EveryElementOfManyBlocks) {
    constexpr std::size_t count = 3 * 512 + 100;
    std::vector<std::vector<float>> all(3, std::vector<float>(count));
    for (std::size_t i = 0; i < count; ++i)
        for (std::size_t k = 0; k < 3; ++k) all[k][i] = static_cast<float>(i * (k + 1));
    const auto sum = tree_sum_of(all);
    for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(sum[i], static_cast<float>(i * 6)) << i;
}

TEST(TreeSum, MayReplaceAPiece) {
    for (std::size_t replaced = 0; replaced < 5; ++replaced) {
        std::vector<std::vector<float>> all(5, std::vector<float>(700, 1));
        tree_sum<float>(all[replaced].data(), pieces_of(all), 700);
        EXPECT_EQ(all[replaced], std::vector<float>(700, 5));
    }
}

}  // namespace
}  // namespace llmc
