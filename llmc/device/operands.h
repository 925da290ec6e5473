// Checks of operands, one line each at the start of an operation.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/core/tensor.h"

namespace llmc {

inline void check_dtype(const Tensor& tensor, DType dtype, std::string_view name,
                        SourceLocation where = SourceLocation::current()) {
    if (!tensor) programming_error(fmt::format("{} is missing", name), where);
    if (tensor.dtype != dtype) {
        programming_error(fmt::format("{} is {}, not {}", name, name_of(tensor.dtype), name_of(dtype)),
                          where);
    }
}

// Checks that the tensor is present and has this dtype and shape.
inline void check_tensor(const Tensor& tensor, DType dtype, const Shape& shape, std::string_view name,
                         SourceLocation where = SourceLocation::current()) {
    check_dtype(tensor, dtype, name, where);
    if (tensor.shape != shape) {
        programming_error(fmt::format("{} is {}, not {}", name, to_string(tensor.shape), to_string(shape)),
                          where);
    }
}

// Checks that the tensor is present and has this dtype and number of elements, in any shape.
inline void check_elements(const Tensor& tensor, DType dtype, std::int64_t elements, std::string_view name,
                           SourceLocation where = SourceLocation::current()) {
    check_dtype(tensor, dtype, name, where);
    if (tensor.elements() != elements) {
        programming_error(fmt::format("{} has {} elements, not {}", name, tensor.elements(), elements),
                          where);
    }
}

// Checks that the tensor is present and has this dtype, `columns` in the last dimension, and `rows` rows in
// all others.
inline void check_rows(const Tensor& tensor, DType dtype, std::int64_t rows, std::int64_t columns,
                       std::string_view name, SourceLocation where = SourceLocation::current()) {
    check_dtype(tensor, dtype, name, where);
    if (tensor.shape.dimensions() == 0 || tensor.shape.last() != columns ||
        tensor.elements() != rows * columns) {
        programming_error(
            fmt::format("{} is {}, not {} rows of {}", name, to_string(tensor.shape), rows, columns), where);
    }
}

}  // namespace llmc
