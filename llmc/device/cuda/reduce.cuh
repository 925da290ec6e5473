// Sums and maxima over a warp and over a block, in an order that depends only on the number of threads.
#pragma once

#include "llmc/device/cuda/kernel.cuh"

namespace llmc::cuda {

inline constexpr unsigned all_lanes = 0xffffffffu;

struct Sum {
    static constexpr float identity = 0;
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Maximum {
    static constexpr float identity = -INFINITY;
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct IntegerMaximum {
    static constexpr std::uint32_t identity = 0;
    __device__ std::uint32_t operator()(std::uint32_t a, std::uint32_t b) const { return a > b ? a : b; }
};

// Reduces over a warp; every lane gets the result.
template <class T, class Operation>
__device__ __forceinline__ T warp_reduce(T x, Operation operation LLMC_SITE) {
#pragma unroll
    for (int distance = warp_threads / 2; distance > 0; distance /= 2) {
        x = operation(x, __shfl_xor_sync(all_lanes, x, distance, warp_threads LLMC_PASS_SITE));
    }
    return x;
}
__device__ __forceinline__ float warp_sum(float x LLMC_SITE) { return warp_reduce(x, Sum() LLMC_PASS_SITE); }
__device__ __forceinline__ float warp_maximum(float x LLMC_SITE) {
    return warp_reduce(x, Maximum() LLMC_PASS_SITE);
}

// Reduces over a block of whole warps; every thread gets the result. It ends with a barrier, so it can be
// called again.
template <class T, class Operation>
__device__ __forceinline__ T block_reduce(T x, Operation operation LLMC_SITE) {
    SHARED(T, partial, [warp_threads]);
    const unsigned warp = threadIdx.x / warp_threads, lane = threadIdx.x % warp_threads;
    x = warp_reduce(x, operation LLMC_PASS_SITE);
    if (lane == 0) partial[warp] = x;
    __syncthreads(LLMC_PASS_ONLY_SITE);
    x = warp_reduce(lane < blockDim.x / warp_threads ? partial[lane] : Operation::identity,
                    operation LLMC_PASS_SITE);
    __syncthreads(LLMC_PASS_ONLY_SITE);
    return x;
}
__device__ __forceinline__ float block_sum(float x LLMC_SITE) {
    return block_reduce(x, Sum() LLMC_PASS_SITE);
}
__device__ __forceinline__ float block_maximum(float x LLMC_SITE) {
    return block_reduce(x, Maximum() LLMC_PASS_SITE);
}

}  // namespace llmc::cuda
