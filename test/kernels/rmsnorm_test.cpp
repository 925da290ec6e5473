// RMS norm forward, alone and of a sum, against the CPU device.
#include <cmath>
#include <cstring>
#include <vector>

#include "llmc/device/cuda/rmsnorm_forward.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int channels;
};
const std::vector<Shape> rmsnorm_shapes = {
    {2, 8},
    {1, 768},
    {7, 264},
    {33, 384},
    {4, 2048},
    // Shared memory limits the rows per block to fewer than the threads could do.
    {5, 12288}};
const std::vector<Shape> rmsnorm_shapes_for_races = {{34, 8}};
constexpr float eps = 1e-5f;

// The two devices' rstd: the sum of C squares has (C + 1) u, the division and eps 2 u. The root halves this,
// and rsqrtf has 2 ulp, 4 u. out has two more products.
template <class X>
void compare(Comparison& comparison, const Array<X>& out, const Array<float>& rstd, const Array<X>& expected,
             const Array<float>& expected_rstd) {
    const std::int64_t channels = out.size() / rstd.size();
    const double error = ((static_cast<double>(channels) + 3) / 2 + 4) * lab::unit_roundoff<float>;
    for (std::int64_t r = 0; r < rstd.size(); ++r) {
        comparison.see("rstd", r, rstd[r], expected_rstd[r], 2.01 * error * expected_rstd[r]);
        for (std::int64_t i = r * channels; i < (r + 1) * channels; ++i) {
            const double wanted = to_float(expected[i]);
            comparison.see(
                "out", i, to_float(out[i]), wanted,
                twice_rounded<X>(wanted, (error + 2.01 * lab::unit_roundoff<float>)*std::fabs(wanted)));
        }
    }
}

template <class X>
class RmsNorm : public Kernels<X> {};
TYPED_TEST_SUITE(RmsNorm, Dtypes);

TYPED_TEST(RmsNorm, Forward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, channels] : shapes(rmsnorm_shapes, rmsnorm_shapes_for_races)) {
            Draw draw(seed());
            const std::int64_t n = rows * channels;
            Array<X> in(n), weight(channels), ones(channels), out(n), expected(n);
            Array<float> rstd(rows), expected_rstd(rows);
            draw.normal(in, 1, 0.5);
            draw.normal(weight, 0.5, 1);
            ones.fill(llmc::cuda::from_float<X>(1));
            llmc::cuda::rmsnorm_forward(on, out.data(), rstd.data(), in.data(), weight.data(), eps, rows,
                                        channels);
            synchronize();
            cpu().run(llmc::RmsNormForward{tensor(expected, {rows, channels}), tensor(expected_rstd, {rows}),
                                           tensor(in, {rows, channels}), tensor(weight, {channels}), eps});
            Comparison comparison;
            compare(comparison, out, rstd, expected, expected_rstd);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
            // A missing weight counts as ones.
            for (X* to : {out.data(), expected.data()}) {
                const X* const given = to == out.data() ? nullptr : ones.data();
                llmc::cuda::rmsnorm_forward(on, to, rstd.data(), in.data(), given, eps, rows, channels);
                synchronize();
            }
            EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.bytes()), 0);
        }
    }
}

TYPED_TEST(RmsNorm, FusedResidualForward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, channels] : shapes(rmsnorm_shapes, rmsnorm_shapes_for_races)) {
            Draw draw(seed());
            const std::int64_t n = rows * channels;
            Array<X> in1(n), in2(n), weight(channels), residual(n), out(n), alone(n);
            Array<float> rstd(rows), rstd_alone(rows);
            draw.normal(in1, 1, 0.5);
            draw.normal(in2, 0.5);
            draw.normal(weight, 0.5, 1);
            for (const X* given : {static_cast<const X*>(nullptr), static_cast<const X*>(weight.data())}) {
                llmc::cuda::fused_residual_rmsnorm_forward(on, residual.data(), out.data(), rstd.data(),
                                                           in1.data(), in2.data(), given, eps, rows,
                                                           channels);
                // RMS norm of the rounded sum gives the same bits, so that outputs that are not kept can be
                // recomputed.
                llmc::cuda::rmsnorm_forward(on, alone.data(), rstd_alone.data(), residual.data(), given, eps,
                                            rows, channels);
                synchronize();
                EXPECT_EQ(std::memcmp(out.data(), alone.data(), out.bytes()), 0);
                EXPECT_EQ(std::memcmp(rstd.data(), rstd_alone.data(), rstd.bytes()), 0);
            }
            Array<X> expected_residual(n), expected(n);
            Array<float> expected_rstd(rows);
            cpu().run(llmc::FusedResidualRmsNormForward{
                tensor(expected_residual, {rows, channels}), tensor(expected, {rows, channels}),
                tensor(expected_rstd, {rows}), tensor(in1, {rows, channels}), tensor(in2, {rows, channels}),
                tensor(weight, {channels}), eps});
            Comparison comparison;
            // An addition and a rounding: the same on every device.
            for (std::int64_t i = 0; i < n; ++i) {
                comparison.see_equal("residual", i, to_float(residual[i]), to_float(expected_residual[i]));
            }
            compare(comparison, out, rstd, expected, expected_rstd);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(RmsNorm, RefusesWhatItCannotDo) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    Array<X> x(8);
    Array<float> rstd(1);
    const auto run = [&](int channels, int block_threads) {
        llmc::cuda::rmsnorm_forward(on, x.data(), rstd.data(), x.data(), static_cast<const X*>(nullptr), eps,
                                    1, channels, block_threads);
    };
    EXPECT_THROW(run(2, 128), llmc::ProgrammingError);
    EXPECT_THROW(run(1 << 20, 128), llmc::ProgrammingError);
    EXPECT_THROW(run(8, 512), llmc::ProgrammingError);
}

}  // namespace
}  // namespace kernel_test
