// Layernorm forward, alone and of a sum, against the CPU device.
#include "llmc/device/cuda/layernorm_forward.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int channels;
};
const std::vector<Shape> layernorm_shapes = {
    {2, 8},
    {1, 768},
    {7, 264},
    {33, 384},
    {4, 1600},
    // Shared memory limits the rows per block to fewer than the threads could do.
    {5, 12288}};
const std::vector<Shape> layernorm_shapes_for_races = {{34, 8}};

// Both devices sum C terms, the largest of which is below 8 here; |normalized| < sqrt(C).
template <class X>
void compare(Comparison& comparison, const Array<X>& out, const Array<float>& mean, const Array<float>& rstd,
             const Array<X>& in, const Array<X>& gamma, const Array<X>& expected,
             const Array<float>& expected_mean, const Array<float>& expected_rstd) {
    const std::int64_t channels = gamma.size();
    const double n = static_cast<double>(channels), u = lab::unit_roundoff<float>;
    for (std::int64_t r = 0; r < mean.size(); ++r) {
        const double mean_error = 2 * n * u * 8;
        const double rstd_error = expected_rstd[r] * (n + 10) * u;
        comparison.see("mean", r, mean[r], expected_mean[r], mean_error);
        comparison.see("rstd", r, rstd[r], expected_rstd[r], rstd_error);
        for (std::int64_t i = r * channels; i < (r + 1) * channels; ++i) {
            const double normalized = (to_float(in[i]) - expected_mean[r]) * expected_rstd[r];
            const double error = std::fabs(to_float(gamma[i % channels])) *
                                 (mean_error * expected_rstd[r] + std::fabs(normalized) * (n + 14) * u);
            comparison.see("out", i, to_float(out[i]), to_float(expected[i]),
                           twice_rounded<X>(to_float(expected[i]), error));
        }
    }
}

template <class X>
class LayerNorm : public Kernels<X> {};
TYPED_TEST_SUITE(LayerNorm, Dtypes);

TYPED_TEST(LayerNorm, Forward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, channels] : shapes(layernorm_shapes, layernorm_shapes_for_races)) {
            Draw draw(seed());
            Array<X> in(rows * channels), gamma(channels), beta(channels), out(rows * channels),
                expected(rows * channels);
            Array<float> mean(rows), rstd(rows), expected_mean(rows), expected_rstd(rows);
            draw.normal(in, 1, 0.5);
            draw.normal(gamma, 0.5, 1);
            draw.normal(beta, 0.5);
            llmc::cuda::layernorm_forward(on, out.data(), mean.data(), rstd.data(), in.data(), gamma.data(),
                                          beta.data(), rows, channels);
            synchronize();
            cpu().run(llmc::LayerNormForward{tensor(expected, {rows, channels}),
                                             tensor(expected_mean, {rows}), tensor(expected_rstd, {rows}),
                                             tensor(in, {rows, channels}), tensor(gamma, {channels}),
                                             tensor(beta, {channels})});
            Comparison comparison;
            compare(comparison, out, mean, rstd, in, gamma, expected, expected_mean, expected_rstd);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(LayerNorm, FusedResidualForward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, channels] : shapes(layernorm_shapes, layernorm_shapes_for_races)) {
            Draw draw(seed());
            const std::int64_t n = rows * channels;
            Array<X> in1(n), in2(n), gamma(channels), beta(channels), residual(n), out(n), again(n);
            Array<float> mean(rows), rstd(rows);
            draw.normal(in1, 1, 0.5);
            draw.normal(in2, 0.5);
            draw.normal(gamma, 0.5, 1);
            draw.normal(beta, 0.5);
            for (X* to : {again.data(), out.data()}) {
                llmc::cuda::fused_residual_layernorm_forward(on, residual.data(), to, mean.data(),
                                                             rstd.data(), in1.data(), in2.data(),
                                                             gamma.data(), beta.data(), rows, channels);
                synchronize();
            }
            EXPECT_EQ(std::memcmp(out.data(), again.data(), out.bytes()), 0);
            // Layernorm of the rounded sum gives the same bits, so that outputs that are not kept can be
            // recomputed.
            Array<X> alone(n);
            Array<float> mean_alone(rows), rstd_alone(rows);
            llmc::cuda::layernorm_forward(on, alone.data(), mean_alone.data(), rstd_alone.data(),
                                          residual.data(), gamma.data(), beta.data(), rows, channels);
            synchronize();
            EXPECT_EQ(std::memcmp(out.data(), alone.data(), out.bytes()), 0);
            EXPECT_EQ(std::memcmp(mean.data(), mean_alone.data(), mean.bytes()), 0);
            EXPECT_EQ(std::memcmp(rstd.data(), rstd_alone.data(), rstd.bytes()), 0);
            Array<X> expected_residual(n), expected(n);
            Array<float> expected_mean(rows), expected_rstd(rows);
            cpu().run(llmc::FusedResidualLayerNormForward{
                tensor(expected_residual, {rows, channels}), tensor(expected, {rows, channels}),
                tensor(expected_mean, {rows}), tensor(expected_rstd, {rows}), tensor(in1, {rows, channels}),
                tensor(in2, {rows, channels}), tensor(gamma, {channels}), tensor(beta, {channels})});
            Comparison comparison;
            // An addition and a rounding: the same on every device.
            for (std::int64_t i = 0; i < n; ++i) {
                comparison.see_equal("residual", i, to_float(residual[i]), to_float(expected_residual[i]));
            }
            compare(comparison, out, mean, rstd, residual, gamma, expected, expected_mean, expected_rstd);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(LayerNorm, WithoutBetaHasTheBitsOfZeros) {
    using X = TypeParam;
    const LaunchContext on = launch_contexts().front();
    for (const auto& [rows, channels] : shapes(layernorm_shapes, layernorm_shapes_for_races)) {
        Draw draw(seed());
        const std::int64_t n = rows * channels;
        Array<X> in1(n), in2(n), gamma(channels), zeros(channels);
        draw.normal(in1, 1, 0.5);
        draw.normal(in2, 0.5);
        draw.normal(gamma, 0.5, 1);
        zeros.fill(llmc::cuda::from_float<X>(0));
        // Makes zeros of both signs, which adding `zeros` turns into +0.
        gamma[channels / 2] = zeros[0];
        for (const bool fused : {false, true}) {
            Array<X> residual(n), out(n), expected(n);
            Array<float> mean(rows), rstd(rows);
            for (X* to : {expected.data(), out.data()}) {
                const X* const beta = to == out.data() ? nullptr : zeros.data();
                if (fused) {
                    llmc::cuda::fused_residual_layernorm_forward(on, residual.data(), to, mean.data(),
                                                                 rstd.data(), in1.data(), in2.data(),
                                                                 gamma.data(), beta, rows, channels);
                } else {
                    llmc::cuda::layernorm_forward(on, to, mean.data(), rstd.data(), in1.data(), gamma.data(),
                                                  beta, rows, channels);
                }
                synchronize();
            }
            EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.bytes()), 0)
                << rows << " x " << channels << (fused ? ", fused" : "");
        }
    }
}

}  // namespace
}  // namespace kernel_test
