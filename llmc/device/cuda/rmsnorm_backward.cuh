// RMS norm backward (ops.h: rmsnorm_backward).
//
// There are two kernels. The first has a grid of few blocks, each of which goes over many rows. It writes
// din, and each block's contribution to dweight to the workspace. The second sums these contributions over
// the blocks. The order of all sums depends only on the shape and the number of multiprocessors. Computing
// din alone or dweight alone uses the same instructions, and so gives the same bits as computing both.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

namespace detail {

inline constexpr int rmsnorm_backward_max_threads = 512;

// A warp's contribution to the sums of g h of `rows` rows.
template <int rows>
struct alignas(rows * sizeof(float)) RmsSums {
    float gh[rows];
};

}  // namespace detail

// A group of blockDim.x threads does a row. Each thread has the same columns of every row: `pieces` of 16
// bytes, blockDim.x pieces apart. Its part of dweight thus stays in registers from the first row to the last.
//
// A thread has the loads of `held` rows in flight at once; the sums of these rows share one barrier. The
// blockDim.y groups of a block take rows in turn. At the end, their contributions are added.
//   din null: it is not computed
//   weight null: it counts as ones
//   partials fp32 (gridDim.x, channels): each block's dweight; null: it is not stored
template <class X, int pieces>
__global__ void __launch_bounds__(detail::rmsnorm_backward_max_threads, pieces == 1 ? 2 : 1)
    rmsnorm_backward_kernel5(X* din, float* partials, const X* dout, const X* in, const X* weight,
                             const float* rstd, std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size;
    constexpr int held = pieces == 1 ? 2 : 1;
    // With four pieces, registers do not suffice to load din with the others, or to keep the weight.
    constexpr bool late = pieces == 4;
    constexpr int max_warps = detail::rmsnorm_backward_max_threads / warp_threads;
    SHARED(detail::RmsSums<held>, warp_sums, [2][max_warps]);

    const int groups = static_cast<int>(blockDim.y), group = static_cast<int>(threadIdx.y);
    const int group_warps = static_cast<int>(blockDim.x) / warp_threads;
    const int first_warp = group * group_warps;
    const int warp = first_warp + static_cast<int>(threadIdx.x) / warp_threads;
    const auto column = [](int p) {
        return (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * pack;
    };

    float dweight[pieces][pack] = {};
    Packed<X> w[pieces];
    // Branches on weight and din would cost registers, which are short here: the compiler would make two
    // loops.
    const int weighted_channels = weight ? channels : 0;
    const std::int64_t written_rows = din ? rows : 0;
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
#pragma unroll
        for (int i = 0; i < pack; ++i) w[p][i] = from_float<X>(1);
        if (!late && column(p) < weighted_channels) w[p] = load(weight + column(p));
    }

    const float per_channel = 1 / static_cast<float>(channels);
    const std::int64_t block_rows = std::int64_t{held} * groups;
    int turn = 0;
    for (std::int64_t first = blockIdx.x * block_rows; first < rows; first += gridDim.x * block_rows) {
        // Beyond the last row or column there are zeros, which add nothing to any sum.
        Packed<X> x[held][pieces], dy[held][pieces], dx[held][pieces];
        float row_rstd[held];
#pragma unroll
        for (int r = 0; r < held; ++r) {
            const std::int64_t row = first + group * held + r, start = row * channels;
            row_rstd[r] = row < rows ? rstd[row] : 0;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                x[r][p] = dy[r][p] = dx[r][p] = from_bits<X>({});
                if (row < rows && column(p) < channels) {
                    x[r][p] = load_streaming(in + start + column(p));
                    dy[r][p] = load_streaming(dout + start + column(p));
                    if (!late && din) dx[r][p] = load(din + start + column(p));
                }
            }
        }

        detail::RmsSums<held> sums;
#pragma unroll
        for (int r = 0; r < held; ++r) {
            float sum_gh = 0;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                if (late && column(p) < weighted_channels) w[p] = load(weight + column(p));
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    const float h = to_float(x[r][p][i]) * row_rstd[r];
                    const float d = to_float(dy[r][p][i]);
                    sum_gh += d * to_float(w[p][i]) * h;
                    dweight[p][i] += d * h;
                }
            }
            sums.gh[r] = sum_gh;
        }
        if (!late && !din) continue;
#pragma unroll
        for (int r = 0; r < held; ++r) sums.gh[r] = warp_sum(sums.gh[r]);
        // Two arrays are used in turn. When a thread is at the next barrier, it has read this one. So no
        // second barrier is needed before this one is written again.
        if (threadIdx.x % warp_threads == 0) warp_sums[turn][warp] = sums;
        __syncthreads();
        sums = {};
        for (int i = 0; i < group_warps; ++i) {
            const detail::RmsSums<held> of_warp = warp_sums[turn][first_warp + i];
#pragma unroll
            for (int r = 0; r < held; ++r) sums.gh[r] += of_warp.gh[r];
        }
        turn ^= 1;

        // h and g are recomputed, since keeping them would take twice the registers.
#pragma unroll
        for (int r = 0; r < held; ++r) {
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                forget_conversions(x[r][p]);
                forget_conversions(dy[r][p]);
                forget_conversions(w[p]);
            }
        }
#pragma unroll
        for (int r = 0; r < held; ++r) {
            const std::int64_t row = first + group * held + r;
            const float mean_gh = sums.gh[r] * per_channel;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                if (row >= written_rows || column(p) >= channels) continue;
                if (late) {
                    if (column(p) < weighted_channels) w[p] = load(weight + column(p));
                    dx[r][p] = load(din + row * channels + column(p));
                }
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    const float h = to_float(x[r][p][i]) * row_rstd[r];
                    const float g = to_float(dy[r][p][i]) * to_float(w[p][i]);
                    dx[r][p][i] = from_float<X>(to_float(dx[r][p][i]) + row_rstd[r] * (g - h * mean_gh));
                }
                store(din + row * channels + column(p), dx[r][p]);
            }
        }
    }

    if (!partials) return;
    partials += std::int64_t{blockIdx.x} * channels;
    SharedAllocator shared;
    float* group_partials =
        groups == 1 ? partials : shared.take<float>(static_cast<std::size_t>(groups) * channels);
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        if (column(p) >= channels) continue;
        float* to = group_partials + group * channels + column(p);
#pragma unroll
        for (int i = 0; i < pack; i += Packed<float>::size) {
            Packed<float> part;
#pragma unroll
            for (int j = 0; j < Packed<float>::size; ++j) part[j] = dweight[p][i + j];
            store(to + i, part);
        }
    }
    if (groups == 1) return;
    __syncthreads();
    const int threads = groups * static_cast<int>(blockDim.x);
    for (int c = group * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); c < channels;
         c += threads) {
        float sum = 0;
        for (int i = 0; i < groups; ++i) sum += group_partials[i * channels + c];
        partials[c] = sum;
    }
}

// dweight += the sum of its partials over the blocks that wrote them. A block does 32 columns; its warps
// share the partials of these.
template <int max_warps>
__global__ void __launch_bounds__(max_warps* warp_threads)
    rmsnorm_backward_sum_kernel5(float* dweight, const float* partials, int partial_blocks, int channels) {
    SHARED(float, sums, [max_warps][warp_threads]);
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int column = static_cast<int>(blockIdx.x) * warp_threads + lane;
    float sum = 0;
    if (column < channels) {
#pragma unroll 8
        for (int b = warp; b < partial_blocks; b += warps)
            sum += partials[std::int64_t{b} * channels + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= channels) return;
    for (int w = 1; w < warps; ++w) sum += sums[w][lane];
    dweight[column] += sum;
}

namespace detail {

inline void add_rmsnorm_partials(const LaunchContext& on, float* dweight, const float* partials,
                                 int partial_blocks, int channels) {
    constexpr int max_warps = 32, partials_a_warp = 8;  // the most loads that a thread has in flight
    const int warps = std::min(max_warps, blocks_for(partial_blocks, partials_a_warp));
    launch(on, rmsnorm_backward_sum_kernel5<max_warps>,
           static_cast<unsigned>(blocks_for(channels, warp_threads)), warps * warp_threads, 0, dweight,
           partials, partial_blocks, channels);
}

template <class X, int pieces>
void launch_rmsnorm_backward(const LaunchContext& on, X* din, float* dweight, const X* dout, const X* in,
                             const X* weight, const float* rstd, std::int64_t rows, int channels,
                             float* partials, int block_threads) {
    constexpr int held = pieces == 1 ? 2 : 1;
    const int row_threads = blocks_for(channels / Packed<X>::size, pieces * warp_threads) * warp_threads;
    const int groups = std::max(1, block_threads / row_threads);
    const int blocks = static_cast<int>(
        std::min<std::int64_t>(rmsnorm_backward_blocks_per_multiprocessor * on.chip.multiprocessors,
                               blocks_for<std::int64_t>(rows, held * groups)));
    const std::size_t shared_bytes =
        groups == 1 || !dweight ? 0
                                : SharedAllocator::bytes<float>(static_cast<std::size_t>(groups) * channels);
    launch(on, rmsnorm_backward_kernel5<X, pieces>, static_cast<unsigned>(blocks),
           dim3(static_cast<unsigned>(row_threads), static_cast<unsigned>(groups)), shared_bytes, din,
           dweight ? partials : nullptr, dout, in, weight, rstd, rows, channels);
    if (dweight && blocks > 0) add_rmsnorm_partials(on, dweight, partials, blocks, channels);
}

}  // namespace detail

// din, dout, in X (rows, channels); dweight fp32 (channels); weight X (channels) or null; rstd fp32 (rows).
// din and dweight accumulate, and may be null: then they are not written. The workspace has
// rmsnorm_backward_workspace_bytes. A row has at most 32 KiB.
template <class X>
void rmsnorm_backward(const LaunchContext& on, X* din, float* dweight, const X* dout, const X* in,
                      const X* weight, const float* rstd, std::int64_t rows, int channels, void* workspace,
                      int block_threads = 512) {
    constexpr int row_pieces = detail::rmsnorm_backward_max_threads;  // if a thread has one piece
    check(channels % Packed<X>::size == 0, "RMS norm backward: channels are a multiple of 16 bytes");
    check(channels <= 4 * row_pieces * Packed<X>::size, "RMS norm backward: a row has at most 32 KiB");
    check(block_threads <= detail::rmsnorm_backward_max_threads,
          "RMS norm backward: at most rmsnorm_backward_max_threads");
    const auto run = [&](auto kernel_launcher) {
        kernel_launcher(on, din, dweight, dout, in, weight, rstd, rows, channels,
                        static_cast<float*>(workspace), block_threads);
    };
    const int pieces = blocks_for(channels / Packed<X>::size, row_pieces);
    if (pieces == 1) return run(detail::launch_rmsnorm_backward<X, 1>);
    if (pieces == 2) return run(detail::launch_rmsnorm_backward<X, 2>);
    return run(detail::launch_rmsnorm_backward<X, 4>);
}

}  // namespace llmc::cuda
