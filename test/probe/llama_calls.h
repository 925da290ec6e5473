// Calls of the operations for Llama-like models, for the table of test/probe/run_op.h. Further inputs:
//   rmsnorm_forward, fused_residual_rmsnorm_forward    eps
//   soft_cap                  cap
//   fused_classifier, classifier_statistics, classifier_from_statistics: cap and z_loss, if given
//   swiglu_backward           in_place = 1: din is in
//   soft_cap                  in_place = 1: out is in
//   relu_squared_backward     in_place = 1: din is dout
#pragma once

#include "test/probe/operands.h"

namespace llmc::probe::calls {

// ---- RMS norm

inline Shape norm_rows(const Shape& shape) { return {shape.elements() / shape.last()}; }

inline void rmsnorm_forward(Operands& o, Ops& ops) {
    const Shape& in = o.shape("in");
    ops.rmsnorm_forward(o.out("out", o.X, in), o.out("rstd", DType::fp32, norm_rows(in)), o.in("in", o.X),
                        o.in_if_given("weight", o.X), static_cast<float>(o.scalar("eps")));
}

inline void rmsnorm_backward(Operands& o, Ops& ops) {
    const Shape& in = o.shape("in");
    const std::int64_t rows = in.elements() / in.last();
    o.provide_workspace({.batch = 1,
                         .sequence = rows,
                         .channels = in.last(),
                         .heads = 1,
                         .largest_matmul_channels = in.last(),
                         .head_rows = rows,
                         .dtype = o.X});
    ops.rmsnorm_backward(o.in_out_if_given("din", o.X), o.in_out_if_given("dweight", DType::fp32),
                         o.in("dout", o.X), o.in("in", o.X), o.in_if_given("weight", o.X),
                         o.in("rstd", DType::fp32));
}

inline void fused_residual_rmsnorm_forward(Operands& o, Ops& ops) {
    const Shape& in = o.shape("in1");
    ops.fused_residual_rmsnorm_forward(o.out("residual", o.X, in), o.out("out", o.X, in),
                                       o.out("rstd", DType::fp32, norm_rows(in)), o.in("in1", o.X),
                                       o.in("in2", o.X), o.in_if_given("weight", o.X),
                                       static_cast<float>(o.scalar("eps")));
}

// ---- activations

inline void swiglu_forward(Operands& o, Ops& ops) {
    const Shape& in = o.shape("in");
    const Shape out = in.dimensions() == 2 ? Shape{in[0], in[1] / 2} : Shape{in[0], in[1], in[2] / 2};
    ops.swiglu_forward(o.out("out", o.X, out), o.in("in", o.X));
}

inline void swiglu_backward(Operands& o, Ops& ops) {
    const bool in_place = o.flag("in_place");
    const Tensor in = in_place ? o.in_out("in", o.X) : o.in("in", o.X);
    ops.swiglu_backward(in_place ? in : o.out("din", o.X, in.shape), o.in("dout", o.X), in);
}

inline void relu_squared_forward(Operands& o, Ops& ops) {
    ops.relu_squared_forward(o.out("out", o.X, o.shape("in")), o.in("in", o.X));
}

inline void relu_squared_backward(Operands& o, Ops& ops) {
    const bool in_place = o.flag("in_place");
    const Tensor dout = in_place ? o.in_out("dout", o.X) : o.in("dout", o.X);
    ops.relu_squared_backward(in_place ? dout : o.out("din", o.X, dout.shape), dout, o.in("in", o.X));
}

// ---- the classifier's terms

inline ClassifierTerms classifier_terms(Operands& o) {
    const auto given = [&](std::string_view name) {
        return o.has(name) ? static_cast<float>(o.scalar(name)) : 0.0F;
    };
    return {.cap = given("cap"), .z_loss = given("z_loss")};
}

inline void soft_cap(Operands& o, Ops& ops) {
    const bool in_place = o.flag("in_place");
    const Tensor in = in_place ? o.in_out("in", o.X) : o.in("in", o.X);
    ops.soft_cap(in_place ? in : o.out("out", o.X, in.shape), in, static_cast<float>(o.scalar("cap")));
}

}  // namespace llmc::probe::calls
