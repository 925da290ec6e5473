// RMS norm forward in double: the reference of dev/rmsnorm_forward.cu and
// dev/fused_residual_rmsnorm_forward.cu.
#pragma once

#include <cmath>

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"
#include "llmc/device/cuda/packed.cuh"

namespace lab {

inline constexpr float rmsnorm_epsilon = 1e-6f;

// out, in X (rows, channels); rstd fp32 (rows); weight X (channels)
template <class X>
void compare_rmsnorm(Comparison& comparison, const Array<X>& out, const Array<float>& rstds,
                     const Array<X>& in, const Array<X>& weight) {
    constexpr double u = unit_roundoff<float>;
    const std::int64_t channels = weight.size();
    const auto n = static_cast<double>(channels);
    for (std::int64_t row = 0; row < rstds.size(); ++row) {
        const X* x = in.data() + row * channels;
        double squares = 0;
        for (std::int64_t c = 0; c < channels; ++c) squares += std::pow(to_float(x[c]), 2);
        const double rstd = 1 / std::sqrt(squares / n + rmsnorm_epsilon);
        // The sum of squares has n + 1 roundings, the division and the addition of epsilon have two. The root
        // halves them, and rsqrtf has 2 ulp.
        const double rstd_error = rstd * ((n + 3) / 2 + 4) * u;
        comparison.see("rstd", row, rstds[row], rstd, rstd_error);
        for (std::int64_t c = 0; c < channels; ++c) {
            const std::int64_t i = row * channels + c;
            const double value = to_float(x[c]) * rstd * to_float(weight[c]);  // 2 products
            comparison.see("out", i, to_float(out[i]), value,
                           rounded<X>(value, std::fabs(value) * (rstd_error / rstd + 2.01 * u)));
        }
    }
}

}  // namespace lab
