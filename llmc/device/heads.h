// Heads of attention that lie side by side in the rows of a tensor, perhaps among others: kernels read q, k and v in
// place where one product has left them.
#pragma once

#include <cstdint>

#include "llmc/core/tensor.h"

namespace llmc {

// Head h of row n is elements [first + h*size, first + (h+1)*size) of row n of `rows`.
struct Heads {
    Tensor rows;         // X (..., elements of a row), N rows in all
    std::int64_t first;  // the element of each row with which the first head begins
    std::int64_t count;
    std::int64_t size;  // elements of a head
};

}  // namespace llmc
