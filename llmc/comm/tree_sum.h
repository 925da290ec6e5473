// The order in which contributions of ranks are added: a tree of adjacent pairs ((0+1)+(2+3))+..., in which
// an odd last one moves up unchanged. Each element is summed separately, so its bits depend on the
// contributions alone. The sums of aligned groups of 2^k ranks, summed in turn, equal the sum over all ranks.
// This holds in 16-bit dtypes too, because the sum of each pair is rounded.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <span>
#include <type_traits>

#include "llmc/core/dtype.h"

namespace llmc {

namespace tree_sum_detail {

// Small enough that the partial sums of all levels stay in the L1 cache.
inline constexpr std::size_t block_elements = 512;

template <class T>
SumType<T> widen(T x) {
    if constexpr (std::is_same_v<T, double>) {
        return x;
    } else {
        return to_float(x);
    }
}

// The sum of two elements, rounded to T. Otherwise sums of groups, which are of type T when they are summed in turn,
// would not give the bits of the sum over all.
template <class T>
SumType<T> pair_sum(SumType<T> a, SumType<T> b) {
    if constexpr (std::is_same_v<T, double>) {
        return a + b;
    } else {
        return to_float(from_float<T>(a + b));
    }
}

// out[i] = the tree sum of element first + i of all pieces, for i < count <= block_elements.
template <class T>
void sum_block(SumType<T>* out, std::span<const std::byte* const> pieces, std::size_t first,
               std::size_t count) {
    const auto elements_of = [&](std::size_t piece) {
        return reinterpret_cast<const T*>(pieces[piece]) + first;
    };
    if (pieces.size() == 1) {
        const T* only = elements_of(0);
        for (std::size_t i = 0; i < count; ++i) out[i] = widen(only[i]);
    } else if (pieces.size() == 2) {
        const T *a = elements_of(0), *b = elements_of(1);
        for (std::size_t i = 0; i < count; ++i) out[i] = pair_sum<T>(widen(a[i]), widen(b[i]));
    } else {
        // Pairing neighbors level by level puts `left` pieces to the left of the root: the largest power of
        // two that is less than their number.
        const std::size_t left = std::bit_floor(pieces.size() - 1);
        std::array<SumType<T>, block_elements> right_sum;
        sum_block<T>(out, pieces.first(left), first, count);
        sum_block<T>(right_sum.data(), pieces.subspan(left), first, count);
        for (std::size_t i = 0; i < count; ++i) out[i] = pair_sum<T>(out[i], right_sum[i]);
    }
}

}  // namespace tree_sum_detail

// out[i] = the tree sum of element i of all pieces, for i < count. T is a compute dtype or fp64. A piece points to
// its first element, and `out` may be one of the pieces.
template <class T>
void tree_sum(T* out, std::span<const std::byte* const> pieces, std::size_t count) {
    using namespace tree_sum_detail;
    std::array<SumType<T>, block_elements> sum;
    for (std::size_t first = 0; first < count; first += block_elements) {
        const std::size_t elements = std::min(block_elements, count - first);
        sum_block<T>(sum.data(), pieces, first, elements);
        for (std::size_t i = 0; i < elements; ++i) {
            if constexpr (std::is_same_v<T, double>) {
                out[first + i] = sum[i];
            } else {
                out[first + i] = from_float<T>(sum[i]);  // exact
            }
        }
    }
}

}  // namespace llmc
