// Heads of attention that lie side by side in the rows of a tensor, perhaps among others: kernels read q, k and v in
// place where one product has left them.
#pragma once

#include <cstdint>

#include "llmc/core/error.h"
#include "llmc/core/tensor.h"

namespace llmc {

// Head h of row n is elements [first + h*size, first + (h+1)*size) of row n of `rows`.
struct Heads {
    Tensor rows;         // X (..., elements of a row), N rows in all
    std::int64_t first;  // the element of each row with which the first head begins
    std::int64_t count;
    std::int64_t size;  // elements of a head
};

// The elements of a row of the tensor, heads and others.
inline std::int64_t row_elements(const Heads& heads) { return heads.rows.shape.last(); }
inline std::int64_t number_of_rows(const Heads& heads) { return heads.rows.elements() / row_elements(heads); }

// The columns [first, first + count) of a tensor's rows, as one head.
inline Heads columns_of(const Tensor& tensor, std::int64_t first, std::int64_t count) {
    return {tensor, first, 1, count};
}

// A tensor as rows of so many elements: (N,R), or (B,T,R) if it has the dimensions of sequences too.
inline Tensor rows_of_heads(const Tensor& tensor, std::int64_t row) {
    check(row > 0 && tensor.elements() % row == 0, "heads lie in whole rows");
    const std::int64_t rows = tensor.elements() / row;
    if (tensor.shape.dimensions() < 3 || rows % tensor.shape[0] != 0) return tensor.view({rows, row});
    return tensor.view({tensor.shape[0], rows / tensor.shape[0], row});
}

// Queries, keys and values in the rows of one tensor, as one product makes them.
struct PackedHeads {
    Heads q, k, v;
};

// A row has H = `heads` query heads, then K = `key_heads` key heads, then as many value heads: (H + 2 K) D
// elements, with D = `size`. The tensor may have any shape of such rows.
inline PackedHeads packed_heads(const Tensor& rows, std::int64_t heads, std::int64_t key_heads,
                                std::int64_t size) {
    const std::int64_t row = (heads + 2 * key_heads) * size;
    const Tensor view = rows_of_heads(rows, row);
    return {{view, 0, heads, size},
            {view, heads * size, key_heads, size},
            {view, (heads + key_heads) * size, key_heads, size}};
}

// The same for a tensor (..., 3, NH, HS), with as many keys as queries.
inline PackedHeads packed_heads(const Tensor& qkv) {
    const int dimensions = qkv.shape.dimensions();
    check(dimensions >= 3 && qkv.shape[dimensions - 3] == 3, "packed q, k and v are (..., 3, NH, HS)");
    const std::int64_t heads = qkv.shape[dimensions - 2];
    return packed_heads(qkv, heads, heads, qkv.shape.last());
}

}  // namespace llmc
