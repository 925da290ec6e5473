// The kernels of SwiGLU and the squared ReLU against the CPU device.
#include <cmath>
#include <cstring>
#include <vector>

#include "llmc/device/cuda/relu_squared.cuh"
#include "llmc/device/cuda/swiglu.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

// SwiGLU in double, and error bounds for fp32.
//
// With the logistic function s = 1/(1 + e^-a) and q = 1 - s: y = a s b, db = d a s, da = d b s (1 + a q). The
// bounds hold for all ways to compute s. Let u be the unit roundoff of fp32:
// - The argument of the exponential has 2 operations, and the exponential 2 ulp: a relative error of
//   (2 |a| + 4) u. It moves s by s q times as much. The sum has u, and the reciprocal 1 ulp, 2 u.
// - q has the same error from the exponential. By subtraction from 1 it also has that of s, 3 u s, and u q.
//   As z/(1 + z) it has 4 u q.
// - An exponential or a reciprocal below 2^-125 may be 0.
struct Swiglu {
    double value, value_error;
    double da, da_error;
    double db, db_error;
};

Swiglu swiglu_reference(double a, double b, double d) {
    constexpr double u = lab::unit_roundoff<float>, flushed = 0x1p-125;
    const double s = 1 / (1 + std::exp(-a)), q = 1 / (1 + std::exp(a));
    const double by_exponential = s * q * (2 * std::fabs(a) + 4) * u;
    const double s_error = by_exponential + 3 * u * s + flushed;
    const double q_error = by_exponential + u * (3 * s + q + 3 * q) + flushed;
    const double slope = 1 + a * q;
    const double slope_error = std::fabs(a) * (q_error + u * q) + u * std::fabs(slope);
    const double value = a * s * b, da = d * b * s * slope, db = d * a * s;
    const auto times = [](double x, double y) { return std::fabs(x * y); };
    return {value,
            times(a, b) * s_error + 2.01 * u * std::fabs(value),
            da,
            times(d, b) * (s_error * (std::fabs(slope) + slope_error) + s * slope_error) +
                3.01 * u * std::fabs(da),
            db,
            times(d, a) * s_error + 2.01 * u * std::fabs(db)};
}

// Normal numbers that reach both tails of the logistic function, and some special values of a in the first
// row.
template <class X>
void draw_swiglu_inputs(Array<X>& in, Draw& draw) {
    draw.normal(in, 3);
    const float special[] = {0.0f, -0.0f, 1e-30f, -1e-30f, -20.0f, 20.0f, -100.0f, 100.0f};
    for (int i = 0; i < 8; ++i) in[i] = llmc::cuda::from_float<X>(special[i]);
}

struct Shape {
    std::int64_t rows;
    int width;
};
// One piece, several groups of rows in a block, the last one not whole, and rows of several blocks.
const std::vector<Shape> swiglu_shapes = {{1, 8}, {37, 8}, {5, 264}, {2, 5000}, {9, 1376}};
const std::vector<Shape> swiglu_shapes_for_races = {{37, 80}};

template <class X>
class Activations : public Kernels<X> {};
TYPED_TEST_SUITE(Activations, Dtypes);

TYPED_TEST(Activations, SwigluForward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, width] : shapes(swiglu_shapes, swiglu_shapes_for_races)) {
            Draw draw(seed());
            Array<X> in(rows * 2 * width), out(rows * width), expected(rows * width);
            draw_swiglu_inputs(in, draw);
            llmc::cuda::swiglu_forward(on, out.data(), in.data(), rows, width);
            synchronize();
            cpu().run(llmc::SwigluForward{tensor(expected, {rows, width}), tensor(in, {rows, 2 * width})});
            Comparison comparison;
            for (std::int64_t i = 0; i < out.size(); ++i) {
                const std::int64_t a = i / width * 2 * width + i % width;
                const auto y = swiglu_reference(to_float(in[a]), to_float(in[a + width]), 0);
                comparison.see("out", i, to_float(out[i]), to_float(expected[i]),
                               twice_rounded<X>(y.value, y.value_error));
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(Activations, SwigluBackward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, width] : shapes(swiglu_shapes, swiglu_shapes_for_races)) {
            Draw draw(seed());
            Array<X> in(rows * 2 * width), dout(rows * width), din(in.size()), expected(in.size());
            draw_swiglu_inputs(in, draw);
            draw.normal(dout, 1);
            Array<X> in_place(in.size());
            in_place.copy_from(in);
            llmc::cuda::swiglu_backward(on, din.data(), dout.data(), in.data(), rows, width);
            llmc::cuda::swiglu_backward(on, in_place.data(), dout.data(), in_place.data(), rows, width);
            synchronize();
            EXPECT_EQ(std::memcmp(in_place.data(), din.data(), din.bytes()), 0) << "din is in";
            cpu().run(llmc::SwigluBackward{tensor(expected, {rows, 2 * width}), tensor(dout, {rows, width}),
                                           tensor(in, {rows, 2 * width})});
            Comparison comparison;
            for (std::int64_t i = 0; i < dout.size(); ++i) {
                const std::int64_t a = i / width * 2 * width + i % width, b = a + width;
                const auto y = swiglu_reference(to_float(in[a]), to_float(in[b]), to_float(dout[i]));
                comparison.see("da", a, to_float(din[a]), to_float(expected[a]),
                               twice_rounded<X>(y.da, y.da_error));
                comparison.see("db", b, to_float(din[b]), to_float(expected[b]),
                               twice_rounded<X>(y.db, y.db_error));
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(Activations, SwigluRefusesWhatItCannotDo) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    Array<X> x(64);
    EXPECT_THROW(llmc::cuda::swiglu_forward(on, x.data(), x.data(), 1, 2), llmc::ProgrammingError);
    EXPECT_THROW(llmc::cuda::swiglu_backward(on, x.data(), x.data(), x.data(), 1, 2), llmc::ProgrammingError);
    EXPECT_THROW(llmc::cuda::swiglu_forward(on, x.data(), x.data(), 1, 8, 1024), llmc::ProgrammingError);
}

// One or two products in fp32 and a rounding: the same bits on every device. The arrays begin anywhere.
TYPED_TEST(Activations, SquaredRelu) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t n : shapes<std::int64_t>({1, 131, 4096, 40003}, {531, 4616})) {
            for (const std::int64_t offset : {0, 1}) {
                Draw draw(seed());
                Array<X> in(n + offset), dout(n + offset), out(n + offset), din(n + offset),
                    expected(n + offset), expected_din(n + offset);
                draw.normal(in, 1);
                draw.normal(dout, 1);
                if (n > 2) {
                    in[offset] = llmc::cuda::from_float<X>(NAN);
                    in[offset + 1] = llmc::cuda::from_float<X>(-INFINITY);
                }
                llmc::cuda::relu_squared_forward(on, out.data() + offset, in.data() + offset, n);
                llmc::cuda::relu_squared_backward(on, din.data() + offset, dout.data() + offset,
                                                  in.data() + offset, n);
                synchronize();
                const auto part = [&](Array<X>& x) { return tensor(x, {n + offset}).flat(offset, n); };
                cpu().run(llmc::ReluSquaredForward{part(expected), part(in)});
                cpu().run(llmc::ReluSquaredBackward{part(expected_din), part(dout), part(in)});
                if (n > 2) {
                    EXPECT_TRUE(std::isnan(to_float(out[offset])) && std::isnan(to_float(din[offset])));
                    EXPECT_EQ(to_float(out[offset + 1]), 0);
                    EXPECT_EQ(to_float(din[offset + 1]), 0);
                }
                Comparison comparison;
                for (std::int64_t i = n > 2 ? offset + 1 : offset; i < n + offset; ++i) {
                    comparison.see_equal("out", i, to_float(out[i]), to_float(expected[i]));
                    comparison.see_equal("din", i, to_float(din[i]), to_float(expected_din[i]));
                }
                EXPECT_TRUE(comparison.good()) << comparison.first_failure();
                llmc::cuda::relu_squared_backward(on, dout.data() + offset, dout.data() + offset,
                                                  in.data() + offset, n);
                synchronize();
                EXPECT_EQ(std::memcmp(dout.data() + offset, din.data() + offset,
                                      static_cast<std::size_t>(n) * sizeof(X)),
                          0)
                    << "din is dout";
            }
        }
    }
}

}  // namespace
}  // namespace kernel_test
