// This process's share of the cores, computed from the masks of all processes on its machine.

#include <gtest/gtest.h>

#include <initializer_list>
#include <vector>

#include "llmc/comm/bootstrap.h"

namespace llmc {
namespace {

CoreMask mask_of(std::initializer_list<std::size_t> cores) {
    CoreMask mask;
    for (const std::size_t core : cores) mask.set(core);
    return mask;
}

std::vector<int> shares(const std::vector<CoreMask>& masks) {
    std::vector<int> shares;
    for (std::size_t rank = 0; rank < masks.size(); ++rank)
        shares.push_back(share_of_cores(masks, static_cast<int>(rank)));
    return shares;
}

TEST(ShareOfCores, UnboundRanksDivideThem) {
    const CoreMask six = mask_of({0, 1, 2, 3, 4, 5});
    EXPECT_EQ(shares({six}), std::vector<int>({6}));
    EXPECT_EQ(shares({six, six}), std::vector<int>({3, 3}));
    EXPECT_EQ(shares({six, six, six}), std::vector<int>({2, 2, 2}));
    EXPECT_EQ(shares({six, six, six, six}), std::vector<int>({1, 1, 1, 1}));
}

// Sums of thirds or sevenths are not exact in binary.
TEST(ShareOfCores, EvenDivisionsAreExact) {
    for (std::size_t ranks = 1; ranks <= 100; ++ranks)
        for (std::size_t each : {1, 2, 7}) {
            CoreMask all;
            for (std::size_t core = 0; core < ranks * each; ++core) all.set(core);
            EXPECT_EQ(share_of_cores(std::vector<CoreMask>(ranks, all), 0), static_cast<int>(each)) << ranks;
        }
}

TEST(ShareOfCores, MoreRanksThanCoresHaveOneEach) {
    const CoreMask two = mask_of({0, 1});
    EXPECT_EQ(shares({two, two, two}), std::vector<int>({1, 1, 1}));
}

TEST(ShareOfCores, BoundRanksKeepTheirOwn) {
    EXPECT_EQ(shares({mask_of({0}), mask_of({1})}), std::vector<int>({1, 1}));
    EXPECT_EQ(shares({mask_of({0, 1, 2}), mask_of({100, 8191})}), std::vector<int>({3, 2}));
}

TEST(ShareOfCores, RanksBoundToOneSocketDivideIt) {
    const CoreMask first = mask_of({0, 1, 2, 3});
    const CoreMask second = mask_of({4, 5, 6, 7});
    EXPECT_EQ(shares({first, first, second, second}), std::vector<int>({2, 2, 2, 2}));
    EXPECT_EQ(shares({first, first, second}), std::vector<int>({2, 2, 4}));
}

TEST(ShareOfCores, OverlapsAreDividedCoreByCore) {
    EXPECT_EQ(shares({mask_of({0, 1, 2, 3}), mask_of({2, 3})}), std::vector<int>({3, 1}));
}

TEST(ShareOfCores, IsOneWhereNothingIsKnown) { EXPECT_EQ(shares({CoreMask{}}), std::vector<int>({1})); }

}  // namespace
}  // namespace llmc
