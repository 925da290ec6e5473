// The CPU's SwiGLU, squared ReLU and cap of logits.
#include "llmc/device/cpu/activation_math.h"

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

TEST(CpuActivationMath, LogisticKeepsItsRelativePrecision) {
    // z = e^-|x| has 2.2 u32. The sum and the quotient lose u32 each, and z times the reciprocal u32 more:
    // less than 6 u32 of each result. Below 2^-125, z may be 0.
    for (int i = 0; i <= 400'000; ++i) {
        const float x = -100.0F + static_cast<float>(i) * 5e-4F;
        const cpu::Logistic s = cpu::logistic(x);
        const double value = 1.0 / (1.0 + std::exp(-double{x})), rest = 1.0 / (1.0 + std::exp(double{x}));
        ASSERT_LE(std::fabs(double{s.value} - value), 6.0 * u32 * value + 0x1p-125) << x;
        ASSERT_LE(std::fabs(double{s.rest} - rest), 6.0 * u32 * rest + 0x1p-125) << x;
    }
    EXPECT_TRUE(std::isnan(cpu::logistic(NAN).value));
}

TEST(CpuActivationMath, CapIsWithinAFewUlpOfTheCap) {
    // The exponent 2 |x|/cap has 2 roundings, and t = e^-exponent 2.2 u32: t exponent 2 u32 < u32, so t is
    // within 3.2 u32. It moves tanh = (1 - t)/(1 + t) by at most twice as much. The difference, the sum, the
    // quotient and two products lose 5 u32: 12 u32 of the cap. The slope 4t/(1 + t)^2 has the relative error
    // of t, (2 exponent + 2.2) u32, and 8 u32 for the other operations.
    for (const float cap : {15.0F, 30.0F, 0.75F}) {
        const cpu::SoftCap capped(cap);
        for (int i = 0; i <= 200'000; ++i) {
            const float x = cap * (-10.0F + static_cast<float>(i) * 1e-4F);
            const double t = std::tanh(double{x} / double{cap});
            const double slope = 1.0 / std::pow(std::cosh(double{x} / double{cap}), 2);
            const double exponent = 2.0 * std::fabs(double{x} / double{cap});
            ASSERT_LE(std::fabs(double{capped(x).value} - cap * t), 12.0 * u32 * cap) << x;
            ASSERT_LE(std::fabs(double{capped(x).slope} - slope), (2.0 * exponent + 10.2) * u32 * slope) << x;
        }
        EXPECT_EQ(capped(0.0F).value, 0.0F);
        EXPECT_EQ(capped(0.0F).slope, 1.0F);
        for (const float x : {1e10F, 3e38F, INFINITY}) {
            EXPECT_EQ(capped(x).value, cap);
            EXPECT_EQ(capped(-x).value, -cap);
            EXPECT_EQ(capped(x).slope, 0.0F);
        }
        EXPECT_TRUE(std::isnan(capped(NAN).value) && std::isnan(capped(NAN).slope));
    }
}

}  // namespace

}  // namespace llmc::cpu_test
