// The gradient of a bias: the sum of the rows of dout (ops.h: matmul_backward, dbias). Few columns
// make few blocks, so the rows are divided into slices. A second kernel adds the sums of the slices in order.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

// Sums columns [64 blockIdx.x, +64) (32 in fp32) over the rows of slice blockIdx.y. Threads with the same
// columns take rows in turn. Their sums are added over the warp, then over the block.
//   partials fp32 (gridDim.y, columns)
template <class X>
__global__ void __launch_bounds__(bias_gradient_threads, bias_gradient_resident)
    bias_gradient_kernel4(float* partials, const X* dout, std::int64_t rows, int columns) {
    constexpr int pack = Packed<X>::size, warps = bias_gradient_threads / warp_threads;
    SHARED(float, sums, [warps][bias_gradient_columns<X>]);
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int column_in_block = lane % bias_gradient_lanes * pack;
    const int column = static_cast<int>(blockIdx.x) * bias_gradient_columns<X> + column_in_block;
    constexpr int rows_at_a_time = bias_gradient_threads / bias_gradient_lanes;
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
template <int threads>
__global__ void __launch_bounds__(threads)
    bias_gradient_total_kernel4(float* dbias, const float* partials, int slices, int columns) {
    constexpr int warps = threads / warp_threads;
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

// dbias fp32 (columns) += the sum of dout X (rows, columns)
template <class X>
void bias_gradient(const LaunchContext& on, float* dbias, const X* dout, std::int64_t rows, int columns,
                   void* workspace) {
    check(columns % Packed<X>::size == 0, "bias gradient: a row is a multiple of 16 bytes");
    if (rows == 0) return;
    auto* const partials = static_cast<float*>(workspace);
    const int slices = bias_gradient_slices<X>(on.chip, rows, columns);
    const auto tiles = static_cast<unsigned>(blocks_for(columns, bias_gradient_columns<X>));
    launch(on, bias_gradient_kernel4<X>, dim3(tiles, static_cast<unsigned>(slices)), bias_gradient_threads, 0,
           partials, dout, rows, columns);
    launch(on, bias_gradient_total_kernel4<bias_gradient_threads>,
           static_cast<unsigned>(blocks_for(columns, warp_threads)), bias_gradient_threads, 0, dbias,
           partials, slices, columns);
}

}  // namespace llmc::cuda
