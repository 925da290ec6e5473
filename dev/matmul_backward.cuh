// The gradients of a matrix product: the best variant of dev/matmul_backward.cu. Both are products whose second
// operand is row-major in (depth, columns): din = dout weight, and dweight = dout^T in. The latter reads its first
// operand transposed. As for matmul.cuh, the trainer's are cuBLASLt's.
#pragma once

#include "llmc/device/cuda/packed.cuh"

namespace llmc::cuda {

// out (rows, columns) from a (rows, depth) times b X (depth, columns). If `transposed`, a is stored as
// (depth, rows). The rows in memory are multiples of 16 bytes.
//   din X = a b;  dweight fp32 += a b
template <class X, bool transposed>
struct MatmulBackward {
    static constexpr bool accumulates = transposed;
    std::conditional_t<accumulates, float, X>* out;
    const X* a;
    const X* b;
    std::int64_t rows;
    int columns;
    std::int64_t depth;

    // Stores an element, given its sum.
    __device__ __forceinline__ void store_sum(std::int64_t row, int column, float sum) const {
        const std::int64_t i = row * columns + column;
        if constexpr (accumulates) {
            out[i] += sum;
        } else {
            out[i] = from_float<X>(sum);
        }
    }
};

namespace detail {

inline constexpr int backward_tile = 64, backward_depth = 16, backward_threads = 256;
inline constexpr int backward_pitch =
    backward_tile + 4;  // a multiple of 16 bytes, but not of the 128 bytes of all banks
using BackwardTile = float[backward_depth][backward_pitch];

// to[k][i] = from[(k0 + k) width + i0 + i], with zeros past the last row (`height`) and column
template <class X>
__device__ __forceinline__ void load_rows(BackwardTile& to, const X* from, std::int64_t k0,
                                          std::int64_t height, std::int64_t i0, std::int64_t width) {
    constexpr int pack = Packed<X>::size, pieces = backward_tile / pack;
    for (int p = static_cast<int>(threadIdx.x); p < backward_depth * pieces; p += backward_threads) {
        const int k = p / pieces, i = p % pieces * pack;
        const bool valid = k0 + k < height && i0 + i < width;
        const Packed<X> v = valid ? load(from + (k0 + k) * width + i0 + i) : from_bits<X>(uint4{});
#pragma unroll
        for (int e = 0; e < pack; ++e) to[k][i + e] = to_float(v[e]);
    }
}

// The same for the transpose: to[k][i] = from[(i0 + i) width + k0 + k]
template <class X>
__device__ __forceinline__ void load_columns(BackwardTile& to, const X* from, std::int64_t k0,
                                             std::int64_t width, std::int64_t i0, std::int64_t height) {
    constexpr int pack = Packed<X>::size, pieces = backward_depth / pack;
    for (int p = static_cast<int>(threadIdx.x); p < backward_tile * pieces; p += backward_threads) {
        const int i = p / pieces, k = p % pieces * pack;
        const bool valid = i0 + i < height && k0 + k < width;
        const Packed<X> v = valid ? load(from + (i0 + i) * width + k0 + k) : from_bits<X>(uint4{});
#pragma unroll
        for (int e = 0; e < pack; ++e) to[k + e][i] = to_float(v[e]);
    }
}

}  // namespace detail

// A block computes 64x64 sums in fp32, a thread 4x4 of them. It goes over tiles of 16 of the depth, in
// increasing order.
template <class X, bool transposed>
__global__ void __launch_bounds__(detail::backward_threads, 2)
    matmul_backward_kernel2(MatmulBackward<X, transposed> product) {
    using namespace detail;
    SHARED(float, a, [backward_depth][backward_pitch]);
    SHARED(float, b, [backward_depth][backward_pitch]);
    const std::int64_t first_row = std::int64_t{blockIdx.y} * backward_tile;
    const int first_column = static_cast<int>(blockIdx.x) * backward_tile;
    const int y = static_cast<int>(threadIdx.x) / 16 * 4, x = static_cast<int>(threadIdx.x) % 16 * 4;

    float sums[4][4] = {};
    for (std::int64_t k0 = 0; k0 < product.depth; k0 += backward_depth) {
        if constexpr (transposed) {
            load_rows(a, product.a, k0, product.depth, first_row, product.rows);
        } else {
            load_columns(a, product.a, k0, product.depth, first_row, product.rows);
        }
        load_rows(b, product.b, k0, product.depth, first_column, product.columns);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < backward_depth; ++k) {
            const Packed<float> of_rows = load(&a[k][y]), of_columns = load(&b[k][x]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += of_rows[i] * of_columns[j];
            }
        }
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (first_row + y + i < product.rows && first_column + x + j < product.columns) {
                product.store_sum(first_row + y + i, first_column + x + j, sums[i][j]);
            }
        }
    }
}

template <class X, bool transposed>
void launch_matmul_backward(const LaunchContext& on, const MatmulBackward<X, transposed>& product) {
    const std::int64_t down = blocks_for<std::int64_t>(product.rows, detail::backward_tile);
    check(down <= 65535, "matmul backward: at most 65535 tiles of rows");
    launch(on, matmul_backward_kernel2<X, transposed>,
           dim3(static_cast<unsigned>(blocks_for(product.columns, detail::backward_tile)),
                static_cast<unsigned>(down)),
           detail::backward_threads, 0, product);
}

// din X (rows, IC), dweight fp32 (OC,IC), dout X (rows, OC), in X (rows, IC), weight X (OC,IC). The channels are
// multiples of 16 bytes.
template <class X>
void matmul_backward(const LaunchContext& on, X* din, float* dweight, const X* dout, const X* in,
                     const X* weight, std::int64_t rows, int out_channels, int in_channels) {
    check(in_channels % Packed<X>::size == 0 && out_channels % Packed<X>::size == 0,
          "matmul backward: channels are a multiple of 16 bytes");
    launch_matmul_backward<X, true>(on, {dweight, dout, in, out_channels, in_channels, rows});
    launch_matmul_backward<X, false>(on, {din, dout, weight, rows, in_channels, out_channels});
}

}  // namespace llmc::cuda
