// The gradient of a bias: the sum of the rows of dout (ops.h: matmul_backward, dbias). The development of
// these kernels is in dev/bias_gradient.cu.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

// Eight lanes read 128 bytes of a row, which is a cache line. A warp reads four rows.
inline constexpr int bias_gradient_lanes = 8;
inline constexpr int bias_gradient_warps = 8;  // per block, by default
// Blocks that a multiprocessor runs at once: 1536 threads, the most of sm_86.
constexpr int bias_gradient_resident(int warps) { return 1536 / (warps * warp_threads); }
template <class X>
inline constexpr int bias_gradient_columns = bias_gradient_lanes* Packed<X>::size;

// Sums columns [64 blockIdx.x, +64) (32 in fp32) over the rows of slice blockIdx.y. Threads with the same
// columns take rows in turn. Their sums are added over the warp, then over the block.
//   partials fp32 (gridDim.y, columns)
template <class X, int warps>
__global__ void __launch_bounds__(warps* warp_threads, bias_gradient_resident(warps))
    bias_gradient_kernel4(float* partials, const X* dout, std::int64_t rows, int columns) {
    constexpr int pack = Packed<X>::size;
    SHARED(float, sums, [warps][bias_gradient_columns<X>]);
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int column_in_block = lane % bias_gradient_lanes * pack;
    const int column = static_cast<int>(blockIdx.x) * bias_gradient_columns<X> + column_in_block;
    constexpr int rows_at_a_time = warp_threads / bias_gradient_lanes * warps;
    const std::int64_t slice = blocks_for<std::int64_t>(rows, gridDim.y);
    const std::int64_t begin = blockIdx.y * slice, end = min(begin + slice, rows);

    float sum[pack] = {};
    if (column < columns) {
#pragma unroll 8
        for (std::int64_t row = begin + static_cast<int>(threadIdx.x) / bias_gradient_lanes; row < end;
             row += rows_at_a_time) {
            const Packed<X> piece = load_streaming(dout + row * columns + column);
#pragma unroll
            for (int i = 0; i < pack; ++i) sum[i] += to_float(piece[i]);
        }
    }
#pragma unroll
    for (int i = 0; i < pack; ++i) {
#pragma unroll
        for (int distance = warp_threads / 2; distance >= bias_gradient_lanes; distance /= 2) {
            sum[i] += __shfl_xor_sync(all_lanes, sum[i], distance);
        }
        if (lane < bias_gradient_lanes) sums[warp][column_in_block + i] = sum[i];
    }
    __syncthreads();

    const int own = static_cast<int>(threadIdx.x);
    const int own_column = static_cast<int>(blockIdx.x) * bias_gradient_columns<X> + own;
    if (own >= bias_gradient_columns<X> || own_column >= columns) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < warps; ++w) total += sums[w][own];
    partials[static_cast<std::int64_t>(blockIdx.y) * columns + own_column] = total;
}

// dbias += the sum of the slices, 32 columns per block. Each of the warps adds every `warps`-th slice; then
// the first warp adds the warps' sums.
template <int warps>
__global__ void __launch_bounds__(warps* warp_threads)
    bias_gradient_total_kernel4(float* dbias, const float* partials, int slices, int columns) {
    SHARED(float, sums, [warps][warp_threads]);
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int column = static_cast<int>(blockIdx.x) * warp_threads + lane;
    float sum = 0;
    if (column < columns) {
#pragma unroll 8
        for (int slice = warp; slice < slices; slice += warps) {
            sum += partials[static_cast<std::int64_t>(slice) * columns + column];
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || column >= columns) return;
    float total = 0;
#pragma unroll
    for (int w = 0; w < warps; ++w) total += sums[w][lane];
    dbias[column] += total;
}

// The number of slices of rows: enough to fill the chip, if each thread still has some rows to add.
template <class X, int warps = bias_gradient_warps>
constexpr int bias_gradient_slices(const Chip& chip, std::int64_t rows, int columns) {
    constexpr std::int64_t least_rows = 4 * warps * warp_threads / bias_gradient_lanes;
    const int blocks = chip.multiprocessors * bias_gradient_resident(warps);
    const std::int64_t fill = std::max(1, blocks / blocks_for(columns, bias_gradient_columns<X>));
    return static_cast<int>(std::min(fill, blocks_for(rows, least_rows)));
}

// Workspace that is enough for any number of columns up to this one. The number of slices is limited by what
// fills the chip and by the number of rows.
template <class X>
constexpr std::size_t bias_gradient_workspace_bytes_up_to(const Chip& chip, std::int64_t rows, int columns) {
    constexpr int warps = bias_gradient_warps, tile = bias_gradient_columns<X>;
    const std::int64_t tiles = blocks_for(columns, tile);
    const std::int64_t slices_of_rows = bias_gradient_slices<X>(chip, rows, 1);
    const std::int64_t filling = chip.multiprocessors * bias_gradient_resident(warps);
    return sizeof(float) * tile *
           static_cast<std::size_t>(std::min(std::max(tiles, filling), slices_of_rows * tiles));
}

template <class X, int warps = bias_gradient_warps>
constexpr std::size_t bias_gradient_workspace_bytes(const Chip& chip, std::int64_t rows, int columns) {
    return sizeof(float) * static_cast<std::size_t>(bias_gradient_slices<X, warps>(chip, rows, columns)) *
           static_cast<std::size_t>(columns);
}

// dbias fp32 (columns) += the sum of dout X (rows, columns)
template <class X, int warps = bias_gradient_warps>
void bias_gradient(const LaunchContext& on, float* dbias, const X* dout, std::int64_t rows, int columns,
                   void* workspace) {
    check(columns % Packed<X>::size == 0, "bias gradient: a row is a multiple of 16 bytes");
    if (rows == 0) return;
    auto* const partials = static_cast<float*>(workspace);
    const int slices = bias_gradient_slices<X, warps>(on.chip, rows, columns);
    const auto tiles = static_cast<unsigned>(blocks_for(columns, bias_gradient_columns<X>));
    launch(on, bias_gradient_kernel4<X, warps>, dim3(tiles, static_cast<unsigned>(slices)),
           warps * warp_threads, 0, partials, dout, rows, columns);
    constexpr int total_warps = 8;
    launch(on, bias_gradient_total_kernel4<total_warps>,
           static_cast<unsigned>(blocks_for(columns, warp_threads)), total_warps * warp_threads, 0, dbias,
           partials, slices, columns);
}

}  // namespace llmc::cuda
