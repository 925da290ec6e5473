// The operations of a GPT, each defined once as mathematics. A call of an operation is a value: a struct with its
// operands and numbers. A device runs any of them (Ops::run), with a function for each struct.
//
// Letters: B batch, T sequence, C channels, NH heads, HS head size (C = NH*HS), V vocabulary, Vp the padded V
// that is stored, N = B*T rows. OC and IC are the output and input channels of a matrix product.
//
// Common to all operations:
// - `X` is the compute dtype (fp32, bf16 or fp16), the same for every X of a call. Arithmetic and sums are in fp32
//   whatever X is. A result is rounded to X once, when it is stored. (On GPUs, matmul_backward with pre_gelu
//   rounds din twice.)
// - "= " overwrites, "+= " accumulates. Gradients of parameters are always accumulated in fp32. If they are
//   kept in bf16, `accumulate` then adds them to the bf16 gradients.
// - An operand marked [optional] may be an empty Tensor.
// - Deterministic: the same call with the same shapes and threads gives the same bits.
// - A device may require 16-byte alignment: tensors of X begin at multiples of 16 bytes, and so do their rows
//   (C, OC, IC or Vp elements; for GELU all elements count as one row). Then the heads of attention begin at
//   such addresses, too. A device may also require that the head size is a multiple of 8 up to 128, and that
//   AdamW's segments consist of whole groups of 4 elements. `sum` and the elementwise operations take any
//   number of elements at any address.
// - Shapes are checked; a wrong one is a ProgrammingError. So is a token or target that is not a row of its
//   table.
// - fields() lists the operands and the numbers of a call. sizes() checks them, cost() is the work of the call, and
//   workspace() asks for the scratch memory of those that need some.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>

#include "llmc/core/tensor.h"
#include "llmc/device/fields.h"
#include "llmc/device/fp8.h"
#include "llmc/device/heads.h"
#include "llmc/device/sizes.h"

namespace llmc {

// The gradient norm adds sums of squares over blocks of this many elements. The norm then does not depend on
// how a buffer is sharded, if shards are whole blocks.
inline constexpr std::int64_t norm_block_elements = 1024;

// A tensor (N,C) in 8 bits, for products of a device that takes bytes.
struct Fp8Copies {
    Tensor plain;       // uint8 (N,C) [optional]
    Tensor transposed;  // uint8 (C,N) [optional]
    Tensor inverse;     // fp32 (1): one over the scale
};

// A row with this target has no loss and no gradient.
inline constexpr std::int32_t ignored_target = -1;

// Elements [begin, end) of a flat buffer decay with `weight_decay`. Elements that no segment covers are
// padding and are not changed.
struct AdamWSegment {
    std::int64_t begin;
    std::int64_t end;
    double weight_decay;
    std::int64_t in_small =
        -1;  // with moments in 8 bits: its first element in EightBitMoments::m; -1: it has none there
};

// What AdamW needs beside moments m and v in 8 bits (eight_bit_moments.h): the greatest magnitude of each block of 256
// elements, and the moments in fp32 of tensors that are too small. In a block, the elements of such tensors count as 0.
struct EightBitMoments {
    Tensor m_amax, v_amax;  // fp32 (n / eight_bit_block)
    Tensor m, v;            // fp32
};

struct AdamWStep {
    std::int64_t step;  // counts from 1
    double learning_rate;
    double beta1;
    double beta2;
    double eps;
    double max_grad_norm;   // clip the global norm to this; 0 does not clip
    double loss_scale = 1;  // of the gradients, a power of two
};

// Rounds numbers to bf16 up or down at random, not to nearest. The random bits are a pure function of the seed, the
// step and the element's index in the rank's part of the model (device/stochastic_rounding.h).
struct StochasticRounding {
    std::uint64_t seed;
    std::int64_t first_element;  // the index there of the buffer's first element; a multiple of 4
};

// The classifier caps logits x before the softmax, and adds a z-loss to its gradient.
struct ClassifierTerms {
    float cap = 0;     // the softmax is of y = cap tanh(x/cap); 0: of y = x
    float z_loss = 0;  // z: the gradient is that of loss + z lse^2, lse = ln sum_v exp(y_v)
};

// The rows of heads that several tensor-parallel ranks share. Each rank has some elements of every row.
struct SharedRows {
    Tensor sums{};          // fp32 (R,N): a sum over each row's elements on each of the R ranks
    std::int64_t size = 0;  // elements of a whole row, on all ranks together
};

// A matrix product (rows, inner) x (inner, columns).
struct ProductSizes {
    double rows = 0, inner = 0, columns = 0;
    double flops() const { return 2 * rows * inner * columns; }
};
enum class Arithmetic : std::uint8_t { other, products, attention };

// The work of a call on any device: its floating-point operations, and the bytes that it must move. A tensor that is
// changed in place is moved twice, a table only in the rows that are looked up.
struct OpCost {
    double flops = 0, bytes = 0;
    Arithmetic arithmetic = Arithmetic::other;
    DType dtype = DType::fp32;               // of the arithmetic, at best; uint8: of products in 8 bits
    std::array<ProductSizes, 2> products{};  // those whose flops these are
};

// ---- the sizes of the operations below
//
// sizes() checks the dtypes and shapes of all operands. A wrong one is a ProgrammingError.

struct EncoderSizes {
    std::int64_t batch, sequence, channels, rows_of_wte;
};
struct RowSizes {
    std::int64_t rows, channels;
};
struct MatmulSizes {
    std::int64_t rows, in_channels, out_channels;
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
struct ClassifierSizes {
    std::int64_t rows, channels, ranks;
};
// The numbers in a row's statistics: maximum, sum, logit.
inline constexpr std::int64_t classifier_statistics_numbers = 3;

// ---- embedding ----
//
// With first_row, wte and dwte are rows [first_row, first_row + Vp) of a table whose other rows are on
// other ranks. A token outside these rows contributes 0. One rank has wpe; the sum of all ranks' outputs
// is the embedding.

// out[b,t,:] = wte[tokens[b,t] - first_row,:] + wpe[t,:]
//   out X (B,T,C), tokens int32 (B,T), wte X (Vp,C), wpe X (at least T, C) [optional]
struct EncoderForward {
    static constexpr std::string_view name = "encoder_forward";
    Tensor out, tokens, wte, wpe{};
    std::optional<std::int64_t> first_row{};
    auto fields() const {
        return std::tuple{writes("out", out), reads("tokens", tokens, DType::int32), reads("wte", wte),
                          optional(reads("wpe", wpe)), number("first_row", first_row)};
    }
    EncoderSizes sizes() const;
    OpCost cost() const;
};

// dwte[tokens[b,t] - first_row,:] += dout[b,t,:];  dwpe[t,:] += sum_b dout[b,t,:]
//   dwte fp32 (Vp,C), dwpe fp32 (at least T, C) [optional], dout X (B,T,C), tokens int32 (B,T)
struct EncoderBackward {
    static constexpr std::string_view name = "encoder_backward";
    Tensor dwte, dwpe, dout, tokens;
    std::optional<std::int64_t> first_row{};
    auto fields() const {
        return std::tuple{changes("dwte", dwte, DType::fp32), optional(changes("dwpe", dwpe, DType::fp32)),
                          reads("dout", dout), reads("tokens", tokens, DType::int32),
                          number("first_row", first_row)};
    }
    EncoderSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// ---- layernorm ----

// mean = 1/C sum_c x_c;  rstd = (1/C sum_c (x_c - mean)^2 + 1e-5)^-1/2;  out = (x - mean) rstd gamma + beta
// Without beta, +0 is added in its place.
//   out, in X (..., C); mean, rstd fp32 (N), saved for backward; gamma X (C), beta X (C) [optional]
struct LayerNormForward {
    static constexpr std::string_view name = "layernorm_forward";
    Tensor out, mean, rstd, in, gamma, beta;
    auto fields() const {
        return std::tuple{writes("out", out),
                          writes("mean", mean, DType::fp32),
                          writes("rstd", rstd, DType::fp32),
                          reads("in", in),
                          reads("gamma", gamma),
                          optional(reads("beta", beta))};
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// With h = (x - mean) rstd and g = dout gamma:
//   din += rstd (g - 1/C sum g - h 1/C sum(g h));  dgamma += sum_rows dout h;  dbeta += sum_rows dout
// din accumulates because the residual stream's gradient also passes around the layernorm. Each output
// has the same bits whether or not the same call computes the others.
//   din X (..., C) [optional], dgamma fp32 (C) [optional], dbeta fp32 (C) [optional, none without dgamma],
//   dout, in X (..., C)
struct LayerNormBackward {
    static constexpr std::string_view name = "layernorm_backward";
    Tensor din, dgamma, dbeta, dout, in, gamma, mean, rstd;
    auto fields() const {
        return std::tuple{optional(changes("din", din)),
                          optional(changes("dgamma", dgamma, DType::fp32)),
                          optional(changes("dbeta", dbeta, DType::fp32)),
                          reads("dout", dout),
                          reads("in", in),
                          reads("gamma", gamma),
                          reads("mean", mean, DType::fp32),
                          reads("rstd", rstd, DType::fp32)};
    }
    RowSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// residual = in1 + in2 (rounded to X), then layernorm_forward of the rounded residual.
struct FusedResidualLayerNormForward {
    static constexpr std::string_view name = "fused_residual_layernorm_forward";
    Tensor residual, out, mean, rstd, in1, in2, gamma, beta;
    auto fields() const {
        return std::tuple{writes("residual", residual),
                          writes("out", out),
                          writes("mean", mean, DType::fp32),
                          writes("rstd", rstd, DType::fp32),
                          reads("in1", in1),
                          reads("in2", in2),
                          reads("gamma", gamma),
                          optional(reads("beta", beta))};
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// ---- RMS norm ----

// rstd = (1/C sum_c x_c^2 + eps)^-1/2;  out = x rstd w. Without weight, w is 1.
//   out, in X (..., C); rstd fp32 (N), saved for backward; weight X (C) [optional]
struct RmsNormForward {
    static constexpr std::string_view name = "rmsnorm_forward";
    Tensor out, rstd, in, weight;
    float eps;
    auto fields() const {
        return std::tuple{writes("out", out), writes("rstd", rstd, DType::fp32), reads("in", in),
                          optional(reads("weight", weight)), number("eps", eps)};
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// With h = x rstd and g = dout w:
//   din += rstd (g - h 1/C sum(g h));  dweight += sum_rows dout h
// Each output has the same bits whether or not the same call computes the other.
//   din X (..., C) [optional], dweight fp32 (C) [optional], dout, in X (..., C), weight X (C) [optional]
struct RmsNormBackward {
    static constexpr std::string_view name = "rmsnorm_backward";
    Tensor din, dweight, dout, in, weight, rstd;
    auto fields() const {
        return std::tuple{optional(changes("din", din)),
                          optional(changes("dweight", dweight, DType::fp32)),
                          reads("dout", dout),
                          reads("in", in),
                          optional(reads("weight", weight)),
                          reads("rstd", rstd, DType::fp32)};
    }
    RowSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// residual = in1 + in2 (rounded to X), then rmsnorm_forward of the rounded residual.
struct FusedResidualRmsNormForward {
    static constexpr std::string_view name = "fused_residual_rmsnorm_forward";
    Tensor residual, out, rstd, in1, in2, weight;
    float eps;
    auto fields() const {
        return std::tuple{writes("residual", residual),
                          writes("out", out),
                          writes("rstd", rstd, DType::fp32),
                          reads("in1", in1),
                          reads("in2", in2),
                          optional(reads("weight", weight)),
                          number("eps", eps)};
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// ---- matrix products ----

// out = in weight^T + bias. With pre_gelu: pre_gelu = in weight^T + bias, out = GELU(pre_gelu as rounded
// to X).
//   out X (..., OC), in X (..., IC), weight X (OC,IC), bias X (OC) [optional],
//   pre_gelu X (..., OC) [optional]
struct MatmulForward {
    static constexpr std::string_view name = "matmul_forward";
    Tensor out, in, weight, bias{}, pre_gelu{};
    auto fields() const {
        return std::tuple{writes("out", out), reads("in", in), reads("weight", weight),
                          optional(reads("bias", bias)), optional(writes("pre_gelu", pre_gelu))};
    }
    MatmulSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// din = dout weight (times GELU'(pre_gelu), if given: `in` of this product was GELU(pre_gelu));
// dweight += dout^T in;  dbias += sum_rows dout
// Each output has the same bits whether or not the same call computes the others.
//   din X (..., IC) [optional], dweight fp32 (OC,IC) [optional], dbias fp32 (OC) [optional],
//   dout X (..., OC), in X (..., IC), weight X (OC,IC), pre_gelu X (..., IC) [optional]
struct MatmulBackward {
    static constexpr std::string_view name = "matmul_backward";
    Tensor din, dweight, dbias, dout, in, weight, pre_gelu{};
    auto fields() const {
        return std::tuple{optional(writes("din", din)),
                          optional(changes("dweight", dweight, DType::fp32)),
                          optional(changes("dbias", dbias, DType::fp32)),
                          reads("dout", dout),
                          reads("in", in),
                          reads("weight", weight),
                          optional(reads("pre_gelu", pre_gelu))};
    }
    MatmulSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// ---- GELU, the tanh form of GPT-2 ----

// out = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
//   out, in X, of one shape
struct GeluForward {
    static constexpr std::string_view name = "gelu_forward";
    Tensor out, in;
    auto fields() const { return std::tuple{writes("out", out), reads("in", in)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// din = dout GELU'(in); din may be dout
struct GeluBackward {
    static constexpr std::string_view name = "gelu_backward";
    Tensor din, dout, in;
    auto fields() const { return std::tuple{writes("din", din), reads("dout", dout), reads("in", in)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// ---- other activations ----
//
// For SwiGLU, F counts as a row of X. The others take any number of elements at any address.

// With a = in[..., 0 ... F-1], b = in[..., F ... 2F-1] and the logistic function s(a) = 1/(1 + e^-a):
//   out = a s(a) b
//   out X (..., F), in X (..., 2F)
struct SwigluForward {
    static constexpr std::string_view name = "swiglu_forward";
    Tensor out, in;
    auto fields() const { return std::tuple{writes("out", out), reads("in", in)}; }
    RowSizes sizes() const;
    OpCost cost() const;
};

// The halves of din: da = dout b s (1 + a (1 - s));  db = dout a s
//   din X (..., 2F), dout X (..., F), in X (..., 2F); din may be in
struct SwigluBackward {
    static constexpr std::string_view name = "swiglu_backward";
    Tensor din, dout, in;
    auto fields() const { return std::tuple{writes("din", din), reads("dout", dout), reads("in", in)}; }
    RowSizes sizes() const;
    OpCost cost() const;
};

// out = max(x, 0)^2
//   out, in X, of one shape
struct ReluSquaredForward {
    static constexpr std::string_view name = "relu_squared_forward";
    Tensor out, in;
    auto fields() const { return std::tuple{writes("out", out), reads("in", in)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// din = 2 max(x, 0) dout; din may be dout
struct ReluSquaredBackward {
    static constexpr std::string_view name = "relu_squared_backward";
    Tensor din, dout, in;
    auto fields() const { return std::tuple{writes("din", din), reads("dout", dout), reads("in", in)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
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
    auto fields() const {
        return std::tuple{writes("out", out), writes("lse", lse, DType::fp32), reads("q", q), reads("k", k),
                          reads("v", v),      number("window", window)};
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
    auto fields() const {
        return std::tuple{writes("dq", dq),        writes("dk", dk),  writes("dv", dv),
                          reads("dout", dout),     reads("q", q),     reads("k", k),
                          reads("v", v),           reads("out", out), reads("lse", lse, DType::fp32),
                          number("window", window)};
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
    auto fields() const {
        return std::tuple{writes("out", out),      changes("cache", cache), reads("q", q),
                          reads("k", k),           reads("v", v),           number("position", position),
                          number("window", window)};
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
    auto fields() const {
        return std::tuple{changes("x", x), reads("angles", angles, DType::fp32), number("position", position),
                          number("inverse", inverse)};
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
    auto fields() const {
        return std::tuple{writes("out", out),
                          writes("rstd", rstd, DType::fp32),
                          reads("in", in),
                          optional(reads("weight", weight)),
                          number("eps", eps),
                          optional(reads("sums", shared.sums, DType::fp32)),
                          number("whole", shared.size)};
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
    auto fields() const { return std::tuple{writes("sums", sums, DType::fp32), reads("in", in)}; }
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
    auto fields() const {
        return std::tuple{optional(writes("din", din)),
                          optional(changes("dweight", dweight, DType::fp32)),
                          reads("dout", dout),
                          reads("in", in),
                          optional(reads("weight", weight)),
                          reads("rstd", rstd, DType::fp32),
                          optional(reads("sums", shared.sums, DType::fp32)),
                          number("whole", shared.size)};
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
    auto fields() const {
        return std::tuple{writes("sums", sums, DType::fp32), reads("dout", dout), reads("in", in),
                          optional(reads("weight", weight)), reads("rstd", rstd, DType::fp32)};
    }
    HeadNormSizes sizes() const;
    OpCost cost() const;
};

// ---- classifier ----

// With a cap, y = cap tanh(x/cap) in fp32 takes the place of each logit x, within a few ulp of the cap. For
// each row n over the first `vocabulary` columns:
//   lse_n = ln sum_v exp(y_nv);  loss_n = lse_n - y_{n,target_n}
// With write_dlogits the logits are overwritten with
//   dlogits_nv = (softmax_nv (1 + 2 z lse_n) - [v = target_n]) scale (1 - (y_nv/cap)^2)
// and with 0 in ignored rows and in the columns from `vocabulary` on. Ignored rows have loss 0. The loss
// leaves the z-loss out. Without a cap, y is x and the last factor is 1. (On GPUs exp(a - b) is
// 2^(log2(e) a - log2(e) b), here and below: an error of u times the greatest |y|.)
//   logits X (N,Vp) in place, losses fp32 (N), targets int32 (N)
struct FusedClassifier {
    static constexpr std::string_view name = "fused_classifier";
    Tensor logits, losses, targets;
    std::int64_t vocabulary;
    float scale;
    bool write_dlogits;
    ClassifierTerms terms{};
    auto fields() const {
        return std::tuple{changes("logits", logits),
                          writes("losses", losses, DType::fp32),
                          reads("targets", targets, DType::int32),
                          number("vocabulary", vocabulary),
                          number("scale", scale),
                          number("write_dlogits", write_dlogits),
                          number("cap", terms.cap),
                          number("z_loss", terms.z_loss)};
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// The classifier for ranks that share the vocabulary: each holds some columns of the logits, which are
// never gathered. Each rank computes statistics of its columns. The ranks exchange these, and each
// finishes its own columns. A rank holds columns [first_column, first_column + columns) of the
// vocabulary, perhaps none. They are the first columns of its logits, which are padded to Vp columns.

// Statistics of each row over the columns y_v of this rank, which are capped as above:
//   maximum = max_v y_v;  sum = sum_v exp(y_v - maximum);  logit = y_target if this rank has that column, else 0
// They are -infinity, 0, 0 in ignored rows and on a rank without columns.
//   statistics fp32 (N,3), logits X (N,Vp), targets int32 (N), indices into the whole vocabulary
struct ClassifierStatistics {
    static constexpr std::string_view name = "classifier_statistics";
    Tensor statistics, logits, targets;
    std::int64_t columns, first_column;
    ClassifierTerms terms{};
    auto fields() const {
        return std::tuple{writes("statistics", statistics, DType::fp32),
                          reads("logits", logits),
                          reads("targets", targets, DType::int32),
                          number("columns", columns),
                          number("first_column", first_column),
                          number("cap", terms.cap),
                          number("z_loss", terms.z_loss)};
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// Losses and gradients from the statistics maximum_r, sum_r, logit_r of all ranks r. M is the greatest
// maximum_r, S the sum over r of (sum_r exp(maximum_r - M)), and L the sum over r of logit_r, both added
// in the order of the ranks:
//   lse_n = ln S + M;  loss_n = lse_n - L;  with write_dlogits,
//   dlogits_nv = (exp(y_v - M) / S (1 + 2 z lse_n) - [v = target_n]) scale (1 - (y_v/cap)^2)
// The gradients overwrite the logits, with 0 in ignored rows and in the columns from `columns` on.
// Ignored rows have loss 0.
//   logits X (N,Vp) in place; losses fp32 (N), the same on every rank; all_statistics fp32 (R,N,3) of all ranks;
//   targets int32 (N)
struct ClassifierFromStatistics {
    static constexpr std::string_view name = "classifier_from_statistics";
    Tensor logits, losses, all_statistics, targets;
    std::int64_t columns, first_column;
    float scale;
    bool write_dlogits;
    ClassifierTerms terms{};
    auto fields() const {
        return std::tuple{changes("logits", logits),
                          writes("losses", losses, DType::fp32),
                          reads("all_statistics", all_statistics, DType::fp32),
                          reads("targets", targets, DType::int32),
                          number("columns", columns),
                          number("first_column", first_column),
                          number("scale", scale),
                          number("write_dlogits", write_dlogits),
                          number("cap", terms.cap),
                          number("z_loss", terms.z_loss)};
    }
    ClassifierSizes sizes() const;
    OpCost cost() const;
};

// out = cap tanh(x/cap), the classifier's cap alone, with cap > 0; out may be in
//   out, in X, of one shape, any number of elements at any address
struct SoftCap {
    static constexpr std::string_view name = "soft_cap";
    Tensor out, in;
    float cap;
    auto fields() const { return std::tuple{writes("out", out), reads("in", in), number("cap", cap)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// ---- norm and update ----

// partials_k = sum of x_i^2 over the k-th block of norm_block_elements
//   partials fp32 (n / norm_block_elements), x X (n), n a multiple of norm_block_elements
struct GlobalNormSquared {
    static constexpr std::string_view name = "global_norm_squared";
    Tensor partials, x;
    auto fields() const { return std::tuple{writes("partials", partials, DType::fp32), reads("x", x)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out += sum_i x_i, in fp64, in an order that depends only on the number of elements.
//   out fp64 (1), x fp32, any shape
struct Sum {
    static constexpr std::string_view name = "sum";
    Tensor out, x;
    auto fields() const { return std::tuple{changes("out", out, DType::fp64), reads("x", x, DType::fp32)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// AdamW (Loshchilov & Hutter 2019) as PyTorch computes it. With S = loss_scale, norm = sqrt(norm_squared)/S,
// clip = min(1, max_grad_norm / (norm + 1e-6)) and b1, b2 the bias corrections 1 - beta^step:
//   g = clip/S gradient;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
//   w = w (1 - lr decay) - lr/b1 m / (sqrt(v)/sqrt(b2) + eps)
// w is the master copy in fp32. `parameters` receives it rounded to X: to nearest, or at random if
// `rounding` is given, with the same bits on every device. Without a master copy, w is read from the
// parameters. m and v in bf16 are rounded at random as well: to nearest, v would stay what it is where a
// step changes it by less than 2^-9. If norm_squared is not finite, nothing is changed.
//   parameters X (n); master fp32 (n), or `parameters` itself if X is fp32 or X is bf16 with `rounding`;
// m, v fp32 or bf16, or uint8 with `in_8_bits` (n, a multiple of 256); gradients fp32 or X (n); norm_squared fp64
// (1); segments in increasing order;
//   rounding [optional] only if X is bf16; rounding_of_moments with m and v in bf16
struct AdamW {
    static constexpr std::string_view name = "adamw";
    Tensor parameters, master, m, v, gradients, norm_squared;
    std::span<const AdamWSegment> segments;
    AdamWStep step;
    std::optional<StochasticRounding> rounding{}, rounding_of_moments{};
    EightBitMoments in_8_bits{};
    auto fields() const {
        return std::tuple{writes("parameters", parameters),
                          changes("master", master, any_dtype),
                          changes("m", m, any_dtype),
                          changes("v", v, any_dtype),
                          reads("gradients", gradients, any_dtype),
                          reads("norm_squared", norm_squared, DType::fp64),
                          optional(changes("m_amax", in_8_bits.m_amax, DType::fp32)),
                          optional(changes("v_amax", in_8_bits.v_amax, DType::fp32)),
                          optional(changes("small_m", in_8_bits.m, DType::fp32)),
                          optional(changes("small_v", in_8_bits.v, DType::fp32)),
                          number("segments", segments),
                          number("step", step.step),
                          number("learning_rate", step.learning_rate),
                          number("beta1", step.beta1),
                          number("beta2", step.beta2),
                          number("eps", step.eps),
                          number("max_grad_norm", step.max_grad_norm),
                          number("loss_scale", step.loss_scale),
                          number("rounding", rounding),
                          number("rounding_of_moments", rounding_of_moments)};
    }
    std::int64_t sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// ---- products in 8 bits (fp8.h) ----

// out = max(out, max_i |x_i|), where NaN counts as the greatest
//   out fp32 (1), x bf16, any shape
struct Amax {
    static constexpr std::string_view name = "amax";
    Tensor out, x;
    auto fields() const { return std::tuple{changes("out", out, DType::fp32), reads("x", x)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = x rounded to `format`, with the scale of a tensor whose greatest magnitude is amax, and divided by that
// scale
//   out, x bf16 of one number of elements; amax fp32 (1)
struct Quantise {
    static constexpr std::string_view name = "quantise";
    Tensor out, x, amax;
    Fp8 format;
    auto fields() const {
        return std::tuple{writes("out", out), reads("x", x), reads("amax", amax, DType::fp32),
                          number("format", format)};
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// The same for a device whose products read bytes (DeviceSizes::fp8_dtype): x times its scale, in the format's
// bytes.
//   x bf16 (N,C), N and C multiples of 16
struct QuantiseToBytes {
    static constexpr std::string_view name = "quantise_to_bytes";
    Fp8Copies to;
    Tensor x, amax;
    Fp8 format;
    auto fields() const {
        return std::tuple{optional(writes("plain", to.plain, DType::uint8)),
                          optional(writes("transposed", to.transposed, DType::uint8)),
                          writes("inverse", to.inverse, DType::fp32),
                          reads("x", x),
                          reads("amax", amax, DType::fp32),
                          number("format", format)};
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// matmul_forward and matmul_backward of operands in bytes: `in` and `weight` in e4m3, `dout` in e5m2. The forward
// pass reads plain copies; din needs those of dout and the transposed weight, dweight the transposed dout and in.
//   out, din, pre_gelu, bias bf16
struct Fp8MatmulForward {
    static constexpr std::string_view name = "fp8_matmul_forward";
    Tensor out;
    Fp8Copies in, weight;
    Tensor bias, pre_gelu;
    auto fields() const {
        return std::tuple{writes("out", out),
                          reads("in", in.plain, DType::uint8),
                          reads("in_inverse", in.inverse, DType::fp32),
                          reads("weight", weight.plain, DType::uint8),
                          reads("weight_inverse", weight.inverse, DType::fp32),
                          optional(reads("bias", bias)),
                          optional(writes("pre_gelu", pre_gelu))};
    }
    MatmulSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

struct Fp8MatmulBackward {
    static constexpr std::string_view name = "fp8_matmul_backward";
    Tensor din, dweight;
    Fp8Copies dout, in, weight;
    Tensor pre_gelu;
    auto fields() const {
        return std::tuple{optional(writes("din", din)),
                          optional(changes("dweight", dweight, DType::fp32)),
                          optional(reads("dout", dout.plain, DType::uint8)),
                          optional(reads("dout_transposed", dout.transposed, DType::uint8)),
                          reads("dout_inverse", dout.inverse, DType::fp32),
                          optional(reads("in_transposed", in.transposed, DType::uint8)),
                          optional(reads("in_inverse", in.inverse, DType::fp32)),
                          optional(reads("weight_transposed", weight.transposed, DType::uint8)),
                          optional(reads("weight_inverse", weight.inverse, DType::fp32)),
                          optional(reads("pre_gelu", pre_gelu))};
    }
    MatmulSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// ---- elementwise ----

// out = in, between compute dtypes
struct Cast {
    static constexpr std::string_view name = "cast";
    Tensor out, in;
    auto fields() const { return std::tuple{writes("out", out, any_dtype), reads("in", in, any_dtype)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = in, bit for bit; any dtype
//   out, in of one dtype and number of elements, which do not overlap
struct Copy {
    static constexpr std::string_view name = "copy";
    Tensor out, in;
    auto fields() const { return std::tuple{writes("out", out, any_dtype), reads("in", in, any_dtype)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = value; any dtype (fp64 on GPUs: only the value 0)
struct Fill {
    static constexpr std::string_view name = "fill";
    Tensor out;
    float value;
    auto fields() const { return std::tuple{writes("out", out, any_dtype), number("value", value)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out = a + b in X; out may be a or b
struct Add {
    static constexpr std::string_view name = "add";
    Tensor out, a, b;
    auto fields() const { return std::tuple{writes("out", out), reads("a", a), reads("b", b)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// out += in, rounded at random: to nearest, a sum of many terms would stop growing once a term is below half of
// its last bit. `count` tells the sums of an element apart (stochastic_rounding.h).
//   out bf16, in fp32 or bf16, any shape
struct Accumulate {
    static constexpr std::string_view name = "accumulate";
    Tensor out, in;
    StochasticRounding rounding;
    std::int64_t count;
    auto fields() const {
        return std::tuple{changes("out", out), reads("in", in, any_dtype), number("rounding", rounding),
                          number("count", count)};
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// flag = 1 if no element is NaN or infinite, else 0
//   flag int32 (1)
struct AllFinite {
    static constexpr std::string_view name = "all_finite";
    Tensor flag, x;
    auto fields() const { return std::tuple{writes("flag", flag, DType::int32), reads("x", x)}; }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// Every operation: the only list of them.
using Op =
    std::variant<EncoderForward, EncoderBackward, LayerNormForward, LayerNormBackward,
                 FusedResidualLayerNormForward, RmsNormForward, RmsNormBackward, FusedResidualRmsNormForward,
                 MatmulForward, MatmulBackward, GeluForward, GeluBackward, SwigluForward, SwigluBackward,
                 ReluSquaredForward, ReluSquaredBackward, AttentionForward, AttentionBackward,
                 AttentionCachedForward, Rope, HeadNormForward, HeadNormSums, HeadNormBackward,
                 HeadNormBackwardSums, FusedClassifier, ClassifierStatistics, ClassifierFromStatistics,
                 SoftCap, GlobalNormSquared, Sum, AdamW, Amax, Quantise, QuantiseToBytes, Fp8MatmulForward,
                 Fp8MatmulBackward, Cast, Copy, Fill, Add, Accumulate, AllFinite>;

std::string_view name_of(const Op& op);
OpCost cost_of(const Op& op);

class Ops {
  public:
    virtual ~Ops() = default;

    // Gives the operations their scratch memory (DeviceSizes::workspace_bytes); the caller keeps owning it.
    virtual void set_workspace(const Tensor& workspace) = 0;

    virtual void run(const Op& op) = 0;
};

}  // namespace llmc
