// The backward pass of the root-mean-square norm of heads (ops.h: head_norm_backward, head_norm_backward_sums).
// head_norm_parts.cuh says how threads share a head.
#pragma once

#include "llmc/device/cuda/head_norm_parts.cuh"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

namespace detail {

// The heads whose loads a thread has in flight at once.
template <int pieces>
inline constexpr int head_norm_backward_held = pieces == 1 ? 2 : 1;

}  // namespace detail

// A block goes over many heads. A thread has the same columns of each, so that its part of dweight stays in
// registers; at the end the groups' parts are added. With `only_sums`, `partials` gets the sum of g h of each
// head, and nothing else is written.
//   partials fp32 (gridDim.x, size): each block's part of dweight; null: it is not stored
template <class X, int pieces, bool only_sums>
__global__ void __launch_bounds__(detail::head_norm_max_threads, pieces == 1 ? 2 : 1)
    head_norm_backward_kernel3(HeadPlaces<X> din, float* partials, HeadPlaces<const X> dout,
                               HeadPlaces<const X> in, const X* weight, const float* rstd, RankSums shared,
                               unsigned heads, int count, int size) {
    constexpr int pack = Packed<X>::size, held = detail::head_norm_backward_held<pieces>;
    float dweight[pieces][pack] = {};
    Packed<X> w[pieces];
#pragma unroll
    for (int p = 0; p < pieces; ++p) w[p] = detail::head_weight(weight, detail::head_column<X>(p), size);

    int turn = 0;
    const unsigned block_heads = held * blockDim.y;
    for (unsigned start = blockIdx.x * block_heads; start < heads; start += gridDim.x * block_heads) {
        const unsigned first = start + threadIdx.y;
        // Beyond the last head or column there are zeros, which add nothing to any sum.
        Packed<X> x[held][pieces], dy[held][pieces];
        float scale[held];
#pragma unroll
        for (int r = 0; r < held; ++r) {
            const unsigned head = first + r * blockDim.y;
            const unsigned row = head / count;
            const auto of_row = static_cast<int>(head % count);
            scale[r] = head < heads ? rstd[head] : 0;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                const int column = detail::head_column<X>(p);
                x[r][p] = dy[r][p] = from_bits<X>({});
                if (head < heads && column < size) {
                    x[r][p] = load_streaming(in.at(row, of_row, size, column));
                    dy[r][p] = load_streaming(dout.at(row, of_row, size, column));
                }
            }
        }
        float sums[held];
#pragma unroll
        for (int r = 0; r < held; ++r) {
            sums[r] = 0;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    const float h = to_float(x[r][p][i]) * scale[r], d = to_float(dy[r][p][i]);
                    sums[r] += d * to_float(w[p][i]) * h;
                    if constexpr (!only_sums) dweight[p][i] += d * h;
                }
            }
        }
        detail::add_over_group(sums, turn);
        turn ^= 1;
        // h and g are recomputed, since keeping them would take twice the registers.
#pragma unroll
        for (int r = 0; r < held; ++r) {
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                forget_conversions(x[r][p]);
                forget_conversions(dy[r][p]);
            }
        }
#pragma unroll
        for (int r = 0; r < held; ++r) {
            const unsigned head = first + r * blockDim.y;
            if (head >= heads) break;
            if constexpr (only_sums) {
                if (threadIdx.x == 0) partials[head] = sums[r];
            } else if (din.first) {
                const float mean = (shared.sums ? shared.of_row(head, heads) : sums[r]) / shared.size;
#pragma unroll
                for (int p = 0; p < pieces; ++p) {
                    const int column = detail::head_column<X>(p);
                    if (column >= size) break;
#pragma unroll
                    for (int i = 0; i < pack; ++i) {
                        const float h = to_float(x[r][p][i]) * scale[r];
                        const float g = to_float(dy[r][p][i]) * to_float(w[p][i]);
                        x[r][p][i] = from_float<X>(scale[r] * (g - h * mean));
                    }
                    store(din.at(head / count, static_cast<int>(head % count), size, column), x[r][p]);
                }
            }
        }
    }

    if constexpr (!only_sums) {
        if (!partials) return;
        const int groups = static_cast<int>(blockDim.y);
        SharedAllocator allocator;
        float* const group_sums = allocator.take<float>(static_cast<std::size_t>(groups) * size);
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
            const int column = detail::head_column<X>(p);
            if (column >= size) break;
#pragma unroll
            for (int i = 0; i < pack; i += Packed<float>::size) {
                Packed<float> four;
#pragma unroll
                for (int j = 0; j < Packed<float>::size; ++j) four[j] = dweight[p][i + j];
                store(group_sums + static_cast<int>(threadIdx.y) * size + column + i, four);
            }
        }
        __syncthreads();
        const auto thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
        for (int c = thread; c < size; c += groups * static_cast<int>(blockDim.x)) {
            float sum = 0;
            for (int group = 0; group < groups; ++group) sum += group_sums[group * size + c];
            partials[std::int64_t{blockIdx.x} * size + c] = sum;
        }
    }
}

// dweight += the sums of the partials of all blocks, 32 columns per block. Each warp adds every `warps`-th
// block's; then the first warp adds the warps' sums.
template <int warps>
__global__ void __launch_bounds__(warps* warp_threads)
    head_norm_backward_sum_kernel3(float* dweight, const float* partials, int partial_blocks, int size) {
    SHARED(float, sums, [warps][warp_threads]);
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int column = static_cast<int>(blockIdx.x) * warp_threads + lane;
    float sum = 0;
    if (column < size) {
#pragma unroll 8
        for (int b = warp; b < partial_blocks; b += warps) sum += partials[std::int64_t{b} * size + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= size) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < warps; ++w) total += sums[w][lane];
    dweight[column] += total;
}

namespace detail {

inline void add_head_norm_partials(const LaunchContext& on, float* dweight, const float* partials,
                                   int partial_blocks, int size) {
    constexpr int warps = 8;
    launch(on, head_norm_backward_sum_kernel3<warps>, static_cast<unsigned>(blocks_for(size, warp_threads)),
           warps * warp_threads, 0, dweight, partials, partial_blocks, size);
}

template <bool only_sums, class X>
void launch_head_norm_backward(const LaunchContext& on, HeadPlaces<X> din, float* dweight, float* partials,
                               HeadPlaces<const X> dout, HeadPlaces<const X> in, const X* weight,
                               const float* rstd, RankSums shared, std::int64_t rows, int count, int size,
                               int block_threads) {
    check((!din.first || has_whole_packs(din, size)) && has_whole_packs(dout, size) &&
              has_whole_packs(in, size),
          "head norm: pieces of 16 bytes");
    const unsigned heads = count_heads(rows, count);
    const HeadGroups g = head_groups<X>(size, block_threads);
    with_pieces(g, [&]<int pieces>() {
        const auto block_heads = static_cast<unsigned>(head_norm_backward_held<pieces> * g.groups);
        const unsigned blocks =
            std::min(blocks_for(heads, block_heads),
                     static_cast<unsigned>(head_norm_blocks_per_multiprocessor * on.chip.multiprocessors));
        const std::size_t shared_bytes =
            dweight ? SharedAllocator::bytes<float>(static_cast<std::size_t>(g.groups) * size) : 0;
        launch(on, head_norm_backward_kernel3<X, pieces, only_sums>, blocks,
               dim3(static_cast<unsigned>(g.threads), static_cast<unsigned>(g.groups)), shared_bytes, din,
               dweight || only_sums ? partials : nullptr, dout, in, weight, rstd, shared, heads, count, size);
        if (dweight) add_head_norm_partials(on, dweight, partials, static_cast<int>(blocks), size);
    });
}

}  // namespace detail

// din, dout, in: as in head_norm_forward; din may have no heads (a null pointer). dweight fp32 (size)
// accumulates, or is null. The workspace has
// head_norm_backward_workspace_bytes. din may be dout: a thread has read its pieces of both before it writes
// them.
template <class X>
void head_norm_backward(const LaunchContext& on, HeadPlaces<X> din, float* dweight, HeadPlaces<const X> dout,
                        HeadPlaces<const X> in, const X* weight, const float* rstd, RankSums shared,
                        std::int64_t rows, int count, int size, void* workspace, int block_threads = 384) {
    detail::launch_head_norm_backward<false>(on, din, dweight, static_cast<float*>(workspace), dout, in,
                                             weight, rstd, shared, rows, count, size, block_threads);
}

// sums fp32 (rows)
template <class X>
void head_norm_backward_sums(const LaunchContext& on, float* sums, HeadPlaces<const X> dout,
                             HeadPlaces<const X> in, const X* weight, const float* rstd, std::int64_t rows,
                             int size, int block_threads = 384) {
    detail::launch_head_norm_backward<true, X>(on, {nullptr, 0}, nullptr, sums, dout, in, weight, rstd, {},
                                               rows, 1, size, block_threads);
}

}  // namespace llmc::cuda
