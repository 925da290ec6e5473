// SwiGLU forward and backward (ops.h: swiglu_forward, swiglu_backward).
//
// The logistic function s(a) = 1/(1 + e^-a) is an exponential and a reciprocal. It keeps its relative
// precision if a is far below 0.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/ptx.cuh"

namespace llmc::cuda {

namespace detail {

// A block has blockDim.x threads side by side in a row, and blockDim.y groups of them. Each thread does one
// 16-byte piece of so many rows: its loads are in flight before it uses the first.
inline constexpr int swiglu_rows = 2;
inline constexpr int swiglu_max_threads = 512;

// A thread's place: the first element of its piece in a row, and its first row. Its rows are blockDim.y
// apart.
struct SwigluPlace {
    int column;
    std::int64_t row;
};
__device__ __forceinline__ SwigluPlace swiglu_place(int pack) {
    return {static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * pack,
            (std::int64_t{blockIdx.x} * swiglu_rows) * blockDim.y + threadIdx.y};
}

}  // namespace detail

// If e^-a overflows, the result is 0.
__device__ __forceinline__ float logistic(float a) {
    constexpr float minus_log2_e = -log2_e;
    return reciprocal_approximate(1 + exp2_approximate(a * minus_log2_e));
}

template <class X>
__global__ void __launch_bounds__(detail::swiglu_max_threads)
    swiglu_forward_kernel3(X* out, const X* in, std::int64_t rows, int width) {
    constexpr int pack = Packed<X>::size, n = detail::swiglu_rows;
    const detail::SwigluPlace place = detail::swiglu_place(pack);
    if (place.column >= width) return;
    const std::int64_t step = blockDim.y;
    Packed<X> a[n], b[n];
#pragma unroll
    for (int r = 0; r < n; ++r) {
        const std::int64_t row = place.row + r * step;
        if (row >= rows) break;
        const X* const from = in + row * 2 * width + place.column;
        a[r] = load_streaming(from);
        b[r] = load_streaming(from + width);
    }
#pragma unroll
    for (int r = 0; r < n; ++r) {
        const std::int64_t row = place.row + r * step;
        if (row >= rows) return;
        float y[pack];
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            const float x = to_float(a[r][i]);
            y[i] = x * logistic(x) * to_float(b[r][i]);
        }
        store(out + row * width + place.column, packed_from<X>(y));
    }
}

// din may be in: a thread reads its pieces of both halves before it writes them.
template <class X>
__global__ void __launch_bounds__(detail::swiglu_max_threads)
    swiglu_backward_kernel3(X* din, const X* dout, const X* in, std::int64_t rows, int width) {
    constexpr int pack = Packed<X>::size, n = detail::swiglu_rows;
    const detail::SwigluPlace place = detail::swiglu_place(pack);
    if (place.column >= width) return;
    const std::int64_t step = blockDim.y;
    Packed<X> a[n], b[n], d[n];
#pragma unroll
    for (int r = 0; r < n; ++r) {
        const std::int64_t row = place.row + r * step;
        if (row >= rows) break;
        const X* const from = in + row * 2 * width + place.column;
        a[r] = load_streaming(from);
        b[r] = load_streaming(from + width);
        d[r] = load_streaming(dout + row * width + place.column);
    }
#pragma unroll
    for (int r = 0; r < n; ++r) {
        const std::int64_t row = place.row + r * step;
        if (row >= rows) return;
        float da[pack], db[pack];
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            const float x = to_float(a[r][i]);
            // With z = e^-|a|, s and 1 - s are 1/(1 + z) and z/(1 + z), or the other way round.
            constexpr float minus_log2_e = -log2_e;
            const float z = exp2_approximate(fabsf(x) * minus_log2_e);
            const float large = reciprocal_approximate(1 + z), small = z * large;
            const float s = x < 0 ? small : large, rest = x < 0 ? large : small;
            const float ds = to_float(d[r][i]) * s;
            da[i] = ds * to_float(b[r][i]) * fmaf(x, rest, 1.0f);
            db[i] = ds * x;
        }
        X* const to = din + row * 2 * width + place.column;
        store(to, packed_from<X>(da));
        store(to + width, packed_from<X>(db));
    }
}

namespace detail {

struct SwigluGrid {
    dim3 blocks, threads;
};

// For `rows` rows of `width` pairs (a, b).
template <class X>
SwigluGrid swiglu_grid(std::int64_t rows, int width, int block_threads) {
    check(width % Packed<X>::size == 0, "SwiGLU: half a row is a multiple of 16 bytes");
    check(block_threads >= warp_threads && block_threads <= swiglu_max_threads,
          "SwiGLU: a block has 32 to swiglu_max_threads threads");
    const int pieces = width / Packed<X>::size;
    const int side_by_side = std::min(block_threads, blocks_for(pieces, warp_threads) * warp_threads);
    const int groups = block_threads / side_by_side;
    return {dim3(static_cast<unsigned>(blocks_for<std::int64_t>(rows, swiglu_rows * groups)),
                 static_cast<unsigned>(blocks_for(pieces, side_by_side))),
            dim3(static_cast<unsigned>(side_by_side), static_cast<unsigned>(groups))};
}

}  // namespace detail

// in X (rows, 2 width): a and b; out X (rows, width)
template <class X>
void swiglu_forward(const LaunchContext& on, X* out, const X* in, std::int64_t rows, int width,
                    int block_threads = 256) {
    const detail::SwigluGrid grid = detail::swiglu_grid<X>(rows, width, block_threads);
    launch(on, swiglu_forward_kernel3<X>, grid.blocks, grid.threads, 0, out, in, rows, width);
}

// din, in X (rows, 2 width); dout X (rows, width); din may be in
template <class X>
void swiglu_backward(const LaunchContext& on, X* din, const X* dout, const X* in, std::int64_t rows,
                     int width, int block_threads = 256) {
    const detail::SwigluGrid grid = detail::swiglu_grid<X>(rows, width, block_threads);
    launch(on, swiglu_backward_kernel3<X>, grid.blocks, grid.threads, 0, din, dout, in, rows, width);
}

}  // namespace llmc::cuda
