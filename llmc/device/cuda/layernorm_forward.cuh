// Layernorm forward, alone and of a sum (ops.h: layernorm_forward, fused_residual_layernorm_forward). The
// development of this kernel is in dev/layernorm_forward.cu.
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

inline constexpr float layernorm_epsilon = 1e-5f;

// A warp does a row. It reads the row once, in 16-byte pieces, and keeps it in shared memory until its mean
// and deviation are known. Each lane reads back only what it wrote, so no barrier is needed. With `add`, x is
// in1 + in2, which is also stored in `residual`. That store is streaming, since the next kernel reads `out`
// and not `residual`.
//   A null beta counts as zeros.
template <class X, bool add>
__global__ void __launch_bounds__(256, 5)
    layernorm_forward_kernel5(X* residual, X* out, float* mean, float* rstd, const X* in1, const X* in2,
                              const X* gamma, const X* beta, std::int64_t rows, int channels) {
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

    float sum = 0;
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
            for (int i = 0; i < pack; ++i) sum += to_float(v[k][i]);
            store(x + c + k * step, v[k]);
        }
    }
    const float row_mean = warp_sum(sum) / static_cast<float>(channels);

    float squares = 0;
    for (int c = lane * pack; c < channels; c += step) {
        const Packed<X> v = load(x + c);
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            const float deviation = to_float(v[i]) - row_mean;
            squares += deviation * deviation;
        }
    }
    const float row_rstd = rsqrtf(warp_sum(squares) / static_cast<float>(channels) + layernorm_epsilon);

    // A branch on beta would cost registers: the compiler would make two loops.
    const int shifted_channels = beta ? channels : 0;
    for (int c = lane * pack; c < channels; c += step) {
        Packed<X> v = load(x + c);
        const Packed<X> g = load(gamma + c);
        Packed<X> b = from_bits<X>({});
        if (c < shifted_channels) b = load(beta + c);
#pragma unroll
        for (int i = 0; i < pack; ++i) {
            const float normalized = (to_float(v[i]) - row_mean) * row_rstd;
            v[i] = from_float<X>(normalized * to_float(g[i]) + to_float(b[i]));
        }
        store(out + start + c, v);
    }
    if (lane == 0) {
        mean[row] = row_mean;
        rstd[row] = row_rstd;
    }
}

namespace detail {

template <class X, bool add>
void launch_layernorm_forward(const LaunchContext& on, X* residual, X* out, float* mean, float* rstd,
                              const X* in1, const X* in2, const X* gamma, const X* beta, std::int64_t rows,
                              int channels, int block_threads) {
    check(channels % Packed<X>::size == 0, "layernorm: channels are a multiple of 16 bytes");
    check(block_threads >= warp_threads && block_threads <= 256, "layernorm: a block has 32 to 256 threads");
    // Fewer rows per block if they would not fit its shared memory.
    const std::size_t row_bytes = static_cast<std::size_t>(channels) * sizeof(X);
    check(row_bytes <= on.chip.shared_bytes_per_block, "layernorm: a row fits into shared memory");
    int warps = block_threads / warp_threads;
    while (SharedAllocator::bytes<std::byte>(warps * row_bytes) > on.chip.shared_bytes_per_block) --warps;
    launch(on, layernorm_forward_kernel5<X, add>,
           static_cast<unsigned>(blocks_for<std::int64_t>(rows, warps)), warps * warp_threads,
           SharedAllocator::bytes<std::byte>(warps * row_bytes), residual, out, mean, rstd, in1, in2, gamma,
           beta, rows, channels);
}

}  // namespace detail

// in, out X (rows, channels); mean, rstd fp32 (rows); gamma X (channels), beta X (channels) or null
template <class X>
void layernorm_forward(const LaunchContext& on, X* out, float* mean, float* rstd, const X* in, const X* gamma,
                       const X* beta, std::int64_t rows, int channels, int block_threads = 128) {
    detail::launch_layernorm_forward<X, false>(on, nullptr, out, mean, rstd, in, nullptr, gamma, beta, rows,
                                               channels, block_threads);
}

template <class X>
void fused_residual_layernorm_forward(const LaunchContext& on, X* residual, X* out, float* mean, float* rstd,
                                      const X* in1, const X* in2, const X* gamma, const X* beta,
                                      std::int64_t rows, int channels, int block_threads = 128) {
    detail::launch_layernorm_forward<X, true>(on, residual, out, mean, rstd, in1, in2, gamma, beta, rows,
                                              channels, block_threads);
}

}  // namespace llmc::cuda
