// RMS norm forward, alone and of a sum (ops.h: rmsnorm_forward, fused_residual_rmsnorm_forward).
// dev/layernorm_forward.cu shows how a kernel like this became fast.
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

// A warp does a row. It reads the row once, in 16-byte pieces, sums its squares, and keeps it in shared
// memory until the sum is known. Each lane reads back only what it wrote, so no barrier is needed. With
// `add`, x is in1 + in2, which is also stored in `residual`. That store is streaming, since the next kernel
// reads `out` and not `residual`.
//   A null weight counts as ones.
template <class X, bool add>
__global__ void __launch_bounds__(256, 5)
    rmsnorm_forward_kernel5(X* residual, X* out, float* rstd, const X* in1, const X* in2, const X* weight,
                            float eps, std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size, step = warp_threads * pack;
    // The pieces of a row that a lane loads before it uses the first: four loads in flight.
    constexpr int batch = add ? 2 : 4;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    SharedAllocator shared;
    X* x = shared.take<X>(static_cast<std::size_t>(warps) * channels) + warp * channels;

    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * warps + warp;
    if (row >= rows) return;
    const std::int64_t start = row * channels;

    float squares = 0;
    for (int c = lane * pack; c < channels; c += batch * step) {
        Packed<X> v[batch], w[batch];
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            if (c + k * step >= channels) break;
            v[k] = load_streaming(in1 + start + c + k * step);
            if constexpr (add) w[k] = load_streaming(in2 + start + c + k * step);
        }
#pragma unroll
        for (int k = 0; k < batch; ++k) {
            if (c + k * step >= channels) break;
            if constexpr (add) {
#pragma unroll
                for (int i = 0; i < pack; ++i) v[k][i] = from_float<X>(to_float(v[k][i]) + to_float(w[k][i]));
                store_streaming(residual + start + c + k * step, v[k]);
            }
#pragma unroll
            for (int i = 0; i < pack; ++i) squares += to_float(v[k][i]) * to_float(v[k][i]);
            store(x + c + k * step, v[k]);
        }
    }
    const float row_rstd = rsqrtf(warp_sum(squares) / static_cast<float>(channels) + eps);

    // A branch on the weight would cost registers: the compiler would make two loops.
    const int weighted_channels = weight ? channels : 0;
    for (int c = lane * pack; c < channels; c += step) {
        Packed<X> v = load(x + c), w;
#pragma unroll
        for (int i = 0; i < pack; ++i) w[i] = from_float<X>(1);
        if (c < weighted_channels) w = load(weight + c);
#pragma unroll
        for (int i = 0; i < pack; ++i) v[i] = from_float<X>(to_float(v[i]) * row_rstd * to_float(w[i]));
        store(out + start + c, v);
    }
    if (lane == 0) rstd[row] = row_rstd;
}

namespace detail {

template <class X, bool add>
void launch_rmsnorm_forward(const LaunchContext& on, X* residual, X* out, float* rstd, const X* in1,
                            const X* in2, const X* weight, float eps, std::int64_t rows, int channels,
                            int block_threads) {
    check(channels % Packed<X>::size == 0, "RMS norm: channels are a multiple of 16 bytes");
    check(block_threads >= warp_threads && block_threads <= 256, "RMS norm: a block has 32 to 256 threads");
    // Fewer rows per block if they would not fit its shared memory.
    const std::size_t row_bytes = static_cast<std::size_t>(channels) * sizeof(X);
    check(row_bytes <= on.chip.shared_bytes_per_block, "RMS norm: a row fits into shared memory");
    int warps = block_threads / warp_threads;
    while (SharedAllocator::bytes<std::byte>(warps * row_bytes) > on.chip.shared_bytes_per_block) --warps;
    launch(on, rmsnorm_forward_kernel5<X, add>, static_cast<unsigned>(blocks_for<std::int64_t>(rows, warps)),
           warps * warp_threads, SharedAllocator::bytes<std::byte>(warps * row_bytes), residual, out, rstd,
           in1, in2, weight, eps, rows, channels);
}

}  // namespace detail

// in, out X (rows, channels); rstd fp32 (rows); weight X (channels) or null
template <class X>
void rmsnorm_forward(const LaunchContext& on, X* out, float* rstd, const X* in, const X* weight, float eps,
                     std::int64_t rows, int channels, int block_threads = 128) {
    detail::launch_rmsnorm_forward<X, false>(on, nullptr, out, rstd, in, nullptr, weight, eps, rows, channels,
                                             block_threads);
}

template <class X>
void fused_residual_rmsnorm_forward(const LaunchContext& on, X* residual, X* out, float* rstd, const X* in1,
                                    const X* in2, const X* weight, float eps, std::int64_t rows, int channels,
                                    int block_threads = 128) {
    detail::launch_rmsnorm_forward<X, true>(on, residual, out, rstd, in1, in2, weight, eps, rows, channels,
                                            block_threads);
}

}  // namespace llmc::cuda
