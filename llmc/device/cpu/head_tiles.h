// Small matrix products for attention, on copies of one head that stay in a core's cache. The operands'
// elements E are floats or bf16; sums are in fp32.
//
// The depth is the dimension summed over, with index p. Elements that are neighbors in depth are stored in
// groups: pairs in bf16, which one instruction multiplies and adds; single elements in fp32.
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

// A left-hand matrix. Element (i, p) is data[row_stride * i + depth_stride * (p / group) + p % group].
template <class E>
struct Left {
    const E* data;
    std::int64_t row_stride;
    std::int64_t depth_stride;
};

// plain(): a matrix stored row by row. transposed(): the transpose of a matrix stored in groups of
// `group` neighboring rows, with the elements of a group interleaved.
template <class E>
Left<E> plain(const E* data, std::int64_t columns) {
    return {data, columns, group<E>};
}
template <class E>
Left<E> transposed(const E* data, std::int64_t columns) {
    return {data, group<E>, group<E> * columns};
}

// A matrix of sums, or its transpose, as a left-hand matrix. The sums have `stride` elements from row to row;
// the numbers of rows and columns are multiples of 16. In bf16 the elements are rounded into `copy`, which
// has room for rows * stride elements.
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

// Copy a plain matrix to a right-hand matrix, which is stored in panels of 16 columns: element (p, j) is at
// [j / 16][p / group][j % 16][p % group]. The inner loop reads it from beginning to end. The numbers of rows
// and columns of the plain matrix are multiples of 16. `panel_depth` is the number of rows in a panel of
// `to`.
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

// The same for the transpose: row i of `from` becomes column i.
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

// The rows of a tile of fp32 sums. With AVX2 the tile fills half of the registers.
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

// Sets c to a b, or adds a b to it. Rows of c are c_columns elements apart. b points to `depth` rows of
// panels with `panel_depth` rows each. rows, columns and depth are multiples of 16.
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

// The same for bf16 matrices. The processor must have bf16 instructions (processor_has_bf16()).
template <bool accumulate>
void multiply(float* c, std::int64_t c_columns, const Left<bfloat16>& a, const bfloat16* b,
              std::int64_t panel_depth, std::int64_t rows, std::int64_t columns, std::int64_t depth);

}  // namespace llmc::cpu
