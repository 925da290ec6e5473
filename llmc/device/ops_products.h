// Matrix products, also in 8 bits, and activations.
// ops.h has the letters and what all operations have in common.
#pragma once

#include <cstdint>
#include <string_view>

#include "llmc/core/tensor.h"
#include "llmc/device/fp8.h"
#include "llmc/device/heads.h"
#include "llmc/device/op_fields.h"
#include "llmc/device/sizes.h"

namespace llmc {

// A tensor (N,C) in 8 bits, for products of a device that takes bytes.
struct Fp8Copies {
    Tensor plain;       // uint8 (N,C) [optional]
    Tensor transposed;  // uint8 (C,N) [optional]
    Tensor inverse;     // fp32 (1): one over the scale
};

struct MatmulSizes {
    std::int64_t rows, in_channels, out_channels;
};

// ---- matrix products ----

// out = in weight^T + bias. With pre_gelu: pre_gelu = in weight^T + bias, out = GELU(pre_gelu as rounded
// to X).
//   out X (..., OC), in X (..., IC), weight X (OC,IC), bias X (OC) [optional],
//   pre_gelu X (..., OC) [optional]
struct MatmulForward {
    static constexpr std::string_view name = "matmul_forward";
    Tensor out, in, weight, bias{}, pre_gelu{};
    auto fields(const auto& see) const {
        return see(writes("out", out), reads("in", in), reads("weight", weight),
                   optional(reads("bias", bias)), of_variant(writes("pre_gelu", pre_gelu)));
    }
    MatmulSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// din = dout weight (times GELU'(pre_gelu), if given: `in` of this product was GELU(pre_gelu));
// dweight += dout^T in;  dbias += sum_rows dout
// Each output has the same bits whether or not the same call computes the others.
//   din X (..., IC) [optional], dweight fp32 (OC,IC) [optional], dbias fp32 (OC) [optional],
//   dout X (..., OC), in X (..., IC) [optional without dweight], weight X (OC,IC), pre_gelu X (..., IC) [optional]
struct MatmulBackward {
    static constexpr std::string_view name = "matmul_backward";
    Tensor din, dweight, dbias, dout, in, weight, pre_gelu{};
    auto fields(const auto& see) const {
        return see(optional(writes("din", din)), optional(changes("dweight", dweight, DType::fp32)),
                   optional(changes("dbias", dbias, DType::fp32)), reads("dout", dout),
                   of_variant(reads("in", in)), reads("weight", weight),
                   optional(reads("pre_gelu", pre_gelu)));
    }
    MatmulSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// out += scale a b, of matrices that may lie in columns of wider rows (columns_of). The operand a is the transpose of
// the rows' columns if a_transposed; so is b.
//   out X or fp32 (N,M); a X (N,K), or (K,N) if transposed; b X (K,M), or (M,K) if transposed
struct MatmulAdd {
    static constexpr std::string_view name = "matmul_add";
    Heads out, a, b;
    float scale = 1;
    bool a_transposed = false, b_transposed = false;
    auto fields(const auto& see) const {
        return see(changes("out", out, any_dtype), reads("a", a), reads("b", b), number("scale", scale),
                   number("a_transposed", a_transposed), number("b_transposed", b_transposed));
    }
    MatmulSizes sizes() const;  // {N, K, M}
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// ---- GELU, the tanh form of GPT-2 ----

// out = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
//   out, in X, of one shape
struct GeluForward {
    static constexpr std::string_view name = "gelu_forward";
    Tensor out, in;
    auto fields(const auto& see) const { return see(writes("out", out), reads("in", in)); }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// din = dout GELU'(in); din may be dout
struct GeluBackward {
    static constexpr std::string_view name = "gelu_backward";
    Tensor din, dout, in;
    auto fields(const auto& see) const {
        return see(writes("din", din), reads("dout", dout), reads("in", in));
    }
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
    auto fields(const auto& see) const { return see(writes("out", out), reads("in", in)); }
    RowSizes sizes() const;
    OpCost cost() const;
};

// The halves of din: da = dout b s (1 + a (1 - s));  db = dout a s
//   din X (..., 2F), dout X (..., F), in X (..., 2F); din may be in
struct SwigluBackward {
    static constexpr std::string_view name = "swiglu_backward";
    Tensor din, dout, in;
    auto fields(const auto& see) const {
        return see(writes("din", din), reads("dout", dout), reads("in", in));
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

// out = max(x, 0)^2
//   out, in X, of one shape
struct ReluSquaredForward {
    static constexpr std::string_view name = "relu_squared_forward";
    Tensor out, in;
    auto fields(const auto& see) const { return see(writes("out", out), reads("in", in)); }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// din = 2 max(x, 0) dout; din may be dout
struct ReluSquaredBackward {
    static constexpr std::string_view name = "relu_squared_backward";
    Tensor din, dout, in;
    auto fields(const auto& see) const {
        return see(writes("din", din), reads("dout", dout), reads("in", in));
    }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// ---- weights in 4 bits (nf4.h) ----

// out = the numbers of `in`, each rounded once
//   out X, whole blocks; in uint8 (their nf4_bytes)
struct DequantiseNf4 {
    static constexpr std::string_view name = "dequantise_nf4";
    Tensor out, in;
    auto fields(const auto& see) const { return see(writes("out", out), reads("in", in, DType::uint8)); }
    std::int64_t sizes() const;
    OpCost cost() const;
};

// ---- products in 8 bits (fp8.h) ----

// out = max(out, max_i |x_i|), where NaN counts as the greatest
//   out fp32 (1), x bf16, any shape
struct Amax {
    static constexpr std::string_view name = "amax";
    Tensor out, x;
    auto fields(const auto& see) const { return see(changes("out", out, DType::fp32), reads("x", x)); }
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
    auto fields(const auto& see) const {
        return see(writes("out", out), reads("x", x), reads("amax", amax, DType::fp32),
                   number("format", format));
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
    auto fields(const auto& see) const {
        return see(optional(writes("plain", to.plain, DType::uint8)),
                   optional(writes("transposed", to.transposed, DType::uint8)),
                   writes("inverse", to.inverse, DType::fp32), reads("x", x),
                   reads("amax", amax, DType::fp32), number("format", format));
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
    auto fields(const auto& see) const {
        return see(writes("out", out), reads("in", in.plain, DType::uint8),
                   reads("in_inverse", in.inverse, DType::fp32), reads("weight", weight.plain, DType::uint8),
                   reads("weight_inverse", weight.inverse, DType::fp32), optional(reads("bias", bias)),
                   of_variant(writes("pre_gelu", pre_gelu)));
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
    auto fields(const auto& see) const {
        return see(optional(writes("din", din)), optional(changes("dweight", dweight, DType::fp32)),
                   optional(reads("dout", dout.plain, DType::uint8)),
                   optional(reads("dout_transposed", dout.transposed, DType::uint8)),
                   reads("dout_inverse", dout.inverse, DType::fp32),
                   optional(reads("in_transposed", in.transposed, DType::uint8)),
                   optional(reads("in_inverse", in.inverse, DType::fp32)),
                   optional(reads("weight_transposed", weight.transposed, DType::uint8)),
                   optional(reads("weight_inverse", weight.inverse, DType::fp32)),
                   optional(reads("pre_gelu", pre_gelu)));
    }
    MatmulSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

}  // namespace llmc
