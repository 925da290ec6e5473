// Queries, keys and values that lie in the rows of one tensor, as one product makes them.
#pragma once

#include <cstdint>

#include "llmc/core/error.h"
#include "llmc/core/tensor.h"
#include "llmc/device/heads.h"

namespace llmc {

struct PackedHeads {
    Heads q, k, v;
};

// A row has H = `heads` query heads, then K = `key_heads` key heads, then as many value heads: (H + 2 K) D
// elements, with D = `size`. The tensor may have any shape of such rows.
inline PackedHeads packed_heads(const Tensor& rows, std::int64_t heads, std::int64_t key_heads,
                                std::int64_t size) {
    const std::int64_t row = (heads + 2 * key_heads) * size;
    check(row > 0 && rows.elements() % row == 0, "packed heads are whole rows of q, k and v");
    const Tensor view = rows.view({rows.elements() / row, row});
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
