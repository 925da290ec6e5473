// The operands of operations on heads (ops.h, "heads"): checks of their dtypes, shapes and places, one line
// at the start of an operation, and the sizes of each operation, for all devices. A wrong operand is a
// ProgrammingError.
#pragma once

#include <cstdint>
#include <optional>

#include "llmc/core/tensor.h"
#include "llmc/device/heads.h"
#include "llmc/device/ops.h"

namespace llmc {

// `sequence` is the number of rows after which positions begin again.
struct RopeSizes {
    std::int64_t rows, sequence, heads, head_size;
};
RopeSizes rope_sizes(const Heads& x, const Tensor& angles, std::int64_t position);

// `whole` is the number of elements that a norm is over: head_size, or more if ranks share the rows. `ranks`
// is 0 if they do not.
struct HeadNormSizes {
    std::int64_t rows, heads, head_size, whole, ranks;
};
HeadNormSizes head_norm_forward_sizes(const Heads& out, const Tensor& rstd, const Heads& in,
                                      const Tensor& weight, const std::optional<SharedRows>& shared);
HeadNormSizes head_norm_sums_sizes(const Tensor& sums, const Heads& in);
HeadNormSizes head_norm_backward_sizes(const Heads& din, const Tensor& dweight, const Heads& dout,
                                       const Heads& in, const Tensor& weight, const Tensor& rstd,
                                       const std::optional<SharedRows>& shared);
HeadNormSizes head_norm_backward_sums_sizes(const Tensor& sums, const Heads& dout, const Heads& in,
                                            const Tensor& weight, const Tensor& rstd);

}  // namespace llmc
