// Small fp32 matrix products for attention, on copies of one head that stay in a core's cache.
//
// The right-hand matrix is stored in panels of 16 columns: element (p, j) at [j / 16][p][j % 16]. The inner
// loop then reads it from beginning to end, and holds a tile of 4 x 16 sums in registers.
#pragma once

#include <cstdint>

#include "llmc/device/cpu/parallel.h"

namespace llmc::cpu {

inline constexpr std::int64_t panel_width = 16;
inline constexpr std::int64_t tile_height = 4;

// Element (i, p) of a left-hand matrix at data[row_stride * i + depth_stride * p].
struct Left {
    const float* data;
    std::int64_t row_stride;
    std::int64_t depth_stride;
};

inline Left plain(const float* data, std::int64_t columns) { return {data, columns, 1}; }
inline Left transposed(const float* data, std::int64_t columns) { return {data, 1, columns}; }

template <bool accumulate>
void multiply_tile(float* c, std::int64_t c_columns, const Left& a, const float* panel, std::int64_t depth) {
    float sum[tile_height][panel_width] = {};
    for (std::int64_t p = 0; p < depth; ++p) {
#pragma GCC unroll 4
        for (std::int64_t i = 0; i < tile_height; ++i) {
            const float x = a.data[i * a.row_stride + p * a.depth_stride];
#pragma omp simd
            for (std::int64_t j = 0; j < panel_width; ++j) sum[i][j] += x * panel[p * panel_width + j];
        }
    }
    for (std::int64_t i = 0; i < tile_height; ++i) {
        float* to = c + i * c_columns;
#pragma omp simd
        for (std::int64_t j = 0; j < panel_width; ++j) to[j] = accumulate ? to[j] + sum[i][j] : sum[i][j];
    }
}

// c (rows, columns; c_columns apart) = or += a b, where b is `depth` rows of panels that are `panel_depth`
// rows deep. rows are a multiple of 4, columns of 16.
template <bool accumulate>
void multiply(float* c, std::int64_t c_columns, const Left& a, const float* b, std::int64_t panel_depth,
              std::int64_t rows, std::int64_t columns, std::int64_t depth) {
    for (std::int64_t j = 0; j < columns; j += panel_width) {
        const float* panel = b + j * panel_depth;
        for (std::int64_t i = 0; i < rows; i += tile_height) {
            const Left rows_of_a{a.data + i * a.row_stride, a.row_stride, a.depth_stride};
            multiply_tile<accumulate>(c + i * c_columns + j, c_columns, rows_of_a, panel, depth);
        }
    }
}

}  // namespace llmc::cpu
