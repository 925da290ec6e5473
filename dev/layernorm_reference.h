// Layernorm forward in double: the reference of dev/layernorm_forward.cu and dev/fused_residual_forward.cu.
#pragma once

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"
#include "llmc/device/cuda/layernorm_forward.cuh"

namespace lab {

// out, in X (rows, channels); mean, rstd fp32 (rows); gamma, beta X (channels)
template <class X>
void compare_layernorm(Comparison& comparison, const Array<X>& out, const Array<float>& all_means,
                       const Array<float>& all_rstds, const Array<X>& in, const Array<X>& gamma,
                       const Array<X>& beta) {
    constexpr double u = unit_roundoff<float>;
    const std::int64_t channels = gamma.size();
    const auto n = static_cast<double>(channels);
    for (std::int64_t row = 0; row < all_means.size(); ++row) {
        const X* x = in.data() + row * channels;
        double sum = 0, magnitude = 0, squares = 0;
        for (std::int64_t c = 0; c < channels; ++c) {
            sum += to_float(x[c]);
            magnitude += std::fabs(to_float(x[c]));
        }
        const double mean = sum / n;
        for (std::int64_t c = 0; c < channels; ++c) squares += std::pow(to_float(x[c]) - mean, 2);
        const double rstd = 1 / std::sqrt(squares / n + llmc::cuda::layernorm_epsilon);
        // The sum has n roundings, and the division one. An error e of the mean changes the sum of squares
        // only by n e^2. The sum's own n + 2 roundings are halved by the root, and rsqrtf has 2 ulp.
        const double mean_error = (n + 1) * u * magnitude / n;
        const double rstd_error = rstd * ((n + 2) / 2 * u + 4 * u + std::pow(mean_error * rstd, 2));
        comparison.see("mean", row, all_means[row], mean, mean_error);
        comparison.see("rstd", row, all_rstds[row], rstd, rstd_error);
        for (std::int64_t c = 0; c < channels; ++c) {
            const double g = to_float(gamma[c]), b = to_float(beta[c]);
            const double normalized = (to_float(x[c]) - mean) * rstd;
            const double error =
                std::fabs(g) * (mean_error * rstd + std::fabs(normalized) * (rstd_error / rstd + 3 * u)) +
                u * std::fabs(normalized * g + b);
            comparison.see("out", row * channels + c, to_float(out[row * channels + c]), normalized * g + b,
                           rounded<X>(normalized * g + b, error));
        }
    }
}

}  // namespace lab
