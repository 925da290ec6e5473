// Layernorm and RMS norm over the last dimension.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

constexpr float layernorm_epsilon = 1e-5F;

struct RowStatistics {
    float mean;  // 0 for RMS norm
    float rstd;
};

// An element of a row, normalized: layernorm is `centred`, RMS norm subtracts no mean.
template <bool centred, class X>
float normalized(X x, RowStatistics s) {
    return (centred ? to_float(x) - s.mean : to_float(x)) * s.rstd;
}

// The variance is a sum of squared differences from the mean. Computing it as the mean square minus the
// squared mean would lose precision by cancellation if the mean is large.
template <bool centred, class X>
RowStatistics row_statistics(const X* x, float eps, std::int64_t channels) {
    const auto count = static_cast<float>(channels);
    float mean = 0;
    if constexpr (centred)
        mean = lane_sum<float>(channels, [=](std::int64_t c) { return to_float(x[c]); }) / count;
    const float squares = lane_sum<float>(channels, [=](std::int64_t c) {
        const float d = centred ? to_float(x[c]) - mean : to_float(x[c]);
        return d * d;
    });
    return {mean, 1.0F / std::sqrt(squares / count + eps)};
}

// Calls f(at), where at(c) is number c of a tensor of the channels, or `otherwise` if there is none. f is
// compiled twice, so that a loop has no branch.
template <class X, class F>
void with_channels(const X* numbers, float otherwise, const F& f) {
    if (numbers) return f([=](std::int64_t c) { return to_float(numbers[c]); });
    f([=](std::int64_t) { return otherwise; });
}

template <bool centred, class X>
void normalize_row(X* out, const X* x, const X* weight, const X* bias, RowStatistics s,
                   std::int64_t channels) {
    with_channels(weight, 1.0F, [=](auto weight_at) {
        const auto normalize = [=](auto bias_at) {
#pragma omp simd
            for (std::int64_t c = 0; c < channels; ++c) {
                const float h = normalized<centred>(x[c], s);
                if constexpr (centred) {
                    out[c] = from_float<X>(h * weight_at(c) + bias_at(c));
                } else {
                    out[c] = from_float<X>(h * weight_at(c));
                }
            }
        };
        if constexpr (centred) {
            with_channels(bias, 0.0F, normalize);
        } else {
            normalize(weight_at);
        }
    });
}

// The backward pass has one loop for the input and one for the parameters. Each gives the same bits whether
// or not the other runs.
template <bool centred, class X>
void backward_row(X* din, const X* dout, const X* x, const X* weight, RowStatistics s,
                  std::int64_t channels) {
    with_channels(weight, 1.0F, [=](auto weight_at) {
        const auto count = static_cast<float>(channels);
        const auto h_at = [=](std::int64_t c) { return normalized<centred>(x[c], s); };
        const auto g_at = [=](std::int64_t c) { return to_float(dout[c]) * weight_at(c); };
        float mean_g = 0;
        if constexpr (centred) mean_g = lane_sum<float>(channels, g_at) / count;
        const float mean_gh =
            lane_sum<float>(channels, [=](std::int64_t c) { return g_at(c) * h_at(c); }) / count;
#pragma omp simd
        for (std::int64_t c = 0; c < channels; ++c) {
            const float g = centred ? g_at(c) - mean_g : g_at(c);
            din[c] = from_float<X>(to_float(din[c]) + s.rstd * (g - h_at(c) * mean_gh));
        }
    });
}

// Adds the row's terms to the block's sums for the weight and the bias, which RMS norm has not.
template <bool centred, class X>
void add_row_to_parameters(float* dweight, float* dbias, const X* dout, const X* x, RowStatistics s,
                           std::int64_t channels) {
#pragma omp simd
    for (std::int64_t c = 0; c < channels; ++c) {
        const float d = to_float(dout[c]);
        dweight[c] += d * normalized<centred>(x[c], s);
        if constexpr (centred) dbias[c] += d;
    }
}

template <class T>
T* optional(const Tensor& tensor) {
    return tensor ? tensor.as<T>() : nullptr;
}

// The operands of both norms. A norm of in1 alone has no in2 and no residual; RMS norm has no mean and no bias.
struct ForwardOperands {
    Tensor residual, out, mean, rstd, in1, in2, weight, bias;
    float eps;
};
struct BackwardOperands {
    Tensor din, dweight, dbias, dout, in, weight, mean, rstd;
};

template <bool centred>
void forward(int threads, const ForwardOperands& op, const RowSizes& sizes) {
    with_dtype(op.in1.dtype, [&, C = sizes.channels](auto element) {
        using X = decltype(element);
        parallel_for(
            threads, sizes.rows,
            [=, y = op.out.as<X>(), r = optional<X>(op.residual), a = op.in1.as<X>(), b = optional<X>(op.in2),
             weight = optional<X>(op.weight), bias = optional<X>(op.bias), means = optional<float>(op.mean),
             rstds = op.rstd.as<float>(), eps = op.eps](std::int64_t row) {
                const std::int64_t first = row * C;
                if (b) {
#pragma omp simd
                    for (std::int64_t c = first; c < first + C; ++c)
                        r[c] = from_float<X>(to_float(a[c]) + to_float(b[c]));
                }
                const X* x = b ? r + first : a + first;
                const RowStatistics s = row_statistics<centred>(x, eps, C);
                normalize_row<centred, X>(y + first, x, weight, bias, s, C);
                if constexpr (centred) means[row] = s.mean;
                rstds[row] = s.rstd;
            });
    });
}

// `partials`: fp32 (blocks, 2, C) for layernorm, where those of the bias are computed even if unused, which costs one
// addition per element; (blocks, 1, C) for RMS norm; null without dweight.
template <bool centred>
void backward(int threads, const BackwardOperands& op, const RowSizes& sizes, float* partials) {
    const RowBlocks blocks(sizes.rows);
    const std::int64_t C = sizes.channels, width = centred ? 2 * C : C;
    with_dtype(op.in.dtype, [&](auto element) {
        using X = decltype(element);
        parallel_for(threads, blocks.count,
                     [=, dx = optional<X>(op.din), dy = op.dout.as<X>(), x = op.in.as<X>(),
                      weight = optional<X>(op.weight), means = optional<float>(op.mean),
                      rstds = op.rstd.as<float>()](std::int64_t block) {
                         float* partial = partials ? partials + block * width : nullptr;
                         if (partial) std::fill_n(partial, width, 0.0F);
                         for (std::int64_t row = blocks.begin(block); row < blocks.end(block); ++row) {
                             const std::int64_t first = row * C;
                             const RowStatistics s{centred ? means[row] : 0, rstds[row]};
                             if (partial) {
                                 add_row_to_parameters<centred>(partial, partial + C, dy + first, x + first,
                                                                s, C);
                             }
                             if (dx)
                                 backward_row<centred, X>(dx + first, dy + first, x + first, weight, s, C);
                         }
                     });
        if (!partials) return;
        add_partials(threads, op.dweight.as<float>(), partials, blocks.count, width, C);
        if (op.dbias) add_partials(threads, op.dbias.as<float>(), partials + C, blocks.count, width, C);
    });
}

}  // namespace

void CpuOps::compute(const LayerNormForward& op, const RowSizes& sizes) {
    forward<true>(threads_, {{}, op.out, op.mean, op.rstd, op.in, {}, op.gamma, op.beta, layernorm_epsilon},
                  sizes);
}

void CpuOps::compute(const FusedResidualLayerNormForward& op, const RowSizes& sizes) {
    forward<true>(
        threads_,
        {op.residual, op.out, op.mean, op.rstd, op.in1, op.in2, op.gamma, op.beta, layernorm_epsilon}, sizes);
}

void CpuOps::compute(const LayerNormBackward& op, const RowSizes& sizes) {
    float* const partials = op.dgamma ? workspace(2 * RowBlocks(sizes.rows).count * sizes.channels) : nullptr;
    backward<true>(threads_, {op.din, op.dgamma, op.dbeta, op.dout, op.in, op.gamma, op.mean, op.rstd}, sizes,
                   partials);
}

void CpuOps::compute(const RmsNormForward& op, const RowSizes& sizes) {
    forward<false>(threads_, {{}, op.out, {}, op.rstd, op.in, {}, op.weight, {}, op.eps}, sizes);
}

void CpuOps::compute(const FusedResidualRmsNormForward& op, const RowSizes& sizes) {
    forward<false>(threads_, {op.residual, op.out, {}, op.rstd, op.in1, op.in2, op.weight, {}, op.eps},
                   sizes);
}

void CpuOps::compute(const RmsNormBackward& op, const RowSizes& sizes) {
    float* const partials = op.dweight ? workspace(RowBlocks(sizes.rows).count * sizes.channels) : nullptr;
    backward<false>(threads_, {op.din, op.dweight, {}, op.dout, op.in, op.weight, {}, op.rstd}, sizes,
                    partials);
}

std::int64_t CpuOps::layernorm_floats(const WorkspaceRequest& request) const {
    return 2 * RowBlocks::count_up_to(request.batch * request.sequence) * request.channels;
}

}  // namespace llmc::cpu
