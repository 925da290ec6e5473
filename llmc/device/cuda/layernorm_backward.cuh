// Layernorm backward (ops.h: layernorm_backward). The development of these kernels is in
// dev/layernorm_backward.cu.
//
// There are two kernels. The first has a grid of few blocks, each of which goes over many rows. It writes
// din, and each block's contribution to dgamma and dbeta to the workspace. The second sums these
// contributions over the blocks. The order of all sums depends only on the shape and the number of
// multiprocessors. Computing din alone, dgamma alone, or dgamma and dbeta uses the same instructions, and so
// gives the same bits as computing all three.
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

namespace detail {

inline constexpr int layernorm_backward_max_threads = 384;

// A warp's contribution to the sums of `rows` rows.
template <int rows>
struct alignas(2 * rows * sizeof(float)) RowSums {
    float g[rows], gh[rows];
};

}  // namespace detail

// A group of blockDim.x threads does a row. Each thread has the same columns of every row: `pieces` of 16
// bytes, blockDim.x pieces apart. Its part of dgamma and dbeta thus stays in registers from the first row to
// the last.
//
// A thread has the loads of `held` rows in flight at once; the sums of these rows share one barrier. The
// blockDim.y groups of a block take rows in turn. At the end, their contributions are added.
//   din null: it is not computed, and gamma is not read
//   partials fp32 (gridDim.x, 2, channels): each block's dgamma and dbeta; null: they are not stored
template <class X, int pieces>
__global__ void __launch_bounds__(detail::layernorm_backward_max_threads, pieces == 1 ? 2 : 1)
    layernorm_backward_kernel5(X* din, float* partials, const X* dout, const X* in, const X* gamma,
                               const float* mean, const float* rstd, std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size;
    constexpr int held = pieces == 1 ? 2 : 1;
    // With four pieces, registers do not suffice to load din with the others, or to keep gamma.
    constexpr bool late = pieces == 4;
    constexpr int max_warps = detail::layernorm_backward_max_threads / warp_threads;
    SHARED(detail::RowSums<held>, warp_sums, [2][max_warps]);

    const int groups = static_cast<int>(blockDim.y), group = static_cast<int>(threadIdx.y);
    const int group_warps = static_cast<int>(blockDim.x) / warp_threads;
    const int first_warp = group * group_warps;
    const int warp = first_warp + static_cast<int>(threadIdx.x) / warp_threads;
    const auto column = [](int p) {
        return (p * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * pack;
    };

    float dgamma[pieces][pack] = {}, dbeta[pieces][pack] = {};
    Packed<X> weight[pieces];
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        weight[p] = from_bits<X>({});
        if (!late && din && column(p) < channels) weight[p] = load(gamma + column(p));
    }

    const float per_channel = 1 / static_cast<float>(channels);
    // A branch on din would cost registers, which are short here: the compiler would make two loops.
    const std::int64_t written_rows = din ? rows : 0;
    const std::int64_t block_rows = std::int64_t{held} * groups;
    int turn = 0;
    for (std::int64_t first = blockIdx.x * block_rows; first < rows; first += gridDim.x * block_rows) {
        // Beyond the last row or column there are zeros, which add nothing to any sum.
        Packed<X> x[held][pieces], dy[held][pieces], dx[held][pieces];
        float row_mean[held], row_rstd[held];
#pragma unroll
        for (int r = 0; r < held; ++r) {
            const std::int64_t row = first + group * held + r, start = row * channels;
            row_mean[r] = row < rows ? mean[row] : 0;
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

        detail::RowSums<held> sums;
#pragma unroll
        for (int r = 0; r < held; ++r) {
            float sum_g = 0, sum_gh = 0;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                if (late && column(p) < channels) weight[p] = load(gamma + column(p));
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    const float h = (to_float(x[r][p][i]) - row_mean[r]) * row_rstd[r];
                    const float d = to_float(dy[r][p][i]);
                    const float g = d * to_float(weight[p][i]);
                    sum_g += g;
                    sum_gh += g * h;
                    dgamma[p][i] += d * h;
                    dbeta[p][i] += d;
                }
            }
            sums.g[r] = sum_g;
            sums.gh[r] = sum_gh;
        }
        if (!late && !din) continue;
#pragma unroll
        for (int r = 0; r < held; ++r) {
            sums.g[r] = warp_sum(sums.g[r]);
            sums.gh[r] = warp_sum(sums.gh[r]);
        }
        // Two arrays are used in turn. When a thread is at the next barrier, it has read this one. So no
        // second barrier is needed before this one is written again.
        if (threadIdx.x % warp_threads == 0) warp_sums[turn][warp] = sums;
        __syncthreads();
        sums = {};
        for (int w = 0; w < group_warps; ++w) {
            const detail::RowSums<held> of_warp = warp_sums[turn][first_warp + w];
#pragma unroll
            for (int r = 0; r < held; ++r) {
                sums.g[r] += of_warp.g[r];
                sums.gh[r] += of_warp.gh[r];
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
                forget_conversions(weight[p]);
            }
        }
#pragma unroll
        for (int r = 0; r < held; ++r) {
            const std::int64_t row = first + group * held + r;
            const float mean_g = sums.g[r] * per_channel;
            const float mean_gh = sums.gh[r] * per_channel;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                if (row >= written_rows || column(p) >= channels) continue;
                if (late) {
                    weight[p] = load(gamma + column(p));
                    dx[r][p] = load(din + row * channels + column(p));
                }
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    const float h = (to_float(x[r][p][i]) - row_mean[r]) * row_rstd[r];
                    const float g = to_float(dy[r][p][i]) * to_float(weight[p][i]);
                    dx[r][p][i] =
                        from_float<X>(to_float(dx[r][p][i]) + row_rstd[r] * (g - mean_g - h * mean_gh));
                }
                store(din + row * channels + column(p), dx[r][p]);
            }
        }
    }

    if (!partials) return;
    partials += std::int64_t{blockIdx.x} * 2 * channels;
    SharedAllocator shared;
    float* group_partials =
        groups == 1 ? partials : shared.take<float>(static_cast<std::size_t>(groups) * 2 * channels);
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        if (column(p) >= channels) continue;
        float* to = group_partials + group * 2 * channels + column(p);
#pragma unroll
        for (int i = 0; i < pack; i += Packed<float>::size) {
            Packed<float> of_gamma, of_beta;
#pragma unroll
            for (int j = 0; j < Packed<float>::size; ++j) {
                of_gamma[j] = dgamma[p][i + j];
                of_beta[j] = dbeta[p][i + j];
            }
            store(to + i, of_gamma);
            store(to + channels + i, of_beta);
        }
    }
    if (groups == 1) return;
    __syncthreads();
    const int threads = groups * static_cast<int>(blockDim.x);
    for (int c = group * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x); c < 2 * channels;
         c += threads) {
        float sum = 0;
        for (int i = 0; i < groups; ++i) sum += group_partials[i * 2 * channels + c];
        partials[c] = sum;
    }
}

// dgamma, dbeta += the sums of their partials over the blocks that wrote them. A block does 32 columns; its
// warps share the partials of these. If dbeta is null, there are only dgamma's columns.
template <int max_warps>
__global__ void __launch_bounds__(max_warps* warp_threads)
    layernorm_backward_sum_kernel5(float* dgamma, float* dbeta, const float* partials, int partial_blocks,
                                   int channels) {
    SHARED(float, sums, [max_warps][warp_threads]);
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int column = static_cast<int>(blockIdx.x) * warp_threads + lane;
    const int columns = dbeta ? 2 * channels : channels;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
        for (int b = warp; b < partial_blocks; b += warps) {
            sum += partials[std::int64_t{b} * 2 * channels + column];
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns) return;
    for (int w = 1; w < warps; ++w) sum += sums[w][lane];
    (column < channels ? dgamma[column] : dbeta[column - channels]) += sum;
}

namespace detail {

inline void add_layernorm_partials(const LaunchContext& on, float* dgamma, float* dbeta,
                                   const float* partials, int partial_blocks, int channels) {
    constexpr int max_warps = 32, partials_a_warp = 8;  // the most loads that a thread has in flight
    const int warps = std::min(max_warps, blocks_for(partial_blocks, partials_a_warp));
    const int columns = dbeta ? 2 * channels : channels;
    launch(on, layernorm_backward_sum_kernel5<max_warps>,
           static_cast<unsigned>(blocks_for(columns, warp_threads)), warps * warp_threads, 0, dgamma, dbeta,
           partials, partial_blocks, channels);
}

template <class X, int pieces>
void launch_layernorm_backward(const LaunchContext& on, X* din, float* dgamma, float* dbeta, const X* dout,
                               const X* in, const X* gamma, const float* mean, const float* rstd,
                               std::int64_t rows, int channels, float* partials, int block_threads) {
    constexpr int held = pieces == 1 ? 2 : 1;
    const int row_threads = blocks_for(channels / Packed<X>::size, pieces * warp_threads) * warp_threads;
    const int groups = std::max(1, block_threads / row_threads);
    const int blocks = static_cast<int>(
        std::min<std::int64_t>(layernorm_backward_blocks_per_multiprocessor * on.chip.multiprocessors,
                               blocks_for<std::int64_t>(rows, held * groups)));
    const std::size_t shared_bytes =
        groups == 1 || !dgamma
            ? 0
            : SharedAllocator::bytes<float>(static_cast<std::size_t>(groups) * 2 * channels);
    launch(on, layernorm_backward_kernel5<X, pieces>, static_cast<unsigned>(blocks),
           dim3(static_cast<unsigned>(row_threads), static_cast<unsigned>(groups)), shared_bytes, din,
           dgamma ? partials : nullptr, dout, in, gamma, mean, rstd, rows, channels);
    if (dgamma) add_layernorm_partials(on, dgamma, dbeta, partials, blocks, channels);
}

}  // namespace detail

// din, dout, in X (rows, channels); dgamma, dbeta fp32 (channels); gamma X (channels); mean, rstd fp32
// (rows). din, dgamma and dbeta accumulate. The workspace has layernorm_backward_workspace_bytes. A row has
// at most 24 KiB. Each of din, dgamma and dbeta may be null, and is then not written; without dgamma, dbeta
// must be null too.
template <class X>
void layernorm_backward(const LaunchContext& on, X* din, float* dgamma, float* dbeta, const X* dout,
                        const X* in, const X* gamma, const float* mean, const float* rstd, std::int64_t rows,
                        int channels, void* workspace, int block_threads = 384) {
    constexpr int row_pieces = detail::layernorm_backward_max_threads;  // if a thread has one piece
    check(channels % Packed<X>::size == 0, "layernorm backward: channels are a multiple of 16 bytes");
    check(channels <= 4 * row_pieces * Packed<X>::size, "layernorm backward: a row has at most 24 KiB");
    check(block_threads <= detail::layernorm_backward_max_threads,
          "layernorm backward: at most layernorm_backward_max_threads");
    const auto run = [&](auto kernel_launcher) {
        kernel_launcher(on, din, dgamma, dbeta, dout, in, gamma, mean, rstd, rows, channels,
                        static_cast<float*>(workspace), block_threads);
    };
    const int pieces = blocks_for(channels / Packed<X>::size, row_pieces);
    if (pieces == 1) return run(detail::launch_layernorm_backward<X, 1>);
    if (pieces == 2) return run(detail::launch_layernorm_backward<X, 2>);
    return run(detail::launch_layernorm_backward<X, 4>);
}

}  // namespace llmc::cuda
