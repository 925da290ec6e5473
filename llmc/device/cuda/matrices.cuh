// What Muon's iteration needs beside products (ops.h: copy_matrix, combine), and its momentum (ops.h: momentum).
//
// All are limited by memory. A matrix that lies in wider rows, or is transposed, goes through a tile in shared memory,
// so that reads and writes are of whole rows; its numbers are moved one by one.
#pragma once

#include "llmc/device/cuda/elementwise.cuh"
#include "llmc/device/cuda/update.cuh"
#include "llmc/optim/muon.h"

namespace llmc::cuda {

inline constexpr int matrix_tile = 32, matrix_tile_rows = 8;

// A block of 32 x 8 threads copies a tile of 32 x 32 numbers.
template <class X, bool transposed>
__global__ void __launch_bounds__(matrix_tile* matrix_tile_rows)
    copy_matrix_kernel1(X* out, const X* in, std::int64_t rows, std::int64_t columns, std::int64_t out_stride,
                        std::int64_t in_stride) {
    SHARED(X, tile, [matrix_tile][matrix_tile + 1]);  // one more avoids bank conflicts
    const int across = static_cast<int>(threadIdx.x) % matrix_tile,
              down = static_cast<int>(threadIdx.x) / matrix_tile;
    const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * matrix_tile;
    for (std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * matrix_tile; first_row < rows;
         first_row += static_cast<std::int64_t>(gridDim.y) * matrix_tile) {
        for (int i = down; i < matrix_tile; i += matrix_tile_rows) {
            const std::int64_t row = first_row + i, column = first_column + across;
            if (row >= rows || column >= columns) continue;
            const X x = in[row * in_stride + column];
            if constexpr (transposed) {
                tile[i][across] = x;
            } else {
                out[row * out_stride + column] = x;
            }
        }
        if constexpr (transposed) {
            __syncthreads();
            for (int i = down; i < matrix_tile; i += matrix_tile_rows) {
                const std::int64_t row = first_row + across, column = first_column + i;
                if (row < rows && column < columns) out[column * out_stride + row] = tile[across][i];
            }
            __syncthreads();
        }
    }
}

// x and y may be out: an element is read and written by one thread. Without `norm_squared` in device memory, s is 1.
template <class X, bool has_y>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    combine_kernel1(X* out, const X* x, const X* y, float a, float b, const double* norm_squared,
                    std::int64_t packs, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const float s = norm_squared != nullptr ? inverse_norm(*norm_squared) : 1.0f;
    struct Operands {
        Packed<X> x, y;
    };
    for_grid<2>(
        packs,
        [=](std::int64_t i) {
            Operands of;
            of.x = load_streaming(x + pack * i);
            if constexpr (has_y) of.y = load_streaming(y + pack * i);
            return of;
        },
        [=](std::int64_t i, const Operands& of) {
            Packed<X> sum;
#pragma unroll
            for (int e = 0; e < pack; ++e)
                sum[e] =
                    from_float<X>(combined(a, to_float(of.x[e]), b, has_y ? to_float(of.y[e]) : 0.0f, s));
            store(out + pack * i, sum);
        });
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads())
        out[i] = from_float<X>(combined(a, to_float(x[i]), b, has_y ? to_float(y[i]) : 0.0f, s));
}

template <class X, class State, class Gradient>
__global__ void __launch_bounds__(256, 3)
    momentum_kernel1(X* out, State* state, const Gradient* gradients, const double* norm_squared,
                     StepNumbers<MuonMomentum> numbers, UpdateSegments segments,
                     StochasticRounding rounding) {
    const double squared = *norm_squared;
    if (!std::isfinite(squared)) return;
    SHARED(float, clip_of_block, [1]);
    if (threadIdx.x == 0) clip_of_block[0] = numbers.clip(squared);
    __syncthreads();
    const float clip = clip_of_block[0];
    const std::int64_t quads = segments.segments[segments.count - 1].end / 4;
    int segment = 0;
    for (std::int64_t quad = grid_thread(); quad < quads; quad += grid_threads()) {
        const std::int64_t at = 4 * quad;
        while (segment < segments.count && at >= segments.segments[segment].end) ++segment;
        if (at < segments.segments[segment].begin) continue;
        float m[4], u[4];
        widen(m, load_quad_streaming(state + at));
        const Quad<Gradient> g = load_quad_streaming(gradients + at);
#pragma unroll
        for (int e = 0; e < 4; ++e) u[e] = numbers.formula.update(clip * to_float(g[e]), m[e]);
        store_quad_streaming(state + at, rounded<State, !std::is_same_v<State, float>>(
                                             m, rounding, numbers.step, at, Rounded::first_state));
        store_quad(out + at, rounded<X, false>(u, rounding, numbers.step, at, Rounded::weight));
    }
}

template <class X>
void copy_matrix(const LaunchContext& on, X* out, const X* in, std::int64_t rows, std::int64_t columns,
                 std::int64_t out_stride, std::int64_t in_stride, bool transposed) {
    constexpr std::int64_t most_rows = 65535;  // of a grid
    const dim3 grid(static_cast<unsigned>(blocks_for<std::int64_t>(columns, matrix_tile)),
                    static_cast<unsigned>(std::min(most_rows, blocks_for<std::int64_t>(rows, matrix_tile))));
    const auto kernel = transposed ? copy_matrix_kernel1<X, true> : copy_matrix_kernel1<X, false>;
    launch(on, kernel, grid, matrix_tile * matrix_tile_rows, 0, out, in, rows, columns, out_stride,
           in_stride);
}

template <class X>
void combine(const LaunchContext& on, X* out, const X* x, const X* y, float a, float b,
             const double* norm_squared, std::int64_t elements) {
    constexpr int block_threads = 256;
    const std::int64_t packs = y != nullptr ? detail::whole_packs(elements, Packed<X>::size, out, x, y)
                                            : detail::whole_packs(elements, Packed<X>::size, out, x);
    const auto kernel = y != nullptr ? combine_kernel1<X, true> : combine_kernel1<X, false>;
    launch(on, kernel, detail::elementwise_blocks(on, packs, elements, block_threads), block_threads, 0, out,
           x, y, a, b, norm_squared, packs, elements);
}

template <class X, class State, class Gradient>
void momentum(const LaunchContext& on, X* out, State* state, const Gradient* gradients,
              const double* norm_squared, const UpdateStep& step, std::span<const UpdateSegment> segments,
              const std::optional<StochasticRounding>& rounding) {
    constexpr int block_threads = 256;
    const UpdateSegments all = update_segments(segments);
    if (segments.empty() || segments.back().end == 0) return;
    const unsigned blocks = streaming_blocks(on.chip, segments.back().end / 4, block_threads, 256 * 3);
    launch(on, momentum_kernel1<X, State, Gradient>, blocks, block_threads, 0, out, state, gradients,
           norm_squared, StepNumbers<MuonMomentum>::of(step), all, rounding.value_or(StochasticRounding{}));
}

}  // namespace llmc::cuda
