// Operands of products in 8 bits (fp8.h): their greatest magnitude, and bytes for cuBLASLt, which reads both factors
// along the dimension of the sums. So the backward pass needs transposed copies.
//
// Both are limited by memory: the greatest magnitude reads 2 bytes an element; a copy reads 2 and writes 1, two copies
// of one tensor read 2 and write 2.
#pragma once

#include <cuda_fp8.h>

#include "llmc/device/cuda/elementwise.cuh"
#include "llmc/device/fp8.h"

namespace llmc::cuda {

// The bits of magnitudes are ordered like the magnitudes, and those of NaN come last. `out` holds those of an fp32.
template <class X>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    amax_kernel(std::uint32_t* out, const X* x, std::int64_t packs, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    static_assert(std::is_same_v<X, bf16>, "pairs of 16 bits that are the upper halves of fp32");
    constexpr std::uint32_t magnitude = 0x7fffffffu;
    const IntegerMaximum greater;
    std::uint32_t greatest = 0;
    for_grid<4>(
        packs, [=](std::int64_t i) { return to_bits(load_streaming(x + pack * i)); },
        [&](std::int64_t, const uint4& bits) {
            for (const std::uint32_t pair : {bits.x, bits.y, bits.z, bits.w})
                greatest = greater(greatest, greater(pair & magnitude & 0xffff0000u, pair << 16 & magnitude));
        });
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads())
        greatest = greater(greatest, __float_as_uint(to_float(x[i])) & magnitude);
    greatest = block_reduce(greatest, greater);
    if (threadIdx.x == 0) atomicMax(out, greatest);
}

// x times 2^exponent, rounded to nearest, ties to even; beyond the format's largest number that number. Infinities and
// NaN are NaN, which cuda_fp8.h would make the largest number.
template <Fp8 format>
__device__ __forceinline__ std::uint32_t to_fp8(bf16 x, float scale) {
    constexpr auto as = format == Fp8::e4m3 ? __NV_E4M3 : __NV_E5M2;
    constexpr std::uint32_t nan = 0x7f, infinity = 0x7f800000u;
    const float number = to_float(x);
    if ((__float_as_uint(number) & infinity) == infinity) return nan;
    return __nv_cvt_float_to_fp8(number * scale, __NV_SATFINITE, as);
}

// Four elements as bytes; the first is the lowest.
template <Fp8 format>
__device__ __forceinline__ std::uint32_t four_to_fp8(const Quad<bf16>& x, float scale) {
    std::uint32_t bytes = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) bytes |= to_fp8<format>(x[e], scale) << 8 * e;
    return bytes;
}

// The scale, from the greatest magnitude in memory. One thread of the grid stores its inverse.
template <Fp8 format>
__device__ __forceinline__ float fp8_scale_of(const std::uint32_t* amax, float* inverse) {
    const int exponent = fp8_exponent<format>(*amax);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        *inverse = __uint_as_float(bits_of_power(-exponent));
    return __uint_as_float(bits_of_power(exponent));
}

// x has whole quads.
template <Fp8 format>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    quantise_kernel(std::uint8_t* out, float* inverse, const bf16* x, const std::uint32_t* amax,
                    std::int64_t quads) {
    const float scale = fp8_scale_of<format>(amax, inverse);
    for_grid<4>(
        quads, [=](std::int64_t i) { return load_quad_streaming(x + 4 * i); },
        [=](std::int64_t i, const Quad<bf16>& from) {
            reinterpret_cast<std::uint32_t*>(out)[i] = four_to_fp8<format>(from, scale);
        });
}

// A block transposes a tile of 64 x 64 elements. A thread takes 4 x 4 of them, and transposes their bytes in registers,
// so that the tile in shared memory, and what it writes to memory, consist of whole words.
inline constexpr int fp8_tile = 64, fp8_tile_threads = 256;

// `transposed` (columns, rows), and `plain` (rows, columns) unless it is null; rows and columns are multiples of 16.
template <Fp8 format>
__global__ void __launch_bounds__(fp8_tile_threads)
    quantise_transpose_kernel3(std::uint8_t* plain, std::uint8_t* transposed, float* inverse, const bf16* x,
                               const std::uint32_t* amax, std::int64_t rows, std::int64_t columns) {
    constexpr int words = fp8_tile / 4,
                  pitch = words + 1;  // of a transposed row; one more avoids bank conflicts
    SHARED(std::uint32_t, tile, [fp8_tile * pitch]);
    const float scale = fp8_scale_of<format>(amax, inverse);
    const std::int64_t first_column = static_cast<std::int64_t>(blockIdx.x) * fp8_tile;
    const std::int64_t first_row = static_cast<std::int64_t>(blockIdx.y) * fp8_tile;
    const int thread = static_cast<int>(threadIdx.x);

    const int across = thread % words, down = thread / words;
    const std::int64_t row = first_row + 4 * down, column = first_column + 4 * across;
    if (row < rows && column < columns) {
        Quad<bf16> loaded[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) loaded[i] = load_quad_streaming(x + (row + i) * columns + column);
        std::uint32_t by_row[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            by_row[i] = four_to_fp8<format>(loaded[i], scale);
            if (plain != nullptr)
                *reinterpret_cast<std::uint32_t*>(plain + (row + i) * columns + column) = by_row[i];
        }
        // Pairs of columns of two rows, then columns of four.
        const std::uint32_t low01 = __byte_perm(by_row[0], by_row[1], 0x5140);
        const std::uint32_t low23 = __byte_perm(by_row[2], by_row[3], 0x5140);
        const std::uint32_t high01 = __byte_perm(by_row[0], by_row[1], 0x7362);
        const std::uint32_t high23 = __byte_perm(by_row[2], by_row[3], 0x7362);
        std::uint32_t* const to = tile + 4 * across * pitch + down;
        to[0] = __byte_perm(low01, low23, 0x5410);
        to[pitch] = __byte_perm(low01, low23, 0x7632);
        to[2 * pitch] = __byte_perm(high01, high23, 0x5410);
        to[3 * pitch] = __byte_perm(high01, high23, 0x7632);
    }
    __syncthreads();

    const int of_column = thread / 4, quarter = thread % 4;
    if (first_column + of_column >= columns || first_row + 16 * quarter >= rows) return;
    const std::uint32_t* const from = tile + of_column * pitch + 4 * quarter;
    const uint4 bytes = make_uint4(from[0], from[1], from[2], from[3]);
    std::uint8_t* const to = transposed + (first_column + of_column) * rows + first_row + 16 * quarter;
    *reinterpret_cast<uint4*>(to) = bytes;
}

// out = max(out, max_i |x_i|), where NaN counts as the greatest. Whole warps only.
inline void amax(const LaunchContext& on, float* out, const bf16* x, std::int64_t elements) {
    constexpr int block_threads = 256;
    const std::int64_t packs = detail::whole_packs(elements, Packed<bf16>::size, x);
    launch(on, amax_kernel<bf16>, detail::elementwise_blocks(on, packs, elements, block_threads),
           block_threads, 0, reinterpret_cast<std::uint32_t*>(out), x, packs, elements);
}

// x in 8 bits with the scale of `amax`, and one over that scale. `plain` (rows, columns) and `transposed` (columns,
// rows) may be null. Rows and columns are multiples of 16, addresses of 16 bytes.
template <Fp8 format>
void quantise(const LaunchContext& on, std::uint8_t* plain, std::uint8_t* transposed, float* inverse,
              const bf16* x, const float* amax, std::int64_t rows, std::int64_t columns) {
    check(rows % 16 == 0 && columns % 16 == 0,
          fmt::format("a tensor ({}, {}) in 8 bits has multiples of 16", rows, columns));
    const auto* const bits = reinterpret_cast<const std::uint32_t*>(amax);
    if (transposed == nullptr) {
        const std::int64_t quads = rows * columns / 4;
        return launch(on, quantise_kernel<format>,
                      detail::elementwise_blocks(on, quads, rows * columns, fp8_tile_threads),
                      fp8_tile_threads, 0, plain, inverse, x, bits, quads);
    }
    const dim3 tiles(static_cast<unsigned>(blocks_for<std::int64_t>(columns, fp8_tile)),
                     static_cast<unsigned>(blocks_for<std::int64_t>(rows, fp8_tile)));
    launch(on, quantise_transpose_kernel3<format>, tiles, fp8_tile_threads, 0, plain, transposed, inverse, x,
           bits, rows, columns);
}

}  // namespace llmc::cuda
