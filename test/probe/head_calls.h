// The calls of run_op.h for the operations on heads. Operands of heads are the rows NAME, and NAME_heads with
// three numbers: first, count, size. Rows in which heads are written are both an input and a result.
#pragma once

#include "test/probe/operands.h"

namespace llmc::probe::calls {

inline Heads heads_in(Operands& o, const std::string& name, const Tensor& rows) {
    const std::vector<double>& numbers = o.values(name + "_heads");
    if (numbers.size() != 3) user_error("{}_heads is not first, count, size", name);
    const auto number = [&](std::size_t i) { return static_cast<std::int64_t>(numbers[i]); };
    return {rows, number(0), number(1), number(2)};
}

inline void rope(Operands& o, Ops& ops) {
    ops.rope(heads_in(o, "x", o.in_out("x", o.X)), o.in("angles", DType::fp32),
             static_cast<std::int64_t>(o.scalar("position")), o.flag("inverse"));
}

}  // namespace llmc::probe::calls
