// Layernorm's kernels against the CPU device.
#include "llmc/device/cuda/layernorm_forward.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int channels;
};
const std::vector<Shape> layernorm_shapes = {{2, 8}, {1, 768}, {7, 264}, {33, 384}, {4, 1600}};

template <class X>
class LayerNorm : public Kernels<X> {};
TYPED_TEST_SUITE(LayerNorm, Dtypes);

TYPED_TEST(LayerNorm, Forward) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const auto& [rows, channels] : shapes(layernorm_shapes)) {
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
            cpu().layernorm_forward(tensor(expected, {rows, channels}), tensor(expected_mean, {rows}),
                                    tensor(expected_rstd, {rows}), tensor(in, {rows, channels}),
                                    tensor(gamma, {channels}), tensor(beta, {channels}));
            // Sums of C terms, of which the largest is below 8 here, on both devices; |normalized| < sqrt(C).
            const double n = channels, u = lab::unit_roundoff<float>;
            Comparison comparison;
            for (std::int64_t r = 0; r < rows; ++r) {
                const double mean_error = 2 * n * u * 8;
                const double rstd_error = expected_rstd[r] * (n + 10) * u;
                comparison.see("mean", r, mean[r], expected_mean[r], mean_error);
                comparison.see("rstd", r, rstd[r], expected_rstd[r], rstd_error);
                for (std::int64_t i = r * channels; i < (r + 1) * channels; ++i) {
                    const double normalized = (to_float(in[i]) - expected_mean[r]) * expected_rstd[r];
                    const double error =
                        std::fabs(to_float(gamma[i % channels])) *
                        (mean_error * expected_rstd[r] + std::fabs(normalized) * (n + 14) * u);
                    comparison.see("out", i, to_float(out[i]), to_float(expected[i]),
                                   twice_rounded<X>(to_float(expected[i]), error));
                }
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

}  // namespace
}  // namespace kernel_test
