// The parts that the norm of heads and its backward pass share (head_norm_forward.cuh, head_norm_backward.cuh).
//
// A group of threads does a head: a part of a warp for short heads, or several warps. Each thread has 1 or 4
// pieces of 16 bytes of it in registers, so that memory is read and written once. A block has several groups.
//
// All sums of a head have an order that depends only on its size. The sums that ranks share come from the
// same instructions as those of whole rows.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/heads.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

// The sums of rows that ranks share, fp32 (ranks, rows). If null, a row's own sum counts. `size` is the
// number of elements of a whole row.
struct RankSums {
    const float* sums;
    int ranks;
    float size;

    __device__ __forceinline__ float of_row(unsigned row, unsigned rows) const {
        float sum = 0;
#pragma unroll 1
        for (int rank = 0; rank < ranks; ++rank) sum += sums[std::int64_t{rank} * rows + row];
        return sum;
    }
};

namespace detail {

inline constexpr int head_norm_max_threads = 384;
inline constexpr int head_norm_most_pieces = 4;

// Adds each of the sums over the threads of a group, blockDim.x of them. `turn` is 0 and 1 by turns. So when
// a warp writes its sums again, all warps have read those of two calls before.
template <int held>
__device__ __forceinline__ void add_over_group(float (&sums)[held], int turn LLMC_SITE) {
    constexpr int max_warps = head_norm_max_threads / warp_threads;
    SHARED(float, warp_sums, [2][max_warps][held]);
    const int threads = static_cast<int>(blockDim.x);
#pragma unroll
    for (int r = 0; r < held; ++r) {
        for (int distance = min(threads, warp_threads) / 2; distance > 0; distance /= 2) {
            sums[r] += __shfl_xor_sync(all_lanes, sums[r], distance, warp_threads LLMC_PASS_SITE);
        }
    }
    if (threads <= warp_threads) return;
    const int group_warps = threads / warp_threads;
    const int first_warp = static_cast<int>(threadIdx.y) * group_warps;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    if (threadIdx.x % warp_threads == 0) {
#pragma unroll
        for (int r = 0; r < held; ++r) warp_sums[turn][first_warp + warp][r] = sums[r];
    }
    __syncthreads(LLMC_PASS_ONLY_SITE);
#pragma unroll
    for (int r = 0; r < held; ++r) sums[r] = 0;
    for (int w = 0; w < group_warps; ++w) {
#pragma unroll
        for (int r = 0; r < held; ++r) sums[r] += warp_sums[turn][first_warp + w][r];
    }
}

// The column with which a thread's piece p begins.
template <class X>
__device__ __forceinline__ int head_column(int p) {
    return (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * Packed<X>::size;
}

// The weight of a thread's piece; 1 if there are no weights, and 0 beyond the head.
template <class X>
__device__ __forceinline__ Packed<X> head_weight(const X* weight, int column, int size) {
    Packed<X> w;
#pragma unroll
    for (int i = 0; i < Packed<X>::size; ++i) w[i] = from_float<X>(column < size ? 1.0f : 0.0f);
    if (weight && column < size) w = load(weight + column);
    return w;
}

// The threads of a group, and the groups of a block.
struct HeadGroups {
    int pieces, threads, groups;
};

template <class X>
HeadGroups head_groups(int size, int block_threads) {
    const int packs = size / Packed<X>::size;
    check(packs <= head_norm_most_pieces * head_norm_max_threads, "head norm: a head has at most 24 KiB");
    check(block_threads % warp_threads == 0 && block_threads > 0 && block_threads <= head_norm_max_threads,
          "head norm: a block has whole warps, at most head_norm_max_threads");
    constexpr int most_with_one_piece = 128;
    HeadGroups g{packs <= most_with_one_piece ? 1 : head_norm_most_pieces, 1, 1};
    if (packs > warp_threads) {
        g.threads = blocks_for(packs, g.pieces * warp_threads) * warp_threads;
    } else {
        while (g.threads < packs) g.threads *= 2;
    }
    g.groups = std::max(1, block_threads / g.threads);
    return g;
}

// Calls f<pieces>() with the number of pieces of a thread.
template <class F>
void with_pieces(const HeadGroups& groups, F&& f) {
    if (groups.pieces == 1) return f.template operator()<1>();
    f.template operator()<head_norm_most_pieces>();
}

}  // namespace detail

}  // namespace llmc::cuda
