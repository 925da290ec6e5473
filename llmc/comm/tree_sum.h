// The one order in which contributions of ranks are added: a tree of adjacent pairs ((0+1)+(2+3))+..., where
// an odd one out moves up unchanged. Each element is summed for itself, so its bits depend on the
// contributions alone. The sums of aligned groups of 2^k ranks, summed in turn, are the sum over all ranks; in bf16
// too, where the sum of each pair is rounded.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <span>
#include <type_traits>

#include "llmc/core/dtype.h"

namespace llmc {

// Where sums are added: fp32 for bf16, of which the sum of each pair is rounded, or else the sums of groups, which are
// bf16 when they are summed in turn, would not give the bits of the sum over all.
template <class T>
using SumType = std::conditional_t<std::is_same_v<T, double>, double, float>;

namespace tree_sum_detail {

// Small enough that the partial sums of all levels stay in the first-level cache.
inline constexpr std::size_t block_elements = 512;

template <class T>
SumType<T> widen(T x) {
    if constexpr (std::is_same_v<T, double>) {
        return x;
    } else {
        return to_float(x);
    }
}

template <class T>
SumType<T> pair_sum(SumType<T> a, SumType<T> b) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        return to_float(to_bfloat16(a + b));
    } else {
        return a + b;
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
        // Pairing neighbours level by level puts the largest power of two below the number of pieces left of
        // the root.
        const std::size_t left = std::bit_floor(pieces.size() - 1);
        std::array<SumType<T>, block_elements> right_sum;
        sum_block<T>(out, pieces.first(left), first, count);
        sum_block<T>(right_sum.data(), pieces.subspan(left), first, count);
        for (std::size_t i = 0; i < count; ++i) out[i] = pair_sum<T>(out[i], right_sum[i]);
    }
}

}  // namespace tree_sum_detail

// out[i] = the tree sum of element i of all pieces, for i < count. T fp32, bf16 or fp64; a piece is where its
// elements begin, and `out` may be one of them.
template <class T>
void tree_sum(T* out, std::span<const std::byte* const> pieces, std::size_t count) {
    using namespace tree_sum_detail;
    std::array<SumType<T>, block_elements> sum;
    for (std::size_t first = 0; first < count; first += block_elements) {
        const std::size_t elements = std::min(block_elements, count - first);
        sum_block<T>(sum.data(), pieces, first, elements);
        for (std::size_t i = 0; i < elements; ++i) {
            if constexpr (std::is_same_v<T, bfloat16>) {
                out[first + i] = to_bfloat16(sum[i]);  // exact
            } else {
                out[first + i] = sum[i];
            }
        }
    }
}

}  // namespace llmc
