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

struct Rows {
    std::int64_t N, F;
};
// Rows that are shorter and longer than a thread's piece of 4096 elements.
constexpr std::array swiglu_shapes = {Rows{1, 1}, Rows{3, 7}, Rows{700, 13}, Rows{2, 5000}};

class CpuActivations : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
};

// An element's bits must not depend on its place in a loop's vector instructions, nor on the threads.
TEST_P(CpuActivations, SwigluEqualsTheFunctionForEveryElement) {
    for (const auto& [N, F] : swiglu_shapes) {
        const OwnedTensor in = normal(X, {N, 2 * F}, "in", 3.0), dout = normal(X, {N, F}, "dout");
        OwnedTensor expected(X, {N, F}), expected_din(X, {N, 2 * F});
        const auto at = [&](std::int64_t i) { return static_cast<float>(in.get(i)); };
        for (std::int64_t n = 0; n < N; ++n) {
            for (std::int64_t f = 0; f < F; ++f) {
                const std::int64_t a = n * 2 * F + f, b = a + F;
                const auto d = static_cast<float>(dout.get(n * F + f));
                const cpu::SwigluGradient g = cpu::swiglu_gradient(d, at(a), at(b));
                expected.set(n * F + f, cpu::swiglu(at(a), at(b)));
                expected_din.set(a, g.da);
                expected_din.set(b, g.db);
            }
        }
        for (const int threads : {1, 3}) {
            Operations ops(threads);
            OwnedTensor out = garbage(X, {N, F}), din = garbage(X, {N, 2 * F}), in_place = copy(in);
            ops->swiglu_forward(out, in);
            expect_same_bits(out, expected, "SwiGLU");
            ops->swiglu_backward(din, dout, in);
            expect_same_bits(din, expected_din, "SwiGLU'");
            ops->swiglu_backward(in_place, dout, in_place);
            expect_same_bits(in_place, expected_din, "SwiGLU' in place");
        }
    }
}

TEST_P(CpuActivations, SwigluRefusesWrongShapes) {
    OwnedTensor out(X, {3, 8}), in(X, {3, 16});
    Operations ops;
    EXPECT_NO_THROW(ops->swiglu_forward(out, in));
    EXPECT_THROW(ops->swiglu_forward(in, out), ProgrammingError);
    EXPECT_THROW(ops->swiglu_forward(out, OwnedTensor(X, {6, 8})), ProgrammingError);
    EXPECT_THROW(ops->swiglu_backward(out, out, in), ProgrammingError);
    EXPECT_THROW(ops->swiglu_backward(in, in, in), ProgrammingError);
}

TEST_P(CpuActivations, SquaredRelu) {
    Operations ops;
    for (const std::int64_t n : {1, 7, 37, 4096 + 13}) {
        OwnedTensor x = normal(X, {n}, "x"), dout = normal(X, {n}, "dout");
        if (n > 3) {
            x.set(1, -0.0);
            x.set(2, -INFINITY);
        }
        OwnedTensor out = garbage(X, {n}), din = garbage(X, {n}), expected(X, {n}), expected_din(X, {n});
        for (std::int64_t i = 0; i < n; ++i) {
            // A product is rounded to fp32, and then to X. Twice a number is exact.
            const float r = std::max(static_cast<float>(x.get(i)), 0.0F);
            expected.set(i, r * r);
            expected_din.set(i, 2.0F * r * static_cast<float>(dout.get(i)));
        }
        ops->relu_squared_forward(out, x);
        expect_equal(out, expected.values(), "squared ReLU");
        ops->relu_squared_backward(din, dout, x);
        expect_equal(din, expected_din.values(), "its gradient");
        ops->relu_squared_backward(dout, dout, x);
        expect_equal(dout, expected_din.values(), "its gradient in place");
    }
    OwnedTensor x = filled(X, {1}, NAN), out(X, {1});
    ops->relu_squared_forward(out, x);
    EXPECT_TRUE(std::isnan(out.get(0)));
    EXPECT_THROW(ops->relu_squared_forward(out, OwnedTensor(X, {2})), ProgrammingError);
    EXPECT_THROW(ops->relu_squared_backward(out, OwnedTensor(X, {2}), x), ProgrammingError);
}

TEST_P(CpuActivations, SoftCapEqualsTheFunctionForEveryElement) {
    Operations ops;
    for (const std::int64_t n : {1, 7, 37, 4096 + 13}) {
        const OwnedTensor x = normal(X, {n}, "x", 20.0);
        OwnedTensor out = garbage(X, {n}), in_place = copy(x), expected(X, {n});
        const cpu::SoftCap capped(15.0F);
        for (std::int64_t i = 0; i < n; ++i) expected.set(i, capped(static_cast<float>(x.get(i))).value);
        ops->soft_cap(out, x, 15.0F);
        expect_same_bits(out, expected, "cap");
        ops->soft_cap(in_place, in_place, 15.0F);
        expect_same_bits(in_place, expected, "cap in place");
    }
    OwnedTensor out(X, {2});
    EXPECT_THROW(ops->soft_cap(out, OwnedTensor(X, {2}), 0.0F), ProgrammingError);
    EXPECT_THROW(ops->soft_cap(out, OwnedTensor(X, {3}), 15.0F), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuActivations, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
