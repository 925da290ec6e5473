// RMS norm over the last dimension.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/operands.h"

namespace llmc::cpu {

namespace {

// Calls f(at), where at(c) is the weight of channel c. A null weight counts as ones. f is compiled twice, so
// that a loop has no branch.
template <class X, class F>
void with_weight(const X* weight, const F& f) {
    if (weight) return f([=](std::int64_t c) { return to_float(weight[c]); });
    f([](std::int64_t) { return 1.0F; });
}

// out = x rstd w; returns rstd.
template <class X>
float normalize_row(X* out, const X* x, const X* weight, float eps, std::int64_t channels) {
    const float squares = lane_sum<float>(channels, [=](std::int64_t c) {
        const float v = to_float(x[c]);
        return v * v;
    });
    const float rstd = 1.0F / std::sqrt(squares / static_cast<float>(channels) + eps);
    with_weight(weight, [=](auto weight_at) {
#pragma omp simd
        for (std::int64_t c = 0; c < channels; ++c) {
            out[c] = from_float<X>(to_float(x[c]) * rstd * weight_at(c));
        }
    });
    return rstd;
}

// The backward pass has one loop for the input and one for the weight. Each gives the same bits whether or
// not the other runs.
template <class X>
void backward_row(X* din, const X* dout, const X* x, const X* weight, float rstd, std::int64_t channels) {
    with_weight(weight, [=](auto weight_at) {
        const auto h_at = [=](std::int64_t c) { return to_float(x[c]) * rstd; };
        const auto g_at = [=](std::int64_t c) { return to_float(dout[c]) * weight_at(c); };
        const float mean_gh = lane_sum<float>(channels, [=](std::int64_t c) { return g_at(c) * h_at(c); }) /
                              static_cast<float>(channels);
#pragma omp simd
        for (std::int64_t c = 0; c < channels; ++c) {
            din[c] = from_float<X>(to_float(din[c]) + rstd * (g_at(c) - h_at(c) * mean_gh));
        }
    });
}

// Adds the row's terms to the block's sums for dweight.
template <class X>
void add_row_to_weight(float* dweight, const X* dout, const X* x, float rstd, std::int64_t channels) {
#pragma omp simd
    for (std::int64_t c = 0; c < channels; ++c) dweight[c] += to_float(dout[c]) * (to_float(x[c]) * rstd);
}

template <class X>
const X* optional(const Tensor& tensor) {
    return tensor ? tensor.as<X>() : nullptr;
}

}  // namespace

void CpuOps::rmsnorm_forward(const Tensor& out, const Tensor& rstd, const Tensor& in, const Tensor& weight,
                             float eps) {
    const auto [rows, channels] = rmsnorm_forward_sizes(out, rstd, in, weight);
    with_dtype(in.dtype, [&, N = rows, C = channels](auto element) {
        using X = decltype(element);
        parallel_for(
            threads_, N,
            [=, y = out.as<X>(), x = in.as<X>(), w = optional<X>(weight), rstds = rstd.as<float>()](
                std::int64_t row) { rstds[row] = normalize_row(y + row * C, x + row * C, w, eps, C); });
    });
}

void CpuOps::fused_residual_rmsnorm_forward(const Tensor& residual, const Tensor& out, const Tensor& rstd,
                                            const Tensor& in1, const Tensor& in2, const Tensor& weight,
                                            float eps) {
    const auto [rows, channels] = fused_residual_rmsnorm_sizes(residual, out, rstd, in1, in2, weight);
    with_dtype(residual.dtype, [&, N = rows, C = channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, N,
                     [=, y = out.as<X>(), r = residual.as<X>(), a = in1.as<X>(), b = in2.as<X>(),
                      w = optional<X>(weight), rstds = rstd.as<float>()](std::int64_t row) {
                         const std::int64_t first = row * C;
#pragma omp simd
                         for (std::int64_t c = 0; c < C; ++c) {
                             r[first + c] = from_float<X>(to_float(a[first + c]) + to_float(b[first + c]));
                         }
                         rstds[row] = normalize_row(y + first, r + first, w, eps, C);
                     });
    });
}

void CpuOps::rmsnorm_backward(const Tensor& din, const Tensor& dweight, const Tensor& dout, const Tensor& in,
                              const Tensor& weight, const Tensor& rstd) {
    const auto [rows, channels] = rmsnorm_backward_sizes(din, dweight, dout, in, weight, rstd);
    const RowBlocks blocks(rows);
    // (blocks, C): half of what layernorm's backward pass takes, for which workspace_bytes has room.
    float* const partials = dweight ? workspace(blocks.count * channels) : nullptr;
    with_dtype(in.dtype, [&, C = channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, blocks.count,
                     [=, dx = din ? din.as<X>() : nullptr, dy = dout.as<X>(), x = in.as<X>(),
                      w = optional<X>(weight), rstds = rstd.as<float>()](std::int64_t block) {
                         float* partial = partials ? partials + block * C : nullptr;
                         if (partial) std::fill_n(partial, C, 0.0F);
                         for (std::int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                             const std::int64_t first = row * C;
                             if (partial) add_row_to_weight(partial, dy + first, x + first, rstds[row], C);
                             if (dx) backward_row(dx + first, dy + first, x + first, w, rstds[row], C);
                         }
                     });
        if (partials) add_partials(threads_, dweight.as<float>(), partials, blocks.count, C, C);
    });
}

}  // namespace llmc::cpu
