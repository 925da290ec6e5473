// GELU forward and backward, in the tanh form of GPT-2 (ops.h: gelu_forward, gelu_backward). The development
// of these kernels is in dev/gelu_forward.cu and dev/gelu_backward.cu.
//
// With w = 2 sqrt(2/pi) (x + 0.044715 x^3), x/2 (1 + tanh(w/2)) = x s, where s = 1/(1 + e^-w) is the logistic
// function. Computed with an exponential and a reciprocal, s keeps its relative precision if w is far below
// 0. The form 1 + tanh(w/2) would lose all precision by cancellation there.
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/ptx.cuh"

namespace llmc::cuda {

namespace detail {

// w = x (linear + cubic x^2), and dw/dx = linear + 3 cubic x^2
inline constexpr double gelu_linear = 2 * 0.79788456080286535588;  // sqrt(2/pi)
inline constexpr double gelu_cubic = gelu_linear * 0.044715;

// Pieces that a thread loads before it uses the first, so that a multiprocessor has 64 KiB in flight.
inline constexpr int gelu_pieces = 2;
inline constexpr int gelu_max_threads = 512;

}  // namespace detail

// If e^-w overflows, s is 0.
__device__ __forceinline__ float gelu(float x) {
    constexpr auto linear = static_cast<float>(-detail::gelu_linear * log2_e);
    constexpr auto cubic = static_cast<float>(-detail::gelu_cubic * log2_e);
    return x * reciprocal_approximate(1 + exp2_approximate(x * fmaf(cubic, x * x, linear)));
}

// GELU'(x) = s + x s (1 - s) dw/dx. With z = e^-|w| <= 1:
//   s = 1/(1 + z) or z/(1 + z),  s (1 - s) = z/(1 + z)^2
__device__ __forceinline__ float gelu_derivative(float x) {
    constexpr auto linear = static_cast<float>(detail::gelu_linear * log2_e);
    constexpr auto cubic = static_cast<float>(detail::gelu_cubic * log2_e);
    constexpr auto slope_linear = static_cast<float>(detail::gelu_linear);
    constexpr auto slope_cubic = static_cast<float>(3 * detail::gelu_cubic);
    // z is 0 for |x| >= 20. The bound keeps it from being multiplied by infinity if x^2 overflows.
    const float x2 = fminf(x * x, 1024.0f);
    const float z = exp2_approximate(-fabsf(x * fmaf(cubic, x2, linear)));
    const float r = reciprocal_approximate(1 + z);
    const float zr = z * r;
    // An infinite x times 0 would be NaN.
    const float bounded = fminf(fmaxf(x, -32.0f), 32.0f);
    return fmaf(bounded * (zr * r), fmaf(slope_cubic, x2, slope_linear), x < 0 ? zr : r);
}

template <class X>
__global__ void __launch_bounds__(detail::gelu_max_threads)
    gelu_forward_kernel3(X* out, const X* in, std::int64_t n) {
    constexpr int pack = Packed<X>::size, pieces = detail::gelu_pieces;
    const std::int64_t first = (std::int64_t{blockIdx.x} * pieces * blockDim.x + threadIdx.x) * pack;
    const std::int64_t step = std::int64_t{blockDim.x} * pack;
    Packed<X> x[pieces];
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        if (first + p * step < n) x[p] = load_streaming(in + first + p * step);
    }
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        if (first + p * step >= n) return;
#pragma unroll
        for (int i = 0; i < pack; ++i) x[p][i] = from_float<X>(gelu(to_float(x[p][i])));
        store(out + first + p * step, x[p]);
    }
}

// din may be dout: a thread reads its pieces of both before it writes them.
template <class X>
__global__ void __launch_bounds__(detail::gelu_max_threads)
    gelu_backward_kernel3(X* din, const X* dout, const X* in, std::int64_t n) {
    constexpr int pack = Packed<X>::size, pieces = detail::gelu_pieces;
    const std::int64_t first = (std::int64_t{blockIdx.x} * pieces * blockDim.x + threadIdx.x) * pack;
    const std::int64_t step = std::int64_t{blockDim.x} * pack;
    Packed<X> x[pieces], d[pieces];
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        if (first + p * step >= n) break;
        x[p] = load_streaming(in + first + p * step);
        d[p] = load_streaming(dout + first + p * step);
    }
#pragma unroll
    for (int p = 0; p < pieces; ++p) {
        if (first + p * step >= n) return;
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            d[p][i] = from_float<X>(to_float(d[p][i]) * gelu_derivative(to_float(x[p][i])));
        }
        store(din + first + p * step, d[p]);
    }
}

namespace detail {

// The number of blocks for n elements of X.
template <class X>
unsigned gelu_blocks(std::int64_t n, int block_threads) {
    check(n % Packed<X>::size == 0, "gelu: the elements are a multiple of 16 bytes");
    check(block_threads <= gelu_max_threads, "gelu: a block has at most gelu_max_threads");
    return static_cast<unsigned>(blocks_for<std::int64_t>(n, gelu_pieces * block_threads * Packed<X>::size));
}

}  // namespace detail

// out, in X (n)
template <class X>
void gelu_forward(const LaunchContext& on, X* out, const X* in, std::int64_t n, int block_threads = 256) {
    launch(on, gelu_forward_kernel3<X>, detail::gelu_blocks<X>(n, block_threads), block_threads, 0, out, in,
           n);
}

// din, dout, in X (n); din may be dout
template <class X>
void gelu_backward(const LaunchContext& on, X* din, const X* dout, const X* in, std::int64_t n,
                   int block_threads = 256) {
    launch(on, gelu_backward_kernel3<X>, detail::gelu_blocks<X>(n, block_threads), block_threads, 0, din,
           dout, in, n);
}

}  // namespace llmc::cuda
