// Layernorm and RMS norm backward (ops.h: layernorm_backward, rmsnorm_backward). The development of these
// kernels is in dev/layernorm_backward.cu.
//
// There are two kernels. The first has a grid of few blocks, each of which goes over many rows. It writes
// din, and each block's contribution to dweight and dbias to the workspace. The second sums these
// contributions over the blocks. The order of all sums depends only on the shape and the number of
// multiprocessors. Computing din alone, dweight alone, or dweight and dbias uses the same instructions, and
// so gives the same bits as computing all three.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

namespace detail {

// Layernorm has two sums a row and two gradients a column, of the weight and of the bias; RMS norm has the first.
template <bool centred>
inline constexpr int norm_sums = centred ? 2 : 1;
// Registers hold a thread's sums of its columns.
template <bool centred>
inline constexpr int norm_backward_max_threads = centred ? 384 : 512;

// A warp's contribution to the sums of `rows` rows: of g h, and of g.
template <bool centred, int rows>
struct alignas(norm_sums<centred>* rows * sizeof(float)) RowSums {
    float of[norm_sums<centred>][rows];
};

}  // namespace detail

// Layernorm, or RMS norm, which is not `centred`.
//
// A group of blockDim.x threads does a row. Each thread has the same columns of every row: `pieces` of 16
// bytes, blockDim.x pieces apart. Its part of dweight and dbias thus stays in registers from the first row to
// the last.
//
// A thread has the loads of `held` rows in flight at once; the sums of these rows share one barrier. The
// blockDim.y groups of a block take rows in turn. At the end, their contributions are added.
//   din null: it is not computed
//   weight null: it counts as ones
//   partials fp32 (gridDim.x, norm_sums, channels): each block's dweight and dbias; null: they are not stored
template <class X, bool centred, int pieces>
__global__ void __launch_bounds__(detail::norm_backward_max_threads<centred>, pieces == 1 ? 2 : 1)
    norm_backward_kernel5(X* din, float* partials, const X* dout, const X* in, const X* weight,
                          const float* mean, const float* rstd, std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size, outputs = detail::norm_sums<centred>;
    constexpr int held = pieces == 1 ? 2 : 1;
    // With four pieces, registers do not suffice to load din with the others, or to keep the weight.
    constexpr bool late = pieces == 4;
    constexpr int max_warps = detail::norm_backward_max_threads<centred> / warp_threads;
    using Sums = detail::RowSums<centred, held>;
    SHARED(Sums, warp_sums, [2][max_warps]);

    const int groups = static_cast<int>(blockDim.y), group = static_cast<int>(threadIdx.y);
    const int group_warps = static_cast<int>(blockDim.x) / warp_threads;
    const int first_warp = group * group_warps;
    const int warp = first_warp + static_cast<int>(threadIdx.x) / warp_threads;
    const auto column = [](int p) {
        return (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * pack;
    };

    float gradient[outputs][pieces][pack] = {};  // of the weight and of the bias
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
        float row_mean[held], row_rstd[held];
#pragma unroll
        for (int r = 0; r < held; ++r) {
            const std::int64_t row = first + group * held + r, start = row * channels;
            row_mean[r] = centred && row < rows ? mean[row] : 0;
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
        const auto normalized = [&](int r, int p, int i) {
            const float element = to_float(x[r][p][i]);
            return (centred ? element - row_mean[r] : element) * row_rstd[r];
        };

        Sums sums;
#pragma unroll
        for (int r = 0; r < held; ++r) {
            float sum[outputs] = {};
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                if (late && column(p) < weighted_channels) w[p] = load(weight + column(p));
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    const float h = normalized(r, p, i);
                    const float d = to_float(dy[r][p][i]);
                    const float g = d * to_float(w[p][i]);
                    sum[0] += g * h;
                    gradient[0][p][i] += d * h;
                    if constexpr (centred) {
                        sum[1] += g;
                        gradient[1][p][i] += d;
                    }
                }
            }
#pragma unroll
            for (int o = 0; o < outputs; ++o) sums.of[o][r] = sum[o];
        }
        if (!late && !din) continue;
#pragma unroll
        for (int o = 0; o < outputs; ++o) {
#pragma unroll
            for (int r = 0; r < held; ++r) sums.of[o][r] = warp_sum(sums.of[o][r]);
        }
        // Two arrays are used in turn. When a thread is at the next barrier, it has read this one. So no
        // second barrier is needed before this one is written again.
        if (threadIdx.x % warp_threads == 0) warp_sums[turn][warp] = sums;
        __syncthreads();
        sums = {};
        for (int other = 0; other < group_warps; ++other) {
            const Sums of_warp = warp_sums[turn][first_warp + other];
#pragma unroll
            for (int o = 0; o < outputs; ++o) {
#pragma unroll
                for (int r = 0; r < held; ++r) sums.of[o][r] += of_warp.of[o][r];
            }
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
            const float mean_gh = sums.of[0][r] * per_channel;
            const float mean_g = sums.of[outputs - 1][r] * per_channel;  // RMS norm does not use it
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                if (row >= written_rows || column(p) >= channels) continue;
                if (late) {
                    if (column(p) < weighted_channels) w[p] = load(weight + column(p));
                    dx[r][p] = load(din + row * channels + column(p));
                }
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    const float g = to_float(dy[r][p][i]) * to_float(w[p][i]);
                    const float of_row = (centred ? g - mean_g : g) - normalized(r, p, i) * mean_gh;
                    dx[r][p][i] = from_float<X>(to_float(dx[r][p][i]) + row_rstd[r] * of_row);
                }
                store(din + row * channels + column(p), dx[r][p]);
            }
        }
    }

    if (!partials) return;
    const int columns = outputs * channels;
    partials += std::int64_t{blockIdx.x} * columns;
    SharedAllocator shared;
    float* group_partials =
        groups == 1 ? partials : shared.take<float>(static_cast<std::size_t>(groups) * columns);
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        if (column(p) >= channels) continue;
        float* to = group_partials + group * columns + column(p);
#pragma unroll
        for (int i = 0; i < pack; i += Packed<float>::size) {
#pragma unroll
            for (int o = 0; o < outputs; ++o) {
                Packed<float> part;
#pragma unroll
                for (int j = 0; j < Packed<float>::size; ++j) part[j] = gradient[o][p][i + j];
                store(to + o * channels + i, part);
            }
        }
    }
    if (groups == 1) return;
    __syncthreads();
    const int threads = groups * static_cast<int>(blockDim.x);
    for (int c = group * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); c < columns;
         c += threads) {
        float sum = 0;
        for (int i = 0; i < groups; ++i) sum += group_partials[i * columns + c];
        partials[c] = sum;
    }
}

// dweight, dbias += the sums of their partials over the blocks that wrote them; each block has `width` of them. A block
// does 32 columns; its warps share the partials of these. If dbias is null, there are only dweight's columns.
template <int max_warps>
__global__ void __launch_bounds__(max_warps* warp_threads)
    norm_backward_sum_kernel5(float* dweight, float* dbias, const float* partials, int partial_blocks,
                              int width, int channels) {
    SHARED(float, sums, [max_warps][warp_threads]);
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int column = static_cast<int>(blockIdx.x) * warp_threads + lane;
    const int columns = dbias ? 2 * channels : channels;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
        for (int b = warp; b < partial_blocks; b += warps) sum += partials[std::int64_t{b} * width + column];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int w = 1; w < warps; ++w) sum += sums[w][lane];
    (column < channels ? dweight[column] : dbias[column - channels]) += sum;
}

namespace detail {

inline void add_norm_partials(const LaunchContext& on, float* dweight, float* dbias, const float* partials,
                              int partial_blocks, int width, int channels) {
    constexpr int max_warps = 32, partials_a_warp = 8;  // the most loads that a thread has in flight
    const int warps = std::min(max_warps, blocks_for(partial_blocks, partials_a_warp));
    const int columns = dbias ? 2 * channels : channels;
    launch(on, norm_backward_sum_kernel5<max_warps>, static_cast<unsigned>(blocks_for(columns, warp_threads)),
           warps * warp_threads, 0, dweight, dbias, partials, partial_blocks, width, channels);
}

}  // namespace detail

// din, dout, in X (rows, channels); dweight, dbias fp32 (channels); weight X (channels), or null, which counts as ones;
// mean, rstd fp32 (rows). din, dweight and dbias accumulate. The workspace has norm_backward_workspace_bytes. A row has
// at most 24 KiB, or 32 KiB without `centred`. Each of din, dweight and dbias may be null, and is then not written;
// without dweight, or without `centred`, dbias must be null.
template <bool centred, class X>
void norm_backward(const LaunchContext& on, X* din, float* dweight, float* dbias, const X* dout, const X* in,
                   const X* weight, const float* mean, const float* rstd, std::int64_t rows, int channels,
                   void* workspace, int block_threads = detail::norm_backward_max_threads<centred>) {
    // One piece of each thread
    constexpr int row_pieces = detail::norm_backward_max_threads<centred>;
    check(channels % Packed<X>::size == 0, "norm backward: channels are a multiple of 16 bytes");
    check(channels <= 4 * row_pieces * Packed<X>::size,
          "norm backward: a row has at most 24 KiB, that of an RMS norm 32 KiB");
    check(block_threads <= row_pieces, "norm backward: at most norm_backward_max_threads");
    const auto run = [&]<int pieces>() {
        constexpr int held = pieces == 1 ? 2 : 1;
        const int row_threads = blocks_for(channels / Packed<X>::size, pieces * warp_threads) * warp_threads;
        const int groups = std::max(1, block_threads / row_threads);
        const int blocks = static_cast<int>(
            std::min<std::int64_t>(detail::norm_backward_blocks_per_multiprocessor * on.chip.multiprocessors,
                                   blocks_for<std::int64_t>(rows, held * groups)));
        const int width = detail::norm_sums<centred> * channels;
        const std::size_t shared_bytes =
            groups == 1 || !dweight ? 0
                                    : SharedAllocator::bytes<float>(static_cast<std::size_t>(groups) * width);
        auto* const partials = dweight ? static_cast<float*>(workspace) : nullptr;
        launch(on, norm_backward_kernel5<X, centred, pieces>, static_cast<unsigned>(blocks),
               dim3(static_cast<unsigned>(row_threads), static_cast<unsigned>(groups)), shared_bytes, din,
               partials, dout, in, weight, mean, rstd, rows, channels);
        if (dweight && blocks > 0)
            detail::add_norm_partials(on, dweight, dbias, partials, blocks, width, channels);
    };
    const int pieces = blocks_for(channels / Packed<X>::size, row_pieces);
    if (pieces == 1) return run.template operator()<1>();
    if (pieces == 2) return run.template operator()<2>();
    run.template operator()<4>();
}

}  // namespace llmc::cuda
