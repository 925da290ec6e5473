// RMS norm over the last dimension.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

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

void CpuOps::compute(const RmsNormForward& op, const RowSizes& s) {
    with_dtype(op.in.dtype, [&, N = s.rows, C = s.channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, N,
                     [=, y = op.out.as<X>(), x = op.in.as<X>(), w = optional<X>(op.weight),
                      rstds = op.rstd.as<float>(), eps = op.eps](std::int64_t row) {
                         rstds[row] = normalize_row(y + row * C, x + row * C, w, eps, C);
                     });
    });
}

void CpuOps::compute(const FusedResidualRmsNormForward& op, const RowSizes& s) {
    with_dtype(op.residual.dtype, [&, N = s.rows, C = s.channels](auto element) {
        using X = decltype(element);
        parallel_for(
            threads_, N,
            [=, y = op.out.as<X>(), r = op.residual.as<X>(), a = op.in1.as<X>(), b = op.in2.as<X>(),
             w = optional<X>(op.weight), rstds = op.rstd.as<float>(), eps = op.eps](std::int64_t row) {
                const std::int64_t first = row * C;
#pragma omp simd
                for (std::int64_t c = 0; c < C; ++c) {
                    r[first + c] = from_float<X>(to_float(a[first + c]) + to_float(b[first + c]));
                }
                rstds[row] = normalize_row(y + first, r + first, w, eps, C);
            });
    });
}

void CpuOps::compute(const RmsNormBackward& op, const RowSizes& s) {
    const RowBlocks blocks(s.rows);
    // (blocks, C): half of what layernorm's backward pass takes, for which workspace_bytes has room.
    float* const partials = op.dweight ? workspace(blocks.count * s.channels) : nullptr;
    with_dtype(op.in.dtype, [&, C = s.channels](auto element) {
        using X = decltype(element);
        parallel_for(threads_, blocks.count,
                     [=, dx = op.din ? op.din.as<X>() : nullptr, dy = op.dout.as<X>(), x = op.in.as<X>(),
                      w = optional<X>(op.weight), rstds = op.rstd.as<float>()](std::int64_t block) {
                         float* partial = partials ? partials + block * C : nullptr;
                         if (partial) std::fill_n(partial, C, 0.0F);
                         for (std::int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                             const std::int64_t first = row * C;
                             if (partial) add_row_to_weight(partial, dy + first, x + first, rstds[row], C);
                             if (dx) backward_row(dx + first, dy + first, x + first, w, rstds[row], C);
                         }
                     });
        if (partials) add_partials(threads_, op.dweight.as<float>(), partials, blocks.count, C, C);
    });
}

}  // namespace llmc::cpu
