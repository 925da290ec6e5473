// Calls of the operations for Llama-like models, for the table of test/probe/run_op.h. Further inputs:
//   rmsnorm_forward, fused_residual_rmsnorm_forward    eps
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

}  // namespace llmc::probe::calls
