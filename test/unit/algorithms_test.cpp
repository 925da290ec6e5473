// The texts that name devices' chosen algorithms, and which of several texts is kept.
#include "llmc/train/algorithms.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "llmc/core/error.h"

namespace llmc {
namespace {

constexpr const char* one = "GPU A, library 1\n2x2 N: 1 2\n3x3 T: 4\n";
constexpr const char* other = "GPU A, library 2\n2x2 N: 9\n";

TEST(Algorithms, InAMergeTheSecondTextWins) {
    EXPECT_EQ(merged_choices("", one), one);
    EXPECT_EQ(merged_choices(one, ""), one);
    EXPECT_EQ(merged_choices(one, one), one);
    EXPECT_EQ(merged_choices(one, "GPU A, library 1\n3x3 T: 5\n1x1: 0\n"),
              "GPU A, library 1\n1x1: 0\n2x2 N: 1 2\n3x3 T: 5\n");
    const std::string both = std::string(one) + "\n" + other;
    EXPECT_EQ(merged_choices(other, one), both);
    EXPECT_EQ(merged_choices(both, other), both);
    EXPECT_EQ(number_of_choices(both), 3);
}

TEST(Algorithms, AddedIsWhatTheFirstDoesNotSay) {
    EXPECT_EQ(added_choices("", one), one);
    EXPECT_EQ(added_choices(other, one), one) << "another library's";
    EXPECT_EQ(added_choices(merged_choices(one, other), one), "");
    EXPECT_EQ(added_choices(one, "GPU A, library 1\n2x2 N: 1 2\n3x3 T: 5\n1x1: 0\n"),
              "GPU A, library 1\n1x1: 0\n3x3 T: 5\n");
    EXPECT_EQ(number_of_choices(""), 0);
}

TEST(Algorithms, WhatIsNoChoiceIsPassedOver) {
    EXPECT_EQ(merged_choices("\n\nGPU A, library 1\nnothing\n\n\n\nGPU B", ""), "");
    EXPECT_EQ(merged_choices("GPU A, library 1\nnothing\n2x2: 1", ""), "GPU A, library 1\n2x2: 1\n");
}

TEST(Algorithms, TheCpuHasNone) {
    const auto device = make_cpu_device(1);
    EXPECT_EQ(kind_of_choices(*device), "");
    const Algorithms found = find_algorithms({}, ".", *device);
    EXPECT_TRUE(found.earlier.empty() && found.origin.empty() && found.cache.empty());
    EXPECT_EQ(keep_algorithms(found, device->choices(), "name"), 0);
}

}  // namespace
}  // namespace llmc
