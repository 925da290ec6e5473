// Sums of a gradient's squares over blocks of elements, and sums in fp64 (ops.h: global_norm_squared, sum).
#pragma once

#include <algorithm>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/ops.h"

namespace llmc::cuda {

// A warp sums a block of 1024 elements. Each lane has eight loads of 16 bytes in flight at once (in bf16
// four). No warp waits for another.
template <int elements, class X>
__global__ void __launch_bounds__(1024)
    global_norm_squared_kernel3(float* partials, const X* x, std::int64_t blocks) {
    constexpr int pack = Packed<X>::size, loads = elements / (warp_threads * pack);
    static_assert(elements % (warp_threads * pack) == 0);
    const std::int64_t block =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    if (block >= blocks) return;
    const X* const values = x + block * elements + lane * pack;
    Packed<X> pieces[loads];
#pragma unroll
    for (int i = 0; i < loads; ++i) pieces[i] = load_streaming(values + i * warp_threads * pack);
    float sum = 0;
#pragma unroll
    for (const Packed<X>& piece : pieces) {
#pragma unroll
        for (int i = 0; i < pack; ++i) sum += to_float(piece[i]) * to_float(piece[i]);
    }
    sum = warp_sum(sum);
    if (lane == 0) partials[block] = sum;
}

// partials fp32 (n / norm_block_elements), x X (n)
template <int elements = norm_block_elements, class X>
void global_norm_squared(const LaunchContext& on, float* partials, const X* x, std::int64_t n,
                         int block_threads = 256) {
    check(n % elements == 0, "the norm takes whole blocks of norm_block_elements");
    const std::int64_t blocks = n / elements;
    if (blocks == 0) return;
    launch(on, global_norm_squared_kernel3<elements, X>,
           static_cast<unsigned>(blocks_for<std::int64_t>(blocks, block_threads / warp_threads)),
           block_threads, 0, partials, x, blocks);
}

// ---- sum ----

inline constexpr int sum_threads = 256;

// The sum over a block of sum_threads, valid in thread 0.
__device__ __forceinline__ double block_sum_fp64(double x LLMC_SITE) {
    SHARED(double, sums, [sum_threads]);
    const auto thread = static_cast<int>(threadIdx.x);
    sums[thread] = x;
#pragma unroll 1
    for (int half = sum_threads / 2; half > 0; half /= 2) {
        __syncthreads(LLMC_PASS_ONLY_SITE);
        if (thread < half) sums[thread] += sums[thread + half];
    }
    return sums[thread];
}

// Block p sums part p of the elements. All parts are whole quads of the same size; only the last may be
// shorter. A thread adds quads whatever the address is, so that the order does not depend on it. If x is
// aligned to whole quads, a quad is one load.
template <class X>
__global__ void __launch_bounds__(sum_threads)
    sum_parts_kernel3(double* parts, const X* x, std::int64_t n, std::int64_t part_size) {
    const std::int64_t begin = blockIdx.x * part_size, end = min(begin + part_size, n);
    const bool aligned = reinterpret_cast<std::uintptr_t>(x) % sizeof(Quad<X>) == 0;
    double sum = 0;
#pragma unroll 4
    for (std::int64_t i = begin + 4 * std::int64_t{threadIdx.x}; i < end; i += 4 * sum_threads) {
        Quad<X> quad;
        if (aligned && i + 4 <= end) {
            quad = load_quad(x + i);
        } else {
#pragma unroll
            for (int e = 0; e < 4; ++e) quad[e] = i + e < end ? x[i + e] : X{0};
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) sum += quad[e];
    }
    sum = block_sum_fp64(sum);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// out += the sum of the parts; each thread has at most one part.
template <class X>
__global__ void __launch_bounds__(sum_threads) sum_total_kernel3(X* out, const double* parts, int count) {
    const auto thread = static_cast<int>(threadIdx.x);
    const double sum = block_sum_fp64(thread < count ? parts[thread] : 0.0);
    if (thread == 0) *out += sum;
}

constexpr std::size_t sum_workspace_bytes() { return sum_threads * sizeof(double); }

// out fp64 (1) += the sum of x fp32 (n), in an order that depends only on n.
template <class X>
void sum(const LaunchContext& on, double* out, const X* x, std::int64_t n, void* workspace) {
    if (n == 0) return;
    auto* const parts = static_cast<double*>(workspace);
    // At least a quad per thread.
    const std::int64_t part_size =
        4 * std::max<std::int64_t>(sum_threads, blocks_for<std::int64_t>(n, 4 * sum_threads));
    const auto count = static_cast<int>(blocks_for(n, part_size));
    launch(on, sum_parts_kernel3<X>, static_cast<unsigned>(count), sum_threads, 0, parts, x, n, part_size);
    launch(on, sum_total_kernel3<double>, 1, sum_threads, 0, out, parts, count);
}

}  // namespace llmc::cuda
