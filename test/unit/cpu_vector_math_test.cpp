// The CPU device's own implementations of exp and GELU.
#include "llmc/device/cpu/vector_math.h"

#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

using cpu::exponential;
using cpu::gelu;
using cpu::gelu_derivative;

long double gelu_logistic(double x) {
    const long double u = std::sqrt(2.0L / std::numbers::pi_v<long double>) * (x + 0.044715L * x * x * x);
    return 1.0L / (1.0L + std::exp(-2.0L * u));
}

double gelu_reference(double x) { return static_cast<double>(x * gelu_logistic(x)); }

double gelu_derivative_reference(double x) {
    const long double s = gelu_logistic(x);
    const long double slope =
        2.0L * std::sqrt(2.0L / std::numbers::pi_v<long double>) * (1.0L + 3.0L * 0.044715L * x * x);
    return static_cast<double>(s + x * s * (1.0L - s) * slope);
}

TEST(CpuVectorMath, ExponentialIsWithinAnUlp) {
    // Errors of its steps: the argument's reduction (ln 2 in two parts) loses less than 0.01 ulp, the
    // polynomial 3e-9 = 0.05 u. The last product and the last addition each lose half an ulp of the result;
    // one of these is scaled by r^2 q < 0.07. Together this is below 1.1 ulp of 2^-23.
    for (int i = 0; i < 2'000'000; ++i) {
        const float x = -86.643F + static_cast<float>(i) * (175.36F / 2e6F);
        const double exact = std::exp(double{x});
        const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
        ASSERT_LE(std::fabs(double{exponential(x)} - exact), 1.1 * ulp) << x;
    }
}

TEST(CpuVectorMath, ExponentialAtItsEnds) {
    EXPECT_EQ(exponential(-INFINITY), 0.0F);
    EXPECT_EQ(exponential(-1e30F), 0.0F);
    EXPECT_EQ(exponential(-86.65F), 0.0F);
    EXPECT_GT(exponential(-86.64F), 0.0F);
    EXPECT_EQ(exponential(0.0F), 1.0F);
    EXPECT_EQ(exponential(-0.0F), 1.0F);
    EXPECT_TRUE(std::isfinite(exponential(88.72F)));
    EXPECT_EQ(exponential(88.73F), INFINITY);
    EXPECT_EQ(exponential(INFINITY), INFINITY);
    EXPECT_TRUE(std::isnan(exponential(NAN)));
    EXPECT_TRUE(std::isnan(exponential(-NAN)));
}

TEST(CpuVectorMath, GeluIsAccurate) {
    // Here u is the argument of GELU's tanh (gelu_logistic). value: 2u has 4 roundings, so exp(-|2u|) has a
    // relative error of |2u| 4u32 + 2.2 u32. It moves the logistic function s by s (1 - s) times as much.
    // |2u| (1 - s) <= 0.28 for x >= 0, and s < 1 for x < 0. Then come 3 more roundings. The total is below 8
    // u32 of max(1, |GELU|). derivative: the same holds for s. |x (2u)' s (1 - s)| <= 0.6 has 8 roundings and
    // the error of the exponential. |2u| s (1 - s) <= 0.28 again, so the total is below 16 u32.
    for (int i = 0; i <= 400'000; ++i) {
        const float x = -20.0F + static_cast<float>(i) * 1e-4F;
        const double value = gelu_reference(x);
        ASSERT_LE(std::fabs(double{gelu(x)} - value), 8.0 * u32 * std::max(1.0, std::fabs(value))) << x;
        ASSERT_LE(std::fabs(double{gelu_derivative(x)} - gelu_derivative_reference(x)), 16.0 * u32) << x;
    }
}

TEST(CpuVectorMath, GeluAtItsEnds) {
    for (const float x : {1e3F, 1e10F, 1e20F, 3e38F}) {
        EXPECT_EQ(gelu(x), x);
        EXPECT_EQ(gelu(-x), 0.0F);
        EXPECT_EQ(gelu_derivative(x), 1.0F);
        EXPECT_EQ(gelu_derivative(-x), 0.0F);
    }
    EXPECT_EQ(gelu(0.0F), 0.0F);
    EXPECT_EQ(gelu_derivative(0.0F), 0.5F);
    EXPECT_TRUE(std::isnan(gelu(NAN)));
    EXPECT_TRUE(std::isnan(gelu_derivative(NAN)));
}

}  // namespace

}  // namespace llmc::cpu_test
