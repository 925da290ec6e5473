// Layernorm and RMS norm forward, alone and of a sum (ops.h: layernorm_forward, rmsnorm_forward, and
// fused_residual_ of both). The development of this kernel is in dev/layernorm_forward.cu.
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

inline constexpr float layernorm_epsilon = 1e-5f;

// Layernorm, or RMS norm, which is not `centred`: it subtracts no mean and has no bias.
//
// A warp does a row. It reads the row once, in 16-byte pieces, and keeps it in shared memory until its mean
// and deviation are known. Each lane reads back only what it wrote, so no barrier is needed. With `add`, x is
// in1 + in2, which is also stored in `residual`. That store is streaming, since the next kernel reads `out`
// and not `residual`.
//   A null weight counts as ones, a null bias as zeros.
template <class X, bool centred, bool add>
__global__ void __launch_bounds__(256, 5)
    norm_forward_kernel5(X* residual, X* out, float* mean, float* rstd, const X* in1, const X* in2,
                         const X* weight, const X* bias, float eps, std::int64_t rows, int channels) {
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

    float sum = 0, squares = 0;
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
            for (int i = 0; i < pack; ++i) {
                const float element = to_float(v[k][i]);
                if constexpr (centred) {
                    sum += element;
                } else {
                    squares += element * element;
                }
            }
            store(x + c + k * step, v[k]);
        }
    }
    float row_mean = 0;
    if constexpr (centred) {
        row_mean = warp_sum(sum) / static_cast<float>(channels);
        for (int c = lane * pack; c < channels; c += step) {
            const Packed<X> v = load(x + c);
#pragma unroll
            for (int i = 0; i < pack; ++i) {
                const float deviation = to_float(v[i]) - row_mean;
                squares += deviation * deviation;
            }
        }
    }
    const float row_rstd = rsqrtf(warp_sum(squares) / static_cast<float>(channels) + eps);

    // Branches on weight and bias would cost registers: the compiler would make two loops.
    const int weighted_channels = weight ? channels : 0, shifted_channels = bias ? channels : 0;
    for (int c = lane * pack; c < channels; c += step) {
        Packed<X> v = load(x + c), w, b = from_bits<X>({});
#pragma unroll
        for (int i = 0; i < pack; ++i) w[i] = from_float<X>(1);
        if (c < weighted_channels) w = load(weight + c);
        if (centred && c < shifted_channels) b = load(bias + c);
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            if constexpr (centred) {
                const float normalized = (to_float(v[i]) - row_mean) * row_rstd;
                v[i] = from_float<X>(normalized * to_float(w[i]) + to_float(b[i]));
            } else {
                v[i] = from_float<X>(to_float(v[i]) * row_rstd * to_float(w[i]));
            }
        }
        store(out + start + c, v);
    }
    if (lane == 0) {
        if constexpr (centred) mean[row] = row_mean;
        rstd[row] = row_rstd;
    }
}

// in1, in2, residual, out X (rows, channels); mean, rstd fp32 (rows); weight, bias X (channels), or null. in2 and
// residual are null for the norm of in1 alone; mean and bias are null for RMS norm.
template <bool centred, class X>
void norm_forward(const LaunchContext& on, X* residual, X* out, float* mean, float* rstd, const X* in1,
                  const X* in2, const X* weight, const X* bias, float eps, std::int64_t rows, int channels,
                  int block_threads = 128) {
    check(channels % Packed<X>::size == 0, "norm: channels are a multiple of 16 bytes");
    check(block_threads >= warp_threads && block_threads <= 256, "norm: a block has 32 to 256 threads");
    // Fewer rows per block if they would not fit its shared memory.
    const std::size_t row_bytes = static_cast<std::size_t>(channels) * sizeof(X);
    check(row_bytes <= on.chip.shared_bytes_per_block, "norm: a row fits into shared memory");
    int warps = block_threads / warp_threads;
    while (SharedAllocator::bytes<std::byte>(warps * row_bytes) > on.chip.shared_bytes_per_block) --warps;
    launch(on, in2 ? norm_forward_kernel5<X, centred, true> : norm_forward_kernel5<X, centred, false>,
           static_cast<unsigned>(blocks_for<std::int64_t>(rows, warps)), warps * warp_threads,
           SharedAllocator::bytes<std::byte>(warps * row_bytes), residual, out, mean, rstd, in1, in2, weight,
           bias, eps, rows, channels);
}

}  // namespace llmc::cuda
