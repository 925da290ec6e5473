// Attention, and what is done to its heads before.
// ops.h has the letters and what all operations have in common.
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>

#include "llmc/core/tensor.h"
#include "llmc/device/heads.h"
#include "llmc/device/op_fields.h"
#include "llmc/device/sizes.h"

namespace llmc {

// The rows of heads that several tensor-parallel ranks share. Each rank has some elements of every row.
struct SharedRows {
    Tensor sums{};          // fp32 (R,N): a sum over each row's elements on each of the R ranks
    std::int64_t size = 0;  // elements of a whole row, on all ranks together
};

// `window` is the number of keys that a row sees at most, at least 1.
struct AttentionShape {
    std::int64_t batch, sequence, heads, head_size;
    std::int64_t key_heads = heads;
    std::int64_t window = sequence;  // hides nothing
    auto operator<=>(const AttentionShape&) const = default;
};

// `rows` is the number of new rows, `capacity` the most rows that the cache holds.
struct CachedAttentionShape {
    std::int64_t rows, capacity, heads, head_size;
    std::int64_t key_heads = heads;
    std::int64_t window = capacity;
};

// `sequence` is the number of rows after which positions begin again.
struct RopeSizes {
    std::int64_t rows, sequence, heads, head_size;
};

// `whole` is the number of elements that a norm is over: head_size, or more if ranks share the rows. `ranks`
// is 0 if they do not.
struct HeadNormSizes {
    std::int64_t rows, heads, head_size, whole, ranks;
};

// ---- causal attention ----
//
// In bf16, the exponentials and ds below may be rounded to bf16 before they are multiplied by v, dout, k
// or q. The sum of the exponentials uses unrounded ones.

// q, k and v are Heads (heads.h): they lie in rows of tensors X (B,T,...), N = B*T rows. Each may have a
// tensor of its own, or all may lie in one. There are H query heads, and K key heads with their values; K
// divides H. Query head h attends to key head h K / H, rounded down, so H/K neighbors share one. D is the
// head size.
//
// Row t sees key j if t - window < j <= t. With `window` 0, it sees all j <= t.

// For each b, query head, and t, with the sums over the keys that t sees:
//   s_j = q_t . k_j / sqrt(D);  lse_t = ln sum_j exp(s_j);  out_t = sum_j exp(s_j - lse_t) v_j
//   out X (B,T,H,D), lse fp32 (B,H,T), q of H heads, k and v of K heads, read in place
struct AttentionForward {
    static constexpr std::string_view name = "attention_forward";
    Tensor out, lse;
    Heads q, k, v;
    std::int64_t window = 0;
    auto fields(const auto& see) const {
        return see(writes("out", out), writes("lse", lse, DType::fp32), reads("q", q), reads("k", k),
                   reads("v", v), number("window", window));
    }
    AttentionShape sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// With p_tj = exp(s_tj - lse_t), D_t = dout_t . out_t, and ds_tj = p_tj (dout_t . v_j - D_t) for the keys
// that t sees:
//   dq_t = sum_j ds_tj k_j / sqrt(D);  dk_j = sum_t ds_tj q_t / sqrt(D);  dv_j = sum_t p_tj dout_t
// dk and dv also sum over the query heads of their key head, in the order of these heads.
//   dq, dk, dv: heads as q, k, v, in rows of one tensor or of several. The other elements of these rows
//   are not changed. dout, out X (B,T,H,D), lse fp32 (B,H,T), q, k, v, window as above
struct AttentionBackward {
    static constexpr std::string_view name = "attention_backward";
    Heads dq, dk, dv;
    Tensor dout;
    Heads q, k, v;
    Tensor out, lse;
    std::int64_t window = 0;
    auto fields(const auto& see) const {
        return see(writes("dq", dq), writes("dk", dk), writes("dv", dv), reads("dout", dout), reads("q", q),
                   reads("k", k), reads("v", v), reads("out", out), reads("lse", lse, DType::fp32),
                   number("window", window));
    }
    AttentionShape sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// Attention of n new rows. The cache holds the keys and values of the earlier rows of their sequence.
// With P = position and k_j, v_j = cache[j,0..1], for each query head, i = 0 ... n-1, and the keys that
// row P+i sees:
//   cache[P+i,0] = k[i], cache[P+i,1] = v[i];  s_j = q[i] . k_j / sqrt(D);
//   out_i = sum_j exp(s_j) v_j / sum_j exp(s_j)
//   out X (n,H,D); cache X (T,2,K,D) in place, its first P rows filled; q, k, v: n rows; P + n <= T
struct AttentionCachedForward {
    static constexpr std::string_view name = "attention_cached_forward";
    Tensor out, cache;
    Heads q, k, v;
    std::int64_t position, window = 0;
    auto fields(const auto& see) const {
        return see(writes("out", out), writes("cache", cache), reads("q", q), reads("k", k), reads("v", v),
                   number("position", position), number("window", window));
    }
    CachedAttentionShape sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// ---- heads ----
//
// Heads (heads.h) lie in rows of tensors, N rows in all. Elements of these rows outside the heads are not
// changed. D is the size of a head. A device may require that `first`, D, and the rows of a tensor are
// whole pieces of 16 bytes.

// Rotary positions. In each head x, with t = position + the row's index in its sequence, for i < D/2, and
// with (cos, sin) = angles[t,i]:
//   x_i = x_i cos - x_{i+D/2} sin;  x_{i+D/2} = x_{i+D/2} cos + x_i sin
// With `inverse`, by -sin: this is also the backward pass. A row's index in its sequence is its second
// index in rows of shape (B,T,R), and its first in rows (n,R).
//   x X (B,T,R) or (n,R), in place; angles fp32 (at least position + T or n, D/2, 2); D is a multiple of
//   2, on a GPU of 8
struct Rope {
    static constexpr std::string_view name = "rope";
    Heads x;
    Tensor angles;
    std::int64_t position;
    bool inverse;
    auto fields(const auto& see) const {
        return see(changes("x", x), reads("angles", angles, DType::fp32), number("position", position),
                   number("inverse", inverse));
    }
    RopeSizes sizes() const;
    OpCost cost() const;
};

// The root-mean-square norm of each head:
//   rstd = (1/D sum_i x_i^2 + eps)^-1/2;  out_i = x_i rstd weight_i
// Without weight, 1 is in its place. With `shared`, a row is one head of shared->size elements, of which
// `in` has those of this rank. The sum is then that of shared->sums over the ranks, in their order, and D
// is shared->size.
//   out, in X, of the same count and size; the count is 1 if `shared`; rstd fp32 (N, count),
//   saved for backward; weight X (D) [optional]
struct HeadNormForward {
    static constexpr std::string_view name = "head_norm_forward";
    Heads out;
    Tensor rstd;
    Heads in;
    Tensor weight;
    float eps;
    SharedRows shared{};
    auto fields(const auto& see) const {
        return see(writes("out", out), writes("rstd", rstd, DType::fp32), reads("in", in),
                   optional(reads("weight", weight)), number("eps", eps),
                   optional(reads("sums", shared.sums, DType::fp32)), number("whole", shared.size));
    }
    HeadNormSizes sizes() const;
    OpCost cost() const;
};

// sums = sum_i x_i^2: a rank's row of SharedRows::sums for head_norm_forward
//   sums fp32 (N); in X, a count of 1
struct HeadNormSums {
    static constexpr std::string_view name = "head_norm_sums";
    Tensor sums;
    Heads in;
    auto fields(const auto& see) const { return see(writes("sums", sums, DType::fp32), reads("in", in)); }
    HeadNormSizes sizes() const;
    OpCost cost() const;
};

// With h = x rstd and g = dout weight:
//   din = rstd (g - h 1/D sum_i(g_i h_i));  dweight += sum over rows and heads of dout h
// `shared` is as in head_norm_forward, with sums of g h; dweight does not need it. din may be dout.
// Each output has the same bits whether or not the same call computes the other.
//   din [optional: without rows], dout, in X, of the same count and size; dweight fp32 (D) [optional];
//   weight X (D) [optional]; rstd fp32 (N, count)
struct HeadNormBackward {
    static constexpr std::string_view name = "head_norm_backward";
    Heads din;
    Tensor dweight;
    Heads dout, in;
    Tensor weight, rstd;
    SharedRows shared{};
    auto fields(const auto& see) const {
        return see(optional(writes("din", din)), optional(changes("dweight", dweight, DType::fp32)),
                   reads("dout", dout), reads("in", in), optional(reads("weight", weight)),
                   reads("rstd", rstd, DType::fp32), optional(reads("sums", shared.sums, DType::fp32)),
                   number("whole", shared.size));
    }
    HeadNormSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// sums = sum_i g_i h_i: a rank's row of SharedRows::sums for head_norm_backward
//   sums fp32 (N); dout, in X, a count of 1; weight X (D) [optional]; rstd fp32 (N)
struct HeadNormBackwardSums {
    static constexpr std::string_view name = "head_norm_backward_sums";
    Tensor sums;
    Heads dout, in;
    Tensor weight, rstd;
    auto fields(const auto& see) const {
        return see(writes("sums", sums, DType::fp32), reads("dout", dout), reads("in", in),
                   optional(reads("weight", weight)), reads("rstd", rstd, DType::fp32));
    }
    HeadNormSizes sizes() const;
    OpCost cost() const;
};

}  // namespace llmc
