// Small products of bf16 matrices with bf16 intrinsics, since compilers do not generate these instructions
// from loops. Called only on processors that have the instructions.
#include "llmc/device/cpu/head_tiles.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

namespace llmc::cpu {

namespace {

// A tile of 8 rows and 2 panels has 16 registers of sums, enough to hide the latency of an instruction.
constexpr std::int64_t tile_height = 8;

// Stores two rows of 16 elements as 16 pairs.
inline void store_pairs(bfloat16* to, __m256i first, __m256i second) {
    // In each 128-bit half, unpacklo pairs the first four elements, and unpackhi the last four.
    const __m256i firsts = _mm256_unpacklo_epi16(first, second);
    const __m256i lasts = _mm256_unpackhi_epi16(first, second);
    auto* pairs = reinterpret_cast<__m256i*>(to);
    _mm256_storeu_si256(pairs, _mm256_permute2x128_si256(firsts, lasts, 0x20));
    _mm256_storeu_si256(pairs + 1, _mm256_permute2x128_si256(firsts, lasts, 0x31));
}

[[gnu::target("avx512bf16")]] inline __m256i rounded(const float* sixteen) {
    return (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sixteen));
}

[[gnu::target("avx512bf16")]] inline __m512bh broadcast_pair(const bfloat16* pair) {
    std::int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    return (__m512bh)_mm512_set1_epi32(bits);
}

template <bool accumulate, int panels>
[[gnu::target("avx512bf16")]] void multiply_tile(float* c, std::int64_t c_columns, const Left<bfloat16>& a,
                                                 const bfloat16* b, std::int64_t panel_depth,
                                                 std::int64_t depth) {
    __m512 sum[tile_height][panels];
#pragma GCC unroll 8
    for (auto& row : sum) {
#pragma GCC unroll 2
        for (__m512& s : row) s = _mm512_setzero_ps();
    }
    const bfloat16* left = a.data;
    for (std::int64_t p = 0; p < depth; p += 2) {
        __m512bh right[panels];
#pragma GCC unroll 2
        for (int n = 0; n < panels; ++n) {
            right[n] = (__m512bh)_mm512_loadu_si512(b + (n * panel_depth + p) * panel_width);
        }
#pragma GCC unroll 8
        for (std::int64_t i = 0; i < tile_height; ++i) {
            const __m512bh x = broadcast_pair(left + i * a.row_stride);
#pragma GCC unroll 2
            for (int n = 0; n < panels; ++n) sum[i][n] = _mm512_dpbf16_ps(sum[i][n], x, right[n]);
        }
        left += a.depth_stride;
    }
#pragma GCC unroll 8
    for (std::int64_t i = 0; i < tile_height; ++i) {
#pragma GCC unroll 2
        for (int n = 0; n < panels; ++n) {
            float* to = c + i * c_columns + n * panel_width;
            _mm512_storeu_ps(to, accumulate ? _mm512_add_ps(_mm512_loadu_ps(to), sum[i][n]) : sum[i][n]);
        }
    }
}

}  // namespace

template <bool accumulate>
[[gnu::target("avx512bf16")]] void multiply(float* c, std::int64_t c_columns, const Left<bfloat16>& a,
                                            const bfloat16* b, std::int64_t panel_depth, std::int64_t rows,
                                            std::int64_t columns, std::int64_t depth) {
    for (std::int64_t j = 0; j < columns; j += 2 * panel_width) {
        for (std::int64_t i = 0; i < rows; i += tile_height) {
            const Left<bfloat16> rows_of_a{a.data + i * a.row_stride, a.row_stride, a.depth_stride};
            float* const to = c + i * c_columns + j;
            if (j + panel_width < columns) {
                multiply_tile<accumulate, 2>(to, c_columns, rows_of_a, b + j * panel_depth, panel_depth,
                                             depth);
            } else {
                multiply_tile<accumulate, 1>(to, c_columns, rows_of_a, b + j * panel_depth, panel_depth,
                                             depth);
            }
        }
    }
}

template void multiply<false>(float*, std::int64_t, const Left<bfloat16>&, const bfloat16*, std::int64_t,
                              std::int64_t, std::int64_t, std::int64_t);
template void multiply<true>(float*, std::int64_t, const Left<bfloat16>&, const bfloat16*, std::int64_t,
                             std::int64_t, std::int64_t, std::int64_t);

void copy_panels(bfloat16* to, std::int64_t panel_depth, const bfloat16* from, std::int64_t rows,
                 std::int64_t columns) {
    for (std::int64_t p = 0; p < rows; p += 2) {
        for (std::int64_t j = 0; j < columns; j += panel_width) {
            const auto* first = reinterpret_cast<const __m256i*>(from + p * columns + j);
            const auto* second = reinterpret_cast<const __m256i*>(from + (p + 1) * columns + j);
            store_pairs(to + j * panel_depth + p * panel_width, _mm256_loadu_si256(first),
                        _mm256_loadu_si256(second));
        }
    }
}

[[gnu::target("avx512bf16")]] Left<bfloat16> left_hand(bfloat16* copy, const float* sums, std::int64_t stride,
                                                       std::int64_t rows, std::int64_t columns) {
    for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < columns; j += panel_width) {
            const std::int64_t at = i * stride + j;
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(copy + at), rounded(sums + at));
        }
    }
    return plain(copy, stride);
}

[[gnu::target("avx512bf16")]] Left<bfloat16> left_hand_transposed(bfloat16* copy, const float* sums,
                                                                  std::int64_t stride, std::int64_t rows,
                                                                  std::int64_t columns) {
    for (std::int64_t i = 0; i < rows; i += 2) {
        for (std::int64_t j = 0; j < columns; j += panel_width) {
            const float* from = sums + i * stride + j;
            store_pairs(copy + i * stride + 2 * j, rounded(from), rounded(from + stride));
        }
    }
    return transposed(copy, stride);
}

}  // namespace llmc::cpu

#endif
