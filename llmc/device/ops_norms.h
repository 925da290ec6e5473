// The embedding, and norms of the residual stream.
// ops.h has the letters and what all operations have in common.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "llmc/core/tensor.h"
#include "llmc/device/op_fields.h"
#include "llmc/device/sizes.h"

namespace llmc {

struct EncoderSizes {
    std::int64_t batch, sequence, channels, rows_of_wte;
};

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
    auto fields(const auto& see) const {
        return see(writes("out", out), reads("tokens", tokens, DType::int32), reads("wte", wte),
                   optional(reads("wpe", wpe)), number("first_row", first_row));
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
    auto fields(const auto& see) const {
        return see(changes("dwte", dwte, DType::fp32), optional(changes("dwpe", dwpe, DType::fp32)),
                   reads("dout", dout), reads("tokens", tokens, DType::int32),
                   number("first_row", first_row));
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
    auto fields(const auto& see) const {
        return see(writes("out", out), writes("mean", mean, DType::fp32), writes("rstd", rstd, DType::fp32),
                   reads("in", in), reads("gamma", gamma), optional(reads("beta", beta)));
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
    auto fields(const auto& see) const {
        return see(optional(changes("din", din)), optional(changes("dgamma", dgamma, DType::fp32)),
                   optional(changes("dbeta", dbeta, DType::fp32)), reads("dout", dout), reads("in", in),
                   reads("gamma", gamma), reads("mean", mean, DType::fp32), reads("rstd", rstd, DType::fp32));
    }
    RowSizes sizes() const;
    OpCost cost() const;
    WorkspaceRequest workspace() const;
};

// residual = in1 + in2 (rounded to X), then layernorm_forward of the rounded residual.
struct FusedResidualLayerNormForward {
    static constexpr std::string_view name = "fused_residual_layernorm_forward";
    Tensor residual, out, mean, rstd, in1, in2, gamma, beta;
    auto fields(const auto& see) const {
        return see(writes("residual", residual), writes("out", out), writes("mean", mean, DType::fp32),
                   writes("rstd", rstd, DType::fp32), reads("in1", in1), reads("in2", in2),
                   reads("gamma", gamma), optional(reads("beta", beta)));
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
    auto fields(const auto& see) const {
        return see(writes("out", out), writes("rstd", rstd, DType::fp32), reads("in", in),
                   optional(reads("weight", weight)), number("eps", eps));
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
    auto fields(const auto& see) const {
        return see(optional(changes("din", din)), optional(changes("dweight", dweight, DType::fp32)),
                   reads("dout", dout), reads("in", in), optional(reads("weight", weight)),
                   reads("rstd", rstd, DType::fp32));
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
    auto fields(const auto& see) const {
        return see(writes("residual", residual), writes("out", out), writes("rstd", rstd, DType::fp32),
                   reads("in1", in1), reads("in2", in2), optional(reads("weight", weight)),
                   number("eps", eps));
    }
    RowSizes sizes() const;
    OpCost cost() const;
};

}  // namespace llmc
