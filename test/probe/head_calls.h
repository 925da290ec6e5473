// The calls of run_op.h for the operations on heads. Operands of heads are the rows NAME, and NAME_heads with
// three numbers: first, count, size. Rows in which heads are written are both an input and a result.
//   head_norm_forward, head_norm_backward  `sums` (R,N) and `whole` are SharedRows, if given
//   head_norm_backward                     in_place = 1: din is dout
#pragma once

#include "test/probe/operands.h"

namespace llmc::probe::calls {

inline Heads heads_in(Operands& o, const std::string& name, const Tensor& rows) {
    const std::vector<double>& numbers = o.values(name + "_heads");
    if (numbers.size() != 3) user_error("{}_heads is not first, count, size", name);
    const auto number = [&](std::size_t i) { return static_cast<std::int64_t>(numbers[i]); };
    return {rows, number(0), number(1), number(2)};
}

inline std::optional<SharedRows> shared_rows(Operands& o) {
    if (!o.has("sums")) return {};
    return SharedRows{o.in("sums", DType::fp32), static_cast<std::int64_t>(o.scalar("whole"))};
}

inline std::int64_t number_of_rows(const Heads& heads) {
    return heads.rows.elements() / heads.rows.shape.last();
}

inline void rope(Operands& o, Ops& ops) {
    ops.rope(heads_in(o, "x", o.in_out("x", o.X)), o.in("angles", DType::fp32),
             static_cast<std::int64_t>(o.scalar("position")), o.flag("inverse"));
}

inline void head_norm_forward(Operands& o, Ops& ops) {
    const Heads in = heads_in(o, "in", o.in("in", o.X));
    ops.head_norm_forward(heads_in(o, "out", o.in_out("out", o.X)),
                          o.out("rstd", DType::fp32, {number_of_rows(in), in.count}), in,
                          o.in_if_given("weight", o.X), static_cast<float>(o.scalar("eps")), shared_rows(o));
}

inline void head_norm_sums(Operands& o, Ops& ops) {
    const Heads in = heads_in(o, "in", o.in("in", o.X));
    ops.head_norm_sums(o.out("sums", DType::fp32, {number_of_rows(in)}), in);
}

inline void head_norm_backward(Operands& o, Ops& ops) {
    const Heads in = heads_in(o, "in", o.in("in", o.X));
    o.provide_workspace({.batch = 1,
                         .sequence = number_of_rows(in),
                         .channels = in.size,
                         .heads = 1,
                         .largest_matmul_channels = in.size,
                         .head_rows = 1,
                         .dtype = o.X});
    const bool in_place = o.flag("in_place");
    const Tensor dout = in_place ? o.in_out("dout", o.X) : o.in("dout", o.X);
    const Heads dout_heads = heads_in(o, "dout", dout);
    ops.head_norm_backward(in_place ? dout_heads : heads_in(o, "din", o.in_out("din", o.X)),
                           o.in_out_if_given("dweight", DType::fp32), dout_heads, in,
                           o.in_if_given("weight", o.X), o.in("rstd", DType::fp32), shared_rows(o));
}

inline void head_norm_backward_sums(Operands& o, Ops& ops) {
    const Heads in = heads_in(o, "in", o.in("in", o.X));
    ops.head_norm_backward_sums(o.out("sums", DType::fp32, {number_of_rows(in)}),
                                heads_in(o, "dout", o.in("dout", o.X)), in, o.in_if_given("weight", o.X),
                                o.in("rstd", DType::fp32));
}

}  // namespace llmc::probe::calls
