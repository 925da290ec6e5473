// The order of rows by their tokens (used by encoder.cuh). The sum of a token's rows then has a fixed order, and rows
// of the same token lie side by side.
//
// A table may be part of a larger one, with its rows from first_row on. Tokens outside it have no row; they
// cost only the read of the token.
#pragma once

#include <algorithm>
#include <bit>

#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

struct TableRows {
    std::int64_t first;
    int count;

    // The row of a token, or -1 if it has none here.
    __device__ __forceinline__ int of(std::int32_t token) const {
        const std::int64_t row = token - first;
        return row >= 0 && row < count ? static_cast<int>(row) : -1;
    }
};

// Rows are sorted by token; rows of the same token keep their order. To share the work, tokens are divided
// into classes by their lowest bits, and the classes come one after the other. Consecutive tokens have
// similar frequencies, so classes by the lowest bits are about equally large. There are 128 classes, or fewer
// for a small vocabulary, so that each has about 16 tokens.
constexpr int token_class_bits(int vocabulary) {
    return std::clamp(static_cast<int>(std::bit_width(static_cast<unsigned>(vocabulary))) - 5, 0, 7);
}
__device__ __forceinline__ int class_of(int token, int class_bits) { return token & ((1 << class_bits) - 1); }
__device__ __forceinline__ int key_in_class(int token, int class_bits) { return token >> class_bits; }

// The sum of x over lanes 0 to this one.
__device__ __forceinline__ int warp_sum_up_to(int x, int lane LLMC_SITE) {
#pragma unroll
    for (int distance = 1; distance < warp_threads; distance *= 2) {
        const int other = __shfl_up_sync(all_lanes, x, distance, warp_threads LLMC_PASS_SITE);
        if (lane >= distance) x += other;
    }
    return x;
}

// The sum of x over the threads before this one. `total` gets the sum over the block, which consists of whole
// warps.
__device__ __forceinline__ int block_sum_before(int x, int* total LLMC_SITE) {
    SHARED(int, sums, [warp_threads]);
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int up_to = warp_sum_up_to(x, lane LLMC_PASS_SITE);
    if (lane == warp_threads - 1) sums[warp] = up_to;
    __syncthreads(LLMC_PASS_ONLY_SITE);
    const int warps_up_to = warp_sum_up_to(lane < warps ? sums[lane] : 0, lane LLMC_PASS_SITE);
    *total = __shfl_sync(all_lanes, warps_up_to, warp_threads - 1, warp_threads LLMC_PASS_SITE);
    const int warps_before =
        __shfl_sync(all_lanes, warps_up_to, warp == 0 ? 0 : warp - 1, warp_threads LLMC_PASS_SITE);
    __syncthreads(LLMC_PASS_ONLY_SITE);
    return (warp == 0 ? 0 : warps_before) + up_to - x;
}

// Calls f(token, row) for a warp's rows, 32 at a time, with four loads in flight. All lanes call it together;
// `token` is -1 if there is no row. Tokens are relative to the table's first row; those outside the table are
// -1 too.
template <class F>
__device__ __forceinline__ void for_rows(const std::int32_t* tokens, TableRows table, int begin, int end,
                                         F f) {
    constexpr int loads = 4;
    for (int first = begin; first < end; first += loads * warp_threads) {
        const int row = first + static_cast<int>(threadIdx.x) % warp_threads;
        int token[loads];
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            token[k] = row + k * warp_threads < end ? table.of(tokens[row + k * warp_threads]) : -1;
        }
#pragma unroll
        for (int k = 0; k < loads; ++k) f(token[k], row + k * warp_threads);
    }
}

// A stable counting sort. Block b reads all tokens and places the rows of class b.
//
// First it counts, per warp, the rows of each token of its class, and the rows of earlier classes. Then it
// knows where each warp's rows of a token begin. Each warp puts its rows there, in their order. Rows whose
// token is not in the table get no place; the unused places at the end hold -1.
//   `keys`: the tokens in a class
template <class Token>
__global__ void __launch_bounds__(512)
    order_rows_kernel4(std::int32_t* order, const Token* tokens, TableRows table, int rows, int keys,
                       int class_bits) {
    SharedAllocator shared;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int warp = thread / warp_threads, lane = thread % warp_threads, warps = threads / warp_threads;
    int* const places = shared.take<int>(static_cast<std::size_t>(warps) * keys);
    int* const place = places + warp * keys;
    const int own_class = static_cast<int>(blockIdx.x);
    const int share = blocks_for(rows, warps * warp_threads) * warp_threads;
    const int begin = min(rows, warp * share), end = min(rows, begin + share);

    for (int key = lane; key < keys; key += warp_threads) place[key] = 0;
    __syncwarp();
    int before = 0;
    for_rows(tokens, table, begin, end, [&](int token, int) {
        if (token < 0) return;
        before += class_of(token, class_bits) < own_class ? 1 : 0;
        if (class_of(token, class_bits) == own_class) atomicAdd(&place[key_in_class(token, class_bits)], 1);
    });
    int next = 0;
    block_sum_before(before, &next);
    for (int first = 0; first < keys; first += threads) {
        const int key = first + thread;
        int count = 0;
        if (key < keys) {
            for (int w = 0; w < warps; ++w) count += places[w * keys + key];
        }
        int total = 0;
        int start = next + block_sum_before(count, &total);
        next += total;
        if (key < keys) {
            for (int w = 0; w < warps; ++w) {
                const int of_warp = places[w * keys + key];
                places[w * keys + key] = start;
                start += of_warp;
            }
        }
    }
    __syncthreads();
    // The block of the last class marks the unused places.
    if (blockIdx.x + 1 == gridDim.x) {
        for (int left = next + thread; left < rows; left += threads) order[left] = -1;
    }

    for_rows(tokens, table, begin, end, [&](int token, int row) {
        const bool mine = token >= 0 && class_of(token, class_bits) == own_class;
        const unsigned matching = __ballot_sync(all_lanes, mine);
        if (mine) {
            const int key = key_in_class(token, class_bits);
            const unsigned same = __match_any_sync(matching, key);
            const int start = place[key];
            const int place_among_same = __popc(same & ((1u << lane) - 1));
            order[start + place_among_same] = row;
            __syncwarp(matching);
            if (place_among_same == 0) place[key] = start + __popc(same);
        }
        __syncwarp();  // other lanes read it next
    });
}

// Uses as many warps as shared memory allows, since each warp has its own counts.
inline void order_rows(const LaunchContext& on, std::int32_t* order, const std::int32_t* tokens,
                       TableRows table, int rows) {
    const int class_bits = token_class_bits(table.count);
    const int classes = 1 << class_bits, keys = blocks_for(table.count, classes);
    const auto shared_bytes = [keys](int warps) {
        return SharedAllocator::bytes<int>(static_cast<std::size_t>(warps) * static_cast<std::size_t>(keys));
    };
    constexpr std::size_t static_bytes = 1024;
    // Few rows do not need many warps.
    int warps = std::min(16, blocks_for(rows, 4 * warp_threads));
    while (warps > 1 && shared_bytes(warps) + static_bytes > on.chip.shared_bytes_per_block) --warps;
    check(shared_bytes(warps) + static_bytes <= on.chip.shared_bytes_per_block,
          "encoder: the counts of a token class fit into shared memory");
    launch(on, order_rows_kernel4<std::int32_t>, classes, warps * warp_threads, shared_bytes(warps), order,
           tokens, table, rows, keys, class_bits);
}

}  // namespace llmc::cuda
