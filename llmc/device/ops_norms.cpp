// The sizes, the work and the workspace of the operations in ops_norms.h.
#include "llmc/device/ops_norms.h"

#include <algorithm>

#include "llmc/device/op_checks.h"

namespace llmc {

// ---- embedding

namespace {

EncoderSizes encoder_sizes(const Tensor& out, const Tensor& tokens, const Tensor& wte, const Tensor& wpe) {
    check(out.shape.dimensions() == 3, "the embedding is (B,T,C)");
    const EncoderSizes s{out.shape[0], out.shape[1], out.shape[2],
                         wte.shape.dimensions() == 2 ? wte.shape[0] : 0};
    check_shape(tokens, {s.batch, s.sequence}, "tokens");
    check_shape(wte, {s.rows_of_wte, s.channels}, "wte");
    check(!wpe || (wpe.shape.dimensions() == 2 && wpe.shape[0] >= s.sequence && wpe.shape[1] == s.channels),
          "wpe has a row for each position");
    return s;
}

}  // namespace

EncoderSizes EncoderForward::sizes() const {
    check_operands(*this);
    return encoder_sizes(out, tokens, wte, wpe);
}
EncoderSizes EncoderBackward::sizes() const {
    check_operands(*this);
    return encoder_sizes(dout, tokens, dwte, dwpe);
}

OpCost EncoderForward::cost() const {
    return {
        .flops = elements_of(out), .bytes = (wpe ? 3 : 2) * moved(out) + moved(tokens), .dtype = out.dtype};
}
OpCost EncoderBackward::cost() const {
    return {.flops = 2 * elements_of(dout),
            .bytes = moved(dout) + moved(tokens) + 2 * sizeof(float) * elements_of(dout)};
}
WorkspaceRequest EncoderBackward::workspace() const {
    const EncoderSizes s = sizes();
    return request(dout.dtype, RowSizes{s.batch * s.sequence, s.channels});
}

// ---- layernorm

namespace {

RowSizes layernorm_sizes(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Tensor& gamma,
                         const Tensor& beta) {
    const RowSizes s = rows_of(x, "the input of layernorm");
    check_elements(mean, s.rows, "mean");
    check_elements(rstd, s.rows, "rstd");
    check_elements(gamma, s.channels, "gamma");
    check_elements(beta, s.channels, "beta");
    return s;
}

}  // namespace

RowSizes LayerNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = layernorm_sizes(in, mean, rstd, gamma, beta);
    check_rows(out, s.rows, s.channels, "out");
    return s;
}
RowSizes LayerNormBackward::sizes() const {
    check_operands(*this);
    const RowSizes s = layernorm_sizes(in, mean, rstd, gamma, {});
    check_rows(dout, s.rows, s.channels, "dout");
    check_rows(din, s.rows, s.channels, "din");
    check(dgamma || !dbeta, "dbeta is computed only together with dgamma");
    check_elements(dgamma, s.channels, "dgamma");
    check_elements(dbeta, s.channels, "dbeta");
    return s;
}
RowSizes FusedResidualLayerNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = layernorm_sizes(residual, mean, rstd, gamma, beta);
    for (const auto& [x, which] : {std::pair{&out, "out"}, {&in1, "in1"}, {&in2, "in2"}})
        check_rows(*x, s.rows, s.channels, which);
    return s;
}

OpCost LayerNormForward::cost() const { return elementwise(*this, 8 * elements_of(in)); }
OpCost LayerNormBackward::cost() const { return elementwise(*this, 16 * elements_of(in)); }
WorkspaceRequest LayerNormBackward::workspace() const { return request(in.dtype, sizes()); }
OpCost FusedResidualLayerNormForward::cost() const { return elementwise(*this, 9 * elements_of(in1)); }

// ---- RMS norm

namespace {

RowSizes rmsnorm_sizes(const Tensor& x, const Tensor& rstd, const Tensor& weight) {
    const RowSizes s = rows_of(x, "the input of RMS norm");
    check_elements(rstd, s.rows, "rstd");
    check_elements(weight, s.channels, "weight");
    return s;
}

}  // namespace

RowSizes RmsNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = rmsnorm_sizes(in, rstd, weight);
    check_rows(out, s.rows, s.channels, "out");
    return s;
}
RowSizes RmsNormBackward::sizes() const {
    check_operands(*this);
    const RowSizes s = rmsnorm_sizes(in, rstd, weight);
    check_rows(dout, s.rows, s.channels, "dout");
    check_rows(din, s.rows, s.channels, "din");
    check_elements(dweight, s.channels, "dweight");
    return s;
}
RowSizes FusedResidualRmsNormForward::sizes() const {
    check_operands(*this);
    const RowSizes s = rmsnorm_sizes(residual, rstd, weight);
    for (const auto& [x, which] : {std::pair{&out, "out"}, {&in1, "in1"}, {&in2, "in2"}})
        check_rows(*x, s.rows, s.channels, which);
    return s;
}

OpCost RmsNormForward::cost() const { return elementwise(*this, 4 * elements_of(in)); }
OpCost RmsNormBackward::cost() const { return elementwise(*this, 12 * elements_of(in)); }
WorkspaceRequest RmsNormBackward::workspace() const { return request(in.dtype, sizes()); }
OpCost FusedResidualRmsNormForward::cost() const { return elementwise(*this, 5 * elements_of(in1)); }

}  // namespace llmc
