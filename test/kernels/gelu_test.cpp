// GELU's kernels against the CPU device.
#include "llmc/device/cuda/gelu.cuh"

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

// Sizes of whole 16-byte pieces in both dtypes, around the elements of a block of 256 threads.
const std::vector<std::int64_t> gelu_sizes = {8, 24, 2048, 4096, 4104, 5000};
const std::vector<std::int64_t> gelu_sizes_for_races = {4616};  // two blocks in both dtypes

// Normal numbers, and the largest and smallest that the formulas must handle.
template <class X>
void draw_inputs(Array<X>& in, Draw& draw) {
    draw.normal(in, 2);
    const float great = std::min(1e20f, largest<X>);
    const float special[] = {0, 1e-30f, -10, 10, -60, 60, -great, great};
    for (int i = 0; i < 8; ++i) in[i] = llmc::cuda::from_float<X>(special[i]);
}

// The error of s = 1/(1 + e^-w), which both devices compute with an exponential, where w = 2 sqrt(2/pi) (x +
// 0.044715 x^3). In units of u it is a sum. The four operations of w give 4 |w|, which the exponential turns
// into a relative error. The exponential's own 2 ulp give 4, the sum gives 1, and a reciprocal of 1 ulp gives
// 2. The exponential's part affects s by a factor 1 - s. If e^-|w| is below 2^-125, it may be 0.
struct Parts {
    double s, s_error;  // the relative error
    double w, slope;    // dw/dx

    explicit Parts(double x) {
        constexpr double u = lab::unit_roundoff<float>;
        const double root = std::sqrt(2 / std::acos(-1.0));
        w = 2 * root * (x + 0.044715 * x * x * x);
        slope = 2 * root * (1 + 3 * 0.044715 * x * x);
        s = 1 / (1 + std::exp(-w));
        s_error = u * ((4 * std::fabs(w) + 4) / (1 + std::exp(w)) + 3);
    }
};
constexpr double flushed = 0x1p-125;

template <class X>
class Gelu : public Kernels<X> {};
TYPED_TEST_SUITE(Gelu, Dtypes);

TYPED_TEST(Gelu, Forward) {
    using X = TypeParam;
    constexpr double u = lab::unit_roundoff<float>;
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t n : shapes(gelu_sizes, gelu_sizes_for_races)) {
            Draw draw(seed());
            Array<X> in(n), out(n), again(n), expected(n);
            draw_inputs(in, draw);
            llmc::cuda::gelu_forward(on, out.data(), in.data(), n);
            llmc::cuda::gelu_forward(on, again.data(), in.data(), n);
            synchronize();
            cpu().run(llmc::GeluForward{tensor(expected, {n}), tensor(in, {n})});
            Comparison comparison;
            for (std::int64_t i = 0; i < n; ++i) {
                const double x = to_float(in[i]), wanted = to_float(expected[i]);
                const Parts parts(x);
                const double error = std::fabs(x) * (parts.s * (parts.s_error + u) + flushed);  // x times s
                comparison.see("out", i, to_float(out[i]), wanted, twice_rounded<X>(wanted, error));
                comparison.see_equal("out again", i, to_float(again[i]), to_float(out[i]));
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(Gelu, Backward) {
    using X = TypeParam;
    constexpr double u = lab::unit_roundoff<float>;
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t n : shapes(gelu_sizes, gelu_sizes_for_races)) {
            Draw draw(seed());
            Array<X> in(n), dout(n), din(n), in_place(n), expected(n);
            draw_inputs(in, draw);
            draw.normal(dout, 1);
            in_place.copy_from(dout);
            llmc::cuda::gelu_backward(on, din.data(), dout.data(), in.data(), n);
            llmc::cuda::gelu_backward(on, in_place.data(), in_place.data(), in.data(), n);
            synchronize();
            cpu().run(llmc::GeluBackward{tensor(expected, {n}), tensor(dout, {n}), tensor(in, {n})});
            Comparison comparison;
            for (std::int64_t i = 0; i < n; ++i) {
                // din = dout (s + x q slope). The error of q = z / (1 + z)^2, with z = e^-|w|, is that of z,
                // twice 3 for the sum and the reciprocal, and 2 for the products. The slope's 3 operations,
                // and the products with x and the slope, add 5: 13 in all.
                const double x = to_float(in[i]), d = to_float(dout[i]), wanted = to_float(expected[i]);
                const Parts parts(x);
                const double q =
                    std::exp(-std::fabs(parts.w)) / std::pow(1 + std::exp(-std::fabs(parts.w)), 2);
                const double second = q == 0 ? 0 : std::fabs(x) * q * parts.slope;
                const double second_error = second * u * (4 * std::fabs(parts.w) + 4 + 13);
                // Beyond |x| = 32 both devices bound the slope.
                const double far = std::fmin(std::fabs(x), 32);
                const double error = std::fabs(d) * (parts.s * (parts.s_error + u) + second_error +
                                                     flushed * (1 + std::pow(far, 3))) +
                                     2 * u * std::fabs(wanted);
                comparison.see("din", i, to_float(din[i]), wanted, twice_rounded<X>(wanted, error));
                comparison.see_equal("din in place", i, to_float(in_place[i]), to_float(din[i]));
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

// A device may require whole pieces (ops.h).
TYPED_TEST(Gelu, RefusesPartOfAPiece) {
    using X = TypeParam;
    const auto on = launch_contexts().front();
    constexpr std::int64_t n = llmc::cuda::Packed<X>::size + 1;
    Array<X> x(n);
    EXPECT_THROW(llmc::cuda::gelu_forward(on, x.data(), x.data(), n), llmc::ProgrammingError);
    EXPECT_THROW(llmc::cuda::gelu_backward(on, x.data(), x.data(), x.data(), n), llmc::ProgrammingError);
}

// GELU'(x) is 1 or 0 at infinity, where x and the slope are infinite and e^-|w| is 0.
TYPED_TEST(Gelu, DerivativeAtInfinity) {
    using X = TypeParam;
    constexpr std::int64_t n = 8;
    for (const auto& on : launch_contexts()) {
        Array<X> in(n), dout(n), din(n);
        for (std::int64_t i = 0; i < n; ++i) {
            in[i] = llmc::cuda::from_float<X>(i % 2 == 0 ? INFINITY : -INFINITY);
            dout[i] = llmc::cuda::from_float<X>(3);
        }
        llmc::cuda::gelu_backward(on, din.data(), dout.data(), in.data(), n);
        synchronize();
        for (std::int64_t i = 0; i < n; ++i) EXPECT_EQ(to_float(din[i]), i % 2 == 0 ? 3 : 0) << i;
    }
}

}  // namespace
}  // namespace kernel_test
