// Attention backward in double, with a bound for the error of a kernel in fp32. The kernel lab and the
// kernel's test use it.
#pragma once

#include <cmath>
#include <vector>

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"
#include "llmc/device/cuda/attention_tiles.cuh"

namespace lab {

using llmc::cuda::AttentionSizes;

// The elements of a row of q, k and v that lie one after the other (packed_heads).
inline std::int64_t packed_row(const AttentionSizes& s) {
    return (s.heads + 2 * std::int64_t{s.key_heads}) * s.head_size;
}
// The index in such rows of row t of query head `head` (part 0), or of the keys (1) or values (2) that it
// reads.
inline std::int64_t qkv_index(const AttentionSizes& s, std::int64_t head, std::int64_t t, int part) {
    const std::int64_t b = head / s.heads, h = head % s.heads;
    const std::int64_t place =
        part == 0 ? h : s.heads + (part - 1) * std::int64_t{s.key_heads} + h * s.key_heads / s.heads;
    return (b * s.sequence + t) * packed_row(s) + place * s.head_size;
}
// The pairs of a query and a key that it sees, of all heads.
inline double pairs_of(const AttentionSizes& s) {
    const double t = s.sequence, w = s.window;  // the first w rows see all keys before them
    return static_cast<double>(s.all_heads()) * (w * (w + 1) / 2 + (t - w) * w);
}
// The index of element (b,t,h,0) of out (B,T,H,D)
inline std::int64_t out_index(const AttentionSizes& s, std::int64_t head, std::int64_t t) {
    const std::int64_t b = head / s.heads, h = head % s.heads;
    return ((b * s.sequence + t) * s.heads + h) * s.head_size;
}

// The sum of the products of two rows, and the sum of their magnitudes.
struct RowProduct {
    double value = 0, magnitude = 0;
};
template <class X>
RowProduct row_product(const X* a, const X* b, int n) {
    RowProduct product;
    for (int c = 0; c < n; ++c) {
        const double x = double{to_float(a[c])} * to_float(b[c]);
        product.value += x;
        product.magnitude += std::fabs(x);
    }
    return product;
}

// Computes out and lse of the forward pass, each rounded once.
template <class X>
void reference_attention_forward(Array<X>& out, Array<float>& lse, const Array<X>& qkv,
                                 const AttentionSizes& s) {
    const double scale = 1 / std::sqrt(s.head_size);
    std::vector<double> p(static_cast<std::size_t>(s.sequence)), sums(static_cast<std::size_t>(s.head_size));
    for (std::int64_t head = 0; head < s.all_heads(); ++head) {
        for (int t = 0; t < s.sequence; ++t) {
            double total = 0;
            std::fill(sums.begin(), sums.end(), 0.0);
            for (int j = s.first_key(t); j <= t; ++j) {
                const X* const q = &qkv[qkv_index(s, head, t, 0)];
                p[j] = std::exp(row_product(q, &qkv[qkv_index(s, head, j, 1)], s.head_size).value * scale);
                total += p[j];
                const X* const v = &qkv[qkv_index(s, head, j, 2)];
                for (int c = 0; c < s.head_size; ++c) sums[c] += p[j] * to_float(v[c]);
            }
            lse[head * s.sequence + t] = static_cast<float>(std::log(total));
            for (int c = 0; c < s.head_size; ++c) {
                out[out_index(s, head, t) + c] = from_float<X>(static_cast<float>(sums[c] / total));
            }
        }
    }
}

struct AttentionGradients {
    std::vector<double> dqkv;
    // The largest error of dqkv before it is rounded to X.
    std::vector<double> error;
};

// `rounding` is that of p and ds before they are multiplied.
template <class X>
AttentionGradients reference_attention_backward(const Array<X>& dout, const Array<X>& qkv,
                                                const Array<X>& out, const Array<float>& lse,
                                                const AttentionSizes& s, const Rounding& rounding) {
    constexpr double u = unit_roundoff<float>;
    const int n = s.head_size;
    const double scale = 1 / std::sqrt(n);
    const auto size = static_cast<std::size_t>(qkv.size());
    AttentionGradients gradients{std::vector<double>(size), std::vector<double>(size)};
    for (std::int64_t head = 0; head < s.all_heads(); ++head) {
        for (int t = 0; t < s.sequence; ++t) {
            const X* const g = &dout[out_index(s, head, t)];
            const X* const q = &qkv[qkv_index(s, head, t, 0)];
            const double row_sum = lse[head * s.sequence + t];
            const RowProduct d = row_product(g, &out[out_index(s, head, t)], n);
            for (int j = s.first_key(t); j <= t; ++j) {
                const X* const k = &qkv[qkv_index(s, head, j, 1)];
                const X* const v = &qkv[qkv_index(s, head, j, 2)];
                const RowProduct score = row_product(q, k, n), dp = row_product(g, v, n);
                const double exponent = score.value * scale - row_sum;
                const double p = std::exp(exponent), ds = p * (dp.value - d.value);
                // Sums of n products: 2 n u, since tensor cores truncate where others round. The score is
                // scaled and lse is subtracted, perhaps both for base 2 (3 u, 2 u, u). Then 2^x has 2 ulp. An
                // absolute error of the exponent is a relative error of p.
                const double p_error = p * u *
                                       ((2 * n + 3) * score.magnitude * scale + 2 * std::fabs(row_sum) +
                                        std::fabs(exponent) + 4);
                const double ds_error = p * 2 * n * u * (dp.magnitude + d.magnitude) +
                                        p_error * std::fabs(dp.value - d.value) + 3 * u * std::fabs(ds);
                const double p_total = p_error + rounding.error(p, p_error);
                const double ds_total = ds_error + rounding.error(ds, ds_error);
                // These are sums of up to T H/K such products, which are then scaled.
                const double sum_roundoff = (2.0 * s.sequence * s.group() + 3) * u;
                const auto add = [&](std::int64_t to, const X* x, double weight, double weight_error) {
                    for (int c = 0; c < n; ++c) {
                        gradients.dqkv[to + c] += weight * to_float(x[c]);
                        gradients.error[to + c] +=
                            (weight_error + sum_roundoff * (std::fabs(weight) + weight_error)) *
                            std::fabs(to_float(x[c]));
                    }
                };
                add(qkv_index(s, head, t, 0), k, ds * scale, ds_total * scale);
                add(qkv_index(s, head, j, 1), q, ds * scale, ds_total * scale);
                add(qkv_index(s, head, j, 2), g, p, p_total);
            }
        }
    }
    return gradients;
}

}  // namespace lab
