// Products of 16-bit matrices that are partly computed in fp32. Without instructions for their dtype the whole product
// is in fp32. With them, only the result is in fp32, until it is rounded. The fp32 values are computed a part at
// a time, so the workspace is small for any shapes.
#pragma once

#include <algorithm>
#include <cstdint>

#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/products.h"

namespace llmc::cpu {

class WidenedProduct {
  public:
    // `workspace` holds floats(n), where n is the most rows or columns of any matrix of the product.
    // `is_native`: whether the processor has instructions for the matrices' dtype.
    WidenedProduct(Products& products, int threads, bool is_native, float* workspace)
        : products_(products), threads_(threads), native_(is_native), workspace_(workspace) {}

    // Three tiles: one each of the result, a and b. If only the result is in fp32, the result uses the memory of
    // all three.
    static std::int64_t floats(std::int64_t most_rows_or_columns) {
        const std::int64_t tile = std::min(tile_size, most_rows_or_columns);
        return 3 * tile * tile;
    }

    // c += a b, with c in fp32
    void accumulate(const Matrix& c, const Matrix& a, const Matrix& b) {
        for_parts(c, [&](std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
            multiply(c.part(row, rows, column, columns), a.part(row, rows, 0, a.columns),
                     b.part(0, b.rows, column, columns), Into::accumulate);
        });
    }

    // c = finish(a b), with c in X. finish(sum, row, column) takes an element of a b before it is rounded
    template <class X, class Finish>
    void overwrite(const Matrix& c, const Matrix& a, const Matrix& b, const Finish& finish) {
        for_parts(c, [&](std::int64_t row, std::int64_t rows, std::int64_t column, std::int64_t columns) {
            const Matrix sums(workspace_, rows, columns);
            multiply(sums, a.part(row, rows, 0, a.columns), b.part(0, b.rows, column, columns),
                     Into::overwrite);
            const Matrix to = c.part(row, rows, column, columns);
            parallel_for(threads_, rows, [&](std::int64_t i) {
                const float* sum = reinterpret_cast<const float*>(sums.data) + i * sums.row_stride;
                X* result = reinterpret_cast<X*>(to.data) + i * to.row_stride;
#pragma omp simd
                for (std::int64_t j = 0; j < columns; ++j) {
                    result[j] = from_float<X>(finish(sum[j], row + i, column + j));
                }
            });
        });
    }

  private:
    static constexpr std::int64_t tile_size = 1024;

    // Calls f(first row, rows, first column, columns) for parts of c that fit into the workspace. The parts
    // are tiles or, with bf16 instructions, as many whole rows as fit: oneDNN multiplies a few large parts
    // faster than many small ones.
    template <class F>
    void for_parts(const Matrix& c, const F& f) const {
        const std::int64_t most_columns = native_ ? c.columns : tile_size;
        const std::int64_t largest = std::max({c.rows, c.columns});
        const std::int64_t most_rows =
            native_ ? std::max(std::int64_t{1}, floats(largest) / c.columns) : tile_size;
        for (std::int64_t row = 0; row < c.rows; row += most_rows) {
            for (std::int64_t column = 0; column < c.columns; column += most_columns) {
                f(row, std::min(most_rows, c.rows - row), column, std::min(most_columns, c.columns - column));
            }
        }
    }

    // Computes a tile c in fp32: c = a b or c += a b. c may be the workspace's first tile; the others hold a
    // and b in fp32.
    void multiply(const Matrix& c, const Matrix& a, const Matrix& b, Into into) {
        if (native_) return products_.multiply(c, a, b, into);
        const std::int64_t tile = std::min(tile_size, std::max({c.rows, c.columns, a.columns}));
        for (std::int64_t first = 0; first < a.columns; first += tile_size) {
            const std::int64_t depth = std::min(tile_size, a.columns - first);
            const Matrix wide_a = widened(a.part(0, a.rows, first, depth), workspace_ + tile * tile);
            const Matrix wide_b = widened(b.part(first, depth, 0, b.columns), workspace_ + 2 * tile * tile);
            products_.multiply(c, wide_a, wide_b, first == 0 ? into : Into::accumulate);
        }
    }

    // m in fp32, in the same storage order.
    Matrix widened(const Matrix& m, float* to) const {
        if (m.column_stride != 1) return widened(m.transposed(), to).transposed();
        with_dtype(m.dtype, [&](auto element) {
            parallel_for(threads_, m.rows, [&](std::int64_t i) {
                const auto* from = reinterpret_cast<const decltype(element)*>(m.data) + i * m.row_stride;
                float* wide = to + i * m.columns;
#pragma omp simd
                for (std::int64_t j = 0; j < m.columns; ++j) wide[j] = to_float(from[j]);
            });
        });
        return {to, m.rows, m.columns};
    }

    Products& products_;
    int threads_;
    bool native_;
    float* workspace_;
};

}  // namespace llmc::cpu
