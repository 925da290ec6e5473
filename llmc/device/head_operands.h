// The operands of operations on heads (ops.h, "heads"): checks of their dtypes, shapes and places, one line
// at the start of an operation, and the sizes of each operation, for all devices. A wrong operand is a
// ProgrammingError.
#pragma once

#include <cstdint>

#include "llmc/core/tensor.h"
#include "llmc/device/heads.h"

namespace llmc {

// The elements of a row of the tensor, heads and others.
inline std::int64_t row_elements(const Heads& heads) { return heads.rows.shape.last(); }

// `sequence` is the number of rows after which positions begin again.
struct RopeSizes {
    std::int64_t rows, sequence, heads, head_size;
};
RopeSizes rope_sizes(const Heads& x, const Tensor& angles, std::int64_t position);

}  // namespace llmc
