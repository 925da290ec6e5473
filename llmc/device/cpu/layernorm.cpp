// Layernorm over the last dimension.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

constexpr float epsilon = 1e-5F;

// The mean and the reciprocal standard deviation of a row. The variance is a sum of squared differences from
// the mean. Computing it as the mean square minus the squared mean would lose precision by cancellation if
// the mean is large.
struct RowStatistics {
    float mean;
    float rstd;
};

template <class X>
RowStatistics row_statistics(const X* x, std::int64_t channels) {
    const auto count = static_cast<float>(channels);
    const float mean = lane_sum<float>(channels, [=](std::int64_t c) { return to_float(x[c]); }) / count;
    const float squares = lane_sum<float>(channels, [=](std::int64_t c) {
        const float d = to_float(x[c]) - mean;
        return d * d;
    });
    return {mean, 1.0F / std::sqrt(squares / count + epsilon)};
}

// A null beta counts as zeros.
template <class X>
void normalize_row(X* out, const X* x, const X* gamma, const X* beta, RowStatistics s,
                   std::int64_t channels) {
    const auto normalize = [=](auto beta_at) {
#pragma omp simd
        for (std::int64_t c = 0; c < channels; ++c) {
            const float h = (to_float(x[c]) - s.mean) * s.rstd;
            out[c] = from_float<X>(h * to_float(gamma[c]) + beta_at(c));
        }
    };
    if (beta) return normalize([=](std::int64_t c) { return to_float(beta[c]); });
    normalize([](std::int64_t) { return 0.0F; });
}

// The backward pass has one loop for the input and one for the parameters. Each gives the same bits whether
// or not the other runs.
template <class X>
void backward_row(X* din, const X* dout, const X* x, const X* gamma, RowStatistics s, std::int64_t channels) {
    const auto count = static_cast<float>(channels);
    const auto h_at = [=](std::int64_t c) { return (to_float(x[c]) - s.mean) * s.rstd; };
    const auto g_at = [=](std::int64_t c) { return to_float(dout[c]) * to_float(gamma[c]); };
    const float mean_g = lane_sum<float>(channels, g_at) / count;
    const float mean_gh =
        lane_sum<float>(channels, [=](std::int64_t c) { return g_at(c) * h_at(c); }) / count;
#pragma omp simd
    for (std::int64_t c = 0; c < channels; ++c) {
        din[c] = from_float<X>(to_float(din[c]) + s.rstd * (g_at(c) - mean_g - h_at(c) * mean_gh));
    }
}

// Adds the row's terms to the block's sums for dgamma and dbeta.
template <class X>
void add_row_to_parameters(float* dgamma, float* dbeta, const X* dout, const X* x, RowStatistics s,
                           std::int64_t channels) {
#pragma omp simd
    for (std::int64_t c = 0; c < channels; ++c) {
        const float d = to_float(dout[c]);
        dgamma[c] += d * ((to_float(x[c]) - s.mean) * s.rstd);
        dbeta[c] += d;
    }
}

}  // namespace

void CpuOps::compute(const LayerNormForward& op, const RowSizes& sizes) {
    with_dtype(op.in.dtype, [&, N = sizes.rows, C = sizes.channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, N,
                     [=, y = op.out.as<X>(), x = op.in.as<X>(), g = op.gamma.as<X>(),
                      b = op.beta ? op.beta.as<X>() : nullptr, means = op.mean.as<float>(),
                      rstds = op.rstd.as<float>()](std::int64_t row) {
                         const RowStatistics s = row_statistics(x + row * C, C);
                         normalize_row(y + row * C, x + row * C, g, b, s, C);
                         means[row] = s.mean;
                         rstds[row] = s.rstd;
                     });
    });
}

void CpuOps::compute(const FusedResidualLayerNormForward& op, const RowSizes& sizes) {
    with_dtype(op.residual.dtype, [&, N = sizes.rows, C = sizes.channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, N,
                     [=, y = op.out.as<X>(), r = op.residual.as<X>(), a = op.in1.as<X>(), b = op.in2.as<X>(),
                      g = op.gamma.as<X>(), shift = op.beta ? op.beta.as<X>() : nullptr,
                      means = op.mean.as<float>(), rstds = op.rstd.as<float>()](std::int64_t row) {
                         const std::int64_t first = row * C;
#pragma omp simd
                         for (std::int64_t c = 0; c < C; ++c) {
                             r[first + c] = from_float<X>(to_float(a[first + c]) + to_float(b[first + c]));
                         }
                         const RowStatistics s = row_statistics(r + first, C);
                         normalize_row(y + first, r + first, g, shift, s, C);
                         means[row] = s.mean;
                         rstds[row] = s.rstd;
                     });
    });
}

void CpuOps::compute(const LayerNormBackward& op, const RowSizes& sizes) {
    const RowBlocks blocks(sizes.rows);
    // (blocks, 2, C): for dgamma and dbeta; those of dbeta are computed even if unused, which costs one
    // addition per element
    float* const partials = op.dgamma ? workspace(2 * blocks.count * sizes.channels) : nullptr;
    with_dtype(op.in.dtype, [&, C = sizes.channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, blocks.count,
                     [=, dx = op.din ? op.din.as<X>() : nullptr, dy = op.dout.as<X>(), x = op.in.as<X>(),
                      g = op.gamma.as<X>(), means = op.mean.as<float>(),
                      rstds = op.rstd.as<float>()](std::int64_t block) {
                         float* partial = partials ? partials + 2 * block * C : nullptr;
                         if (partial) std::fill_n(partial, 2 * C, 0.0F);
                         for (std::int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                             const std::int64_t first = row * C;
                             const RowStatistics s{means[row], rstds[row]};
                             if (partial) {
                                 add_row_to_parameters(partial, partial + C, dy + first, x + first, s, C);
                             }
                             if (dx) backward_row(dx + first, dy + first, x + first, g, s, C);
                         }
                     });
        if (!partials) return;
        add_partials(threads_, op.dgamma.as<float>(), partials, blocks.count, 2 * C, C);
        if (op.dbeta) add_partials(threads_, op.dbeta.as<float>(), partials + C, blocks.count, 2 * C, C);
    });
}

std::int64_t CpuOps::layernorm_floats(const WorkspaceRequest& request) const {
    return 2 * RowBlocks::count_up_to(request.batch * request.sequence) * request.channels;
}

}  // namespace llmc::cpu
