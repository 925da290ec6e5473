// The parts of a warp's work in attention backward (attention_backward.cuh): the tiling, the products of its rows
// with a tile in shared memory, the weights of transposed scores, and the store of its sums. Operands, blocks and
// tiles are those of attention_tiles.cuh.
#pragma once

#include "llmc/device/cuda/attention_tiles.cuh"

namespace llmc::cuda {

// `columns` is the head size, rounded up to 64 or 128.
template <class X, int columns_>
struct AttentionBackwardTiling {
    using Element = X;
    static constexpr int columns = columns_, depth = columns / 16;
    static constexpr int threads = 128, warps = threads / warp_threads;
    // A warp owns `row_blocks` times 16 rows: as many as leave registers for their sums.
    static constexpr int row_blocks = columns == 64 ? 2 : 1;
    static constexpr int warp_rows = row_blocks * 16;
    static constexpr int owned = warps * warp_rows;
    // The rows of the tiles that move along the sequence. There are two stages: one is read while the next is
    // in flight.
    static constexpr int step = 32, step_blocks = step / 16;
    static constexpr int stages = 2;

    using Owned = Tile<X, owned, columns>;
    using Moving = Tile<X, step, columns>;
    using Rows = Operand[row_blocks][depth];        // the warp's rows of q, k, v or dout, as first operands
    using Scores = Block[row_blocks][step_blocks];  // scores of its rows against those of a step
    using Sums = Block[row_blocks][depth];          // its rows of a gradient

    // The index of a query's two numbers in row_values: the log-sum-exp for base 2, and D. The queries kernel
    // stores them for the keys kernel. The number of queries is rounded up to whole tiles.
    static __device__ __forceinline__ std::int64_t row_value_index(const AttentionSizes& s, int head,
                                                                   int query) {
        return 2 * (std::int64_t{head} * blocks_for(s.sequence, owned) * owned + query);
    }
};

// The dot product of two pairs of X, in fp32
template <class X>
__device__ __forceinline__ float dot_pairs(std::uint32_t a, std::uint32_t b) {
    if constexpr (std::is_same_v<X, bf16>) {
        const auto low = [](std::uint32_t pair) { return __uint_as_float(pair << 16); };
        const auto high = [](std::uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
        return low(a) * low(b) + high(a) * high(b);
    } else {
        X of_a[2], of_b[2];
        memcpy(static_cast<void*>(of_a), &a, sizeof a);
        memcpy(static_cast<void*>(of_b), &b, sizeof b);
        return to_float(of_a[0]) * to_float(of_b[0]) + to_float(of_a[1]) * to_float(of_b[1]);
    }
}

// Transposes the values of the four lanes of a row: x[i] of lane t becomes x[t] of lane i.
__device__ __forceinline__ void exchange_in_row(std::uint32_t (&x)[4] LLMC_SITE) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool upper = (own_lane() & bit) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & bit) != 0) continue;
            const std::uint32_t other =
                __shfl_xor_sync(all_lanes, upper ? x[i] : x[i | bit], bit, warp_threads LLMC_PASS_SITE);
            x[i] = upper ? other : x[i];
            x[i | bit] = upper ? x[i | bit] : other;
        }
    }
}

// Loads two first operands straight from a head in global memory: rows first ..., columns column ... column +
// 31, and zeros outside. A lane loads 16 bytes of a row. It needs 4 of them, and 4 of each of its three
// neighbors' bytes.
template <class X>
__device__ __forceinline__ void load_two_a(Operand& left, Operand& right, HeadRows<const X> from, int first,
                                           int column, const AttentionSizes& s LLMC_SITE) {
    const int lane = own_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int t = first + lane / 4 + half * 8, c = column + lane % 4 * 8;
        const bool inside = t < s.sequence && c < s.head_size;
        const uint4 bits = inside ? to_bits(load(from.row(t) + c LLMC_PASS_SITE)) : uint4{};
        std::uint32_t x[4] = {bits.x, bits.y, bits.z, bits.w};
        exchange_in_row(x LLMC_PASS_SITE);
        left[half] = x[0];
        left[half + 2] = x[1];
        right[half] = x[2];
        right[half + 2] = x[3];
    }
}

__device__ __forceinline__ void copy_operand(Operand& to, const Operand& from) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// scores += rows . tile^T. load(a, m, k, lane) loads the first operand: block m of the rows, block k of their
// columns.
template <class T, class Load>
__device__ __forceinline__ void score_products(typename T::Scores& scores, const Load& load,
                                               typename T::Moving tile LLMC_SITE) {
    const int lane = lane_id();
#pragma unroll
    for (int k = 0; k < T::depth; ++k) {
        Operand a[T::row_blocks];
#pragma unroll
        for (int m = 0; m < T::row_blocks; ++m) load(a[m], m, k, lane);
#pragma unroll
        for (int n = 0; n < T::step_blocks; ++n) {
            Operand b;
            load_b_transposed(b, tile, 16 * n, 16 * k, lane LLMC_PASS_SITE);
#pragma unroll
            for (int m = 0; m < T::row_blocks; ++m)
                multiply_add<typename T::Element>(scores[m][n], a[m], b LLMC_PASS_SITE);
        }
    }
}

// sums += weights . tile
template <class T>
__device__ __forceinline__ void add_products(typename T::Sums& sums, const typename T::Scores& weights,
                                             typename T::Moving tile LLMC_SITE) {
    const int lane = lane_id();
#pragma unroll
    for (int k = 0; k < T::step_blocks; ++k) {
        Operand a[T::row_blocks];
#pragma unroll
        for (int m = 0; m < T::row_blocks; ++m) round_to_a<typename T::Element>(a[m], weights[m][k]);
#pragma unroll
        for (int n = 0; n < T::depth; ++n) {
            Operand b;
            load_b(b, tile, 16 * k, 16 * n, lane LLMC_PASS_SITE);
#pragma unroll
            for (int m = 0; m < T::row_blocks; ++m)
                multiply_add<typename T::Element>(sums[m][n], a[m], b LLMC_PASS_SITE);
        }
    }
}

// Calls f(m, n, j, i) for each element scores[m][n][j][i] of the lane
template <class T, class F>
__device__ __forceinline__ void for_each_score(const F& f) {
#pragma unroll
    for (int m = 0; m < T::row_blocks; ++m) {
#pragma unroll
        for (int n = 0; n < T::step_blocks; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) f(m, n, i / 4, i % 4);
        }
    }
}

// Stores the warp's sums times `factor` in rows first ... of a head, by way of the warp's own rows of a tile.
template <class T>
__device__ __forceinline__ void store_sums(HeadRows<typename T::Element> to, int first,
                                           const AttentionSizes& s, typename T::Sums& sums, float factor,
                                           typename T::Owned tile, int row LLMC_SITE) {
    __syncwarp(all_lanes LLMC_PASS_SITE);  // other lanes have read the tile
#pragma unroll
    for (int m = 0; m < T::row_blocks; ++m) {
#pragma unroll
        for (int n = 0; n < T::depth; ++n) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sums[m][n][i / 4][i % 4] *= factor;
            round_to_tile(tile, row + 16 * m, 16 * n, sums[m][n]);
        }
    }
    __syncwarp(all_lanes LLMC_PASS_SITE);
    store_rows<T::warp_rows>(to, first, s.sequence, s.head_size, tile, row);
}

// Hides keys that their query does not see, in transposed scores: a row belongs to a key. The first key is
// `key`, the first query `query`.
template <class T>
__device__ __forceinline__ void hide_transposed(typename T::Scores& scores, int key, int query, int window) {
    for_each_score<T>([&](int m, int n, int j, int i) {
        if (!sees(query + 16 * n + block_column(j, i), key + 16 * m + block_row(i), window))
            scores[m][n][j][i] = -INFINITY;
    });
}

// p = 2^(scale p - lse), ds = p (ds - D), where p was q k and ds was dout v, transposed. row_values holds lse
// (for base 2) and D of each query of the step.
template <class T>
__device__ __forceinline__ void weigh_transposed(typename T::Scores& p, typename T::Scores& ds,
                                                 const float* row_values, float scale) {
#pragma unroll
    for (int n = 0; n < T::step_blocks; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            // The two numbers of each of the lane's two neighboring queries
            const Packed<float> query_values = load(row_values + 2 * (16 * n + block_column(j, 0)));
#pragma unroll
            for (int m = 0; m < T::row_blocks; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& x = p[m][n][j][i];
                    x = exp2_approximate(x * scale - query_values[i % 2 * 2]);
                    ds[m][n][j][i] = x * (ds[m][n][j][i] - query_values[i % 2 * 2 + 1]);
                }
            }
        }
    }
}

}  // namespace llmc::cuda
