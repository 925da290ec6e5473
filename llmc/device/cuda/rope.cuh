// Rotary positions (ops.h: rope). All heads of a position have the same angles: a thread turns the same piece
// of several heads, with its angles in registers.
#pragma once

#include "llmc/device/cuda/heads.cuh"

namespace llmc::cuda {

namespace detail {

inline constexpr int rope_max_threads = 512;
inline constexpr int rope_held = 4;  // heads that a thread loads before it rotates the first

// Loads and stores of a piece of a head: 16 bytes, or 4 elements.
template <class X>
__device__ __forceinline__ void load_piece(Packed<X>& piece, const X* from LLMC_SITE) {
    piece = load(from LLMC_PASS_SITE);
}
template <class X>
__device__ __forceinline__ void store_piece(X* to, const Packed<X>& piece LLMC_SITE) {
    store(to, piece LLMC_PASS_SITE);
}
template <class X>
__device__ __forceinline__ void load_piece(Quad<X>& piece, const X* from LLMC_SITE) {
    piece = load_quad(from LLMC_PASS_SITE);
}
template <class X>
__device__ __forceinline__ void store_piece(X* to, const Quad<X>& piece LLMC_SITE) {
    store_quad(to, piece LLMC_PASS_SITE);
}

// A call's sizes. A row has `groups` times `pieces` threads.
struct RopeShape {
    unsigned threads;   // in all rows
    unsigned sequence;  // rows after which positions begin again
    std::int64_t position;
    int heads, half;  // half: half of a head's elements
    unsigned groups;  // A thread of group g has heads g, g + groups, ...
    unsigned pieces;  // in half a head
};

// A thread has the same piece of several heads of a row. It keeps that piece's angles, which are twice to
// four times as many bytes as the elements that they rotate.
template <class X, class Piece>
__device__ __forceinline__ void rotate_heads(HeadPlaces<X> x, const float* angles, const RopeShape& shape,
                                             float sign) {
    constexpr int width = sizeof(Piece) / sizeof(X);
    const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (thread >= shape.threads) return;
    const int i = static_cast<int>(thread % shape.pieces) * width;
    const unsigned group = thread / shape.pieces % shape.groups;
    const unsigned row = thread / shape.pieces / shape.groups;
    const float* const own = angles + 2 * ((shape.position + row % shape.sequence) * shape.half + i);

    float cos[width], sin[width];
#pragma unroll
    for (int k = 0; k < width; k += 2) {
        const Packed<float> two = load(own + 2 * k);
        cos[k] = two[0];
        sin[k] = sign * two[1];
        cos[k + 1] = two[2];
        sin[k + 1] = sign * two[3];
    }
    Piece low[rope_held], high[rope_held];
#pragma unroll
    for (int u = 0; u < rope_held; ++u) {
        const int head = static_cast<int>(group + u * shape.groups);
        if (head >= shape.heads) break;
        load_piece(low[u], x.at(row, head, 2 * shape.half, i));
        load_piece(high[u], x.at(row, head, 2 * shape.half, i + shape.half));
    }
#pragma unroll
    for (int u = 0; u < rope_held; ++u) {
        const int head = static_cast<int>(group + u * shape.groups);
        if (head >= shape.heads) break;
#pragma unroll
        for (int k = 0; k < width; ++k) {
            const float a = to_float(low[u][k]), b = to_float(high[u][k]);
            low[u][k] = from_float<X>(a * cos[k] - b * sin[k]);
            high[u][k] = from_float<X>(b * cos[k] + a * sin[k]);
        }
        store_piece(x.at(row, head, 2 * shape.half, i), low[u]);
        store_piece(x.at(row, head, 2 * shape.half, i + shape.half), high[u]);
    }
}

}  // namespace detail

template <class X>
__global__ void __launch_bounds__(detail::rope_max_threads)
    rope_kernel3(HeadPlaces<X> x, const float* angles, detail::RopeShape shape, float sign) {
    detail::rotate_heads<X, Packed<X>>(x, angles, shape, sign);
}

// For bf16 heads whose halves are not whole pieces of 16 bytes, such as those of 24 elements.
template <class X>
__global__ void __launch_bounds__(detail::rope_max_threads)
    rope_quads_kernel3(HeadPlaces<X> x, const float* angles, detail::RopeShape shape, float sign) {
    detail::rotate_heads<X, Quad<X>>(x, angles, shape, sign);
}

// x X (rows, stride) in place, angles fp32 (positions, size/2, 2). The position of row n is position + n
// modulo `sequence`. The size is a multiple of 8.
template <class X>
void rope(const LaunchContext& on, HeadPlaces<X> x, const float* angles, std::int64_t rows,
          std::int64_t sequence, int heads, int size, std::int64_t position, bool inverse,
          int block_threads = 256) {
    check(size % 8 == 0 && has_whole_packs(x, size), "rope: heads are multiples of 8, in pieces of 16 bytes");
    check(reinterpret_cast<std::uintptr_t>(angles) % 16 == 0, "rope: angles begin at a multiple of 16 bytes");
    check(block_threads <= detail::rope_max_threads, "rope: a block has at most rope_max_threads");
    count_heads(rows, heads);
    const int half = size / 2;
    const bool whole = half % Packed<X>::size == 0;
    const auto groups = static_cast<unsigned>(blocks_for(heads, detail::rope_held));
    const auto pieces = static_cast<unsigned>(half / (whole ? Packed<X>::size : 4));
    const std::int64_t threads = rows * groups * pieces;
    check(threads < std::int64_t{1} << 31, "rope: a call has less than 2^31 threads");
    const detail::RopeShape shape{static_cast<unsigned>(threads),
                                  static_cast<unsigned>(sequence),
                                  position,
                                  heads,
                                  half,
                                  groups,
                                  pieces};
    const auto run = [&](auto kernel) {
        launch(on, kernel, static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_threads)),
               block_threads, 0, x, angles, shape, inverse ? -1.0f : 1.0f);
    };
    if constexpr (Packed<X>::size > 4) {
        if (!whole) return run(rope_quads_kernel3<X>);
    }
    run(rope_kernel3<X>);
}

}  // namespace llmc::cuda
