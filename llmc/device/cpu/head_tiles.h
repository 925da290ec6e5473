// Small matrix products for attention, on copies of one head that stay in a core's cache. Elements E of the
// operands are floats or bf16; sums are in fp32.
//
// Elements that are neighbours in the dimension summed over (the depth, index p) lie side by side in groups:
// pairs in bf16, which the processor multiplies and adds in one instruction, a single one in fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "llmc/core/dtype.h"
#include "llmc/device/cpu/parallel.h"

namespace llmc::cpu {

inline constexpr std::int64_t panel_width = 16;

template <class E>
inline constexpr std::int64_t group = std::is_same_v<E, bfloat16> ? 2 : 1;

// Element (i, p) of a left-hand matrix at data[row_stride * i + depth_stride * (p / group) + p % group].
template <class E>
struct Left {
    const E* data;
    std::int64_t row_stride;
    std::int64_t depth_stride;
};

// A matrix in rows, and the transposed one of a matrix whose rows lie in groups.
template <class E>
Left<E> plain(const E* data, std::int64_t columns) {
    return {data, columns, group<E>};
}
template <class E>
Left<E> transposed(const E* data, std::int64_t columns) {
    return {data, group<E>, group<E> * columns};
}

// A matrix of sums (rows, columns; `stride` apart, in both a whole number of panels) as a left-hand matrix, and
// its transposed one. bf16 ones are rounded copies in `copy`, as large as the sums with their stride.
inline Left<float> left_hand(float*, const float* sums, std::int64_t stride, std::int64_t, std::int64_t) {
    return plain(sums, stride);
}
inline Left<float> left_hand_transposed(float*, const float* sums, std::int64_t stride, std::int64_t,
                                        std::int64_t) {
    return transposed(sums, stride);
}
Left<bfloat16> left_hand(bfloat16* copy, const float* sums, std::int64_t stride, std::int64_t rows,
                         std::int64_t columns);
Left<bfloat16> left_hand_transposed(bfloat16* copy, const float* sums, std::int64_t stride, std::int64_t rows,
                                    std::int64_t columns);

// A right-hand matrix is stored in panels of 16 columns, element (p, j) at [j / 16][p / group][j % 16][p % group]:
// the inner loop reads it from beginning to end. These functions make them from a plain matrix with a whole
// number of panels of rows and columns; `panel_depth` is how many rows deep the panels in `to` are.
inline void copy_panels(float* to, std::int64_t panel_depth, const float* from, std::int64_t rows,
                        std::int64_t columns) {
    for (std::int64_t p = 0; p < rows; ++p) {
        for (std::int64_t j = 0; j < columns; j += panel_width) {
            std::copy_n(from + p * columns + j, panel_width, to + j * panel_depth + p * panel_width);
        }
    }
}
void copy_panels(bfloat16* to, std::int64_t panel_depth, const bfloat16* from, std::int64_t rows,
                 std::int64_t columns);

// The transposed matrix: row i of `from` becomes column i.
template <class E>
void copy_transposed_panels(E* to, const E* from, std::int64_t rows, std::int64_t columns) {
    constexpr std::int64_t G = group<E>;
    for (std::int64_t i = 0; i < rows; ++i) {
        E* column = to + i / panel_width * panel_width * columns + i % panel_width * G;
        for (std::int64_t p = 0; p < columns; p += G) {
            std::copy_n(from + i * columns + p, G, column + p * panel_width);
        }
    }
}

// Rows of sums that are made at a time in fp32: with AVX2 they fill half of the registers.
inline constexpr std::int64_t tile_height_fp32 = 4;

template <bool accumulate>
void multiply_tile(float* c, std::int64_t c_columns, const Left<float>& a, const float* panel,
                   std::int64_t depth) {
    float sum[tile_height_fp32][panel_width] = {};
    for (std::int64_t p = 0; p < depth; ++p) {
#pragma GCC unroll 4
        for (std::int64_t i = 0; i < tile_height_fp32; ++i) {
            const float x = a.data[i * a.row_stride + p * a.depth_stride];
#pragma omp simd
            for (std::int64_t j = 0; j < panel_width; ++j) sum[i][j] += x * panel[p * panel_width + j];
        }
    }
    for (std::int64_t i = 0; i < tile_height_fp32; ++i) {
        float* to = c + i * c_columns;
#pragma omp simd
        for (std::int64_t j = 0; j < panel_width; ++j) to[j] = accumulate ? to[j] + sum[i][j] : sum[i][j];
    }
}

// c (rows, columns; c_columns apart) = or += a b, where b is `depth` rows of panels that are `panel_depth`
// rows deep. rows, columns and depth are multiples of 16.
template <bool accumulate>
void multiply(float* c, std::int64_t c_columns, const Left<float>& a, const float* b,
              std::int64_t panel_depth, std::int64_t rows, std::int64_t columns, std::int64_t depth) {
    for (std::int64_t j = 0; j < columns; j += panel_width) {
        for (std::int64_t i = 0; i < rows; i += tile_height_fp32) {
            const Left<float> rows_of_a{a.data + i * a.row_stride, a.row_stride, a.depth_stride};
            multiply_tile<accumulate>(c + i * c_columns + j, c_columns, rows_of_a, b + j * panel_depth,
                                      depth);
        }
    }
}

// The same of bf16 matrices, where the processor has bf16 instructions (processor_has_bf16()).
template <bool accumulate>
void multiply(float* c, std::int64_t c_columns, const Left<bfloat16>& a, const bfloat16* b,
              std::int64_t panel_depth, std::int64_t rows, std::int64_t columns, std::int64_t depth);

}  // namespace llmc::cpu
