// AdamW (ops.h: adamw). It gives the same bits as the CPU device (llmc/device/cpu/optimizer.cpp). The
// development of this kernel is in dev/adamw.cu.
#pragma once

#include <optional>
#include <span>

#include "llmc/device/cuda/grid.cuh"
#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/ops.h"
#include "llmc/device/stochastic_rounding.h"

namespace llmc::cuda {

__device__ __forceinline__ bf16 round_stochastically(float x, std::uint32_t random) {
    return __ushort_as_bfloat16(llmc::round_stochastically(__float_as_uint(x), random));
}

// The numbers that change from step to step, in device memory. The host computes the bias corrections in
// fp64, since 1 - beta^step loses precision by cancellation, and a power in every thread would cost more than
// the update. The corrections thus have the same bits as on the CPU device.
struct AdamWCoefficients {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    float step_size;         // learning rate / (1 - beta1^step)
    float root_correction2;  // sqrt(1 - beta2^step)
    double learning_rate;
    double max_grad_norm;
    std::uint64_t step;
};

inline AdamWCoefficients adamw_coefficients(const AdamWStep& step) {
    check(step.step >= 1, "AdamW's steps count from 1");
    const auto steps = static_cast<double>(step.step);
    return {.beta1 = static_cast<float>(step.beta1),
            .beta2 = static_cast<float>(step.beta2),
            .one_minus_beta1 = static_cast<float>(1.0 - step.beta1),
            .one_minus_beta2 = static_cast<float>(1.0 - step.beta2),
            .eps = static_cast<float>(step.eps),
            .step_size = static_cast<float>(step.learning_rate / (1.0 - std::pow(step.beta1, steps))),
            .root_correction2 = static_cast<float>(std::sqrt(1.0 - std::pow(step.beta2, steps))),
            .learning_rate = step.learning_rate,
            .max_grad_norm = step.max_grad_norm,
            .step = static_cast<std::uint64_t>(step.step)};
}

// Stores a host value in device memory. No host buffer has to live until the copy is done.
template <class T>
__global__ void store_kernel(T* to, T value) {
    *to = value;
}

inline void store_coefficients(const LaunchContext& on, AdamWCoefficients* to, const AdamWStep& step) {
    launch(on, store_kernel<AdamWCoefficients>, 1, 1, 0, to, adamw_coefficients(step));
}

// The segments of a launch. Kernel parameters are in constant memory. A unit has at most
// 12 tensors, each of at most one segment (llmc/parallel/zero/parameter_store.cpp).
struct AdamWSegments {
    static constexpr int most = 16;
    int count;
    AdamWSegment segments[most];
};

// min(1, max_grad_norm / (norm + 1e-6))
__device__ __forceinline__ float adamw_clip(double norm_squared, double max_grad_norm) {
    if (!(max_grad_norm > 0)) return 1;
    return static_cast<float>(fmin(1.0, max_grad_norm / (sqrt(norm_squared) + 1e-6)));
}

// 1 - lr decay
__device__ __forceinline__ float adamw_keep(double learning_rate, double weight_decay) {
    return static_cast<float>(fma(-learning_rate, weight_decay, 1.0));
}

// Updates one element. Each fma is explicit, as on the CPU device, so that compilers cannot change the bits.
__device__ __forceinline__ void adamw_update(float& w, float& m, float& v, float gradient, float clip,
                                             float keep, const AdamWCoefficients& k) {
    const float g = clip * gradient;
    m = fmaf(k.beta1, m, k.one_minus_beta1 * g);
    v = fmaf(k.beta2, v, k.one_minus_beta2 * g * g);
    const float denominator = sqrtf(v) / k.root_correction2 + k.eps;
    w = fmaf(w, keep, -k.step_size * (m / denominator));
}

// The grid is persistent (grid.cuh). A block first computes the clip factor and the segments' decay. Then it
// takes tiles of two quads per thread, whose eight 16-byte loads are in flight together. A thread's element
// index only increases, and so does its segment.
template <class X, class Gradient, bool stochastic>
__global__ void __launch_bounds__(256, 4)
    adamw_kernel4(X* parameters, float* master, float* m, float* v, const Gradient* gradients,
                  const double* norm_squared, const AdamWCoefficients* coefficients, AdamWSegments segments,
                  StochasticRounding rounding) {
    constexpr int quads = 2;
    const double squared = *norm_squared;
    if (!std::isfinite(squared)) return;
    const AdamWCoefficients k = *coefficients;
    SHARED(float, clip_of_block, [1]);
    SHARED(float, keep, [AdamWSegments::most]);
    if (threadIdx.x == 0) clip_of_block[0] = adamw_clip(squared, k.max_grad_norm);
    if (static_cast<int>(threadIdx.x) < segments.count) {
        keep[threadIdx.x] = adamw_keep(k.learning_rate, segments.segments[threadIdx.x].weight_decay);
    }
    __syncthreads();
    const float clip = clip_of_block[0];

    const int tile = 4 * quads * static_cast<int>(blockDim.x);
    const std::int64_t end = segments.segments[segments.count - 1].end;
    int segment = 0;
    for (std::int64_t start = static_cast<std::int64_t>(blockIdx.x) * tile; start < end;
         start += static_cast<std::int64_t>(gridDim.x) * tile) {
        std::int64_t at[quads];
        int segment_at[quads];  // -1: padding, or past the end
        Quad<float> ws[quads], ms[quads], vs[quads];
        Quad<Gradient> gs[quads];
#pragma unroll
        for (int q = 0; q < quads; ++q) {
            at[q] = start + 4 * (q * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
            while (segment < segments.count && at[q] >= segments.segments[segment].end) ++segment;
            segment_at[q] =
                segment < segments.count && at[q] >= segments.segments[segment].begin ? segment : -1;
            if (segment_at[q] < 0) continue;
            ws[q] = load_quad_streaming(master + at[q]);
            ms[q] = load_quad_streaming(m + at[q]);
            vs[q] = load_quad_streaming(v + at[q]);
            gs[q] = load_quad_streaming(gradients + at[q]);
        }
#pragma unroll
        for (int q = 0; q < quads; ++q) {
            if (segment_at[q] < 0) continue;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                adamw_update(ws[q][e], ms[q][e], vs[q][e], to_float(gs[q][e]), clip, keep[segment_at[q]], k);
            }
            store_quad_streaming(master + at[q], ws[q]);
            store_quad_streaming(m + at[q], ms[q]);
            store_quad_streaming(v + at[q], vs[q]);
            if constexpr (!std::is_same_v<X, float>) {
                Quad<X> rounded;
                RandomBits random;
                if constexpr (stochastic) random = rounding_bits(rounding, k.step, at[q]);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    if constexpr (stochastic) {
                        rounded[e] = round_stochastically(ws[q][e], random[e]);
                    } else {
                        rounded[e] = from_float<X>(ws[q][e]);
                    }
                }
                store_quad(parameters + at[q], rounded);  // the forward pass reads them next
            }
        }
    }
}

// parameters X, master, m, v fp32, gradients fp32 or X are flat buffers that hold the segments. norm_squared
// and coefficients are in device memory too. If X is fp32, master holds the parameters, and `parameters` is
// not used. Without `rounding`, parameters are rounded to nearest.
template <class X, class Gradient>
void adamw(const LaunchContext& on, X* parameters, float* master, float* m, float* v,
           const Gradient* gradients, const double* norm_squared, const AdamWCoefficients* coefficients,
           std::span<const AdamWSegment> segments, const std::optional<StochasticRounding>& rounding = {},
           int block_threads = 256) {
    constexpr bool rounds = !std::is_same_v<X, float>;
    check(segments.size() <= AdamWSegments::most, "adamw: at most AdamWSegments::most segments");
    check(block_threads <= 256, "adamw: a block has at most 256 threads");
    check(static_cast<int>(segments.size()) <= block_threads, "adamw: at least as many threads as segments");
    check(!rounding || (rounds && rounding->first_element % 4 == 0),
          "adamw: stochastic rounding is to bf16, and the buffer's first element has an index that is a "
          "multiple of 4");
    AdamWSegments all{};
    for (const AdamWSegment& segment : segments) {
        const std::int64_t previous_end = all.count > 0 ? all.segments[all.count - 1].end : 0;
        check(segment.begin >= previous_end && segment.end >= segment.begin,
              "adamw: segments are in increasing order");
        check(segment.begin % 4 == 0 && segment.end % 4 == 0, "adamw: segments are whole quads");
        all.segments[all.count++] = segment;
    }
    const std::int64_t end = segments.empty() ? 0 : segments.back().end;
    if (end == 0) return;
    const std::int64_t pieces = blocks_for<std::int64_t>(end, 8);
    const unsigned blocks = streaming_blocks(on.chip, pieces, block_threads, 1024);
    launch(on, rounding ? adamw_kernel4<X, Gradient, rounds> : adamw_kernel4<X, Gradient, false>, blocks,
           block_threads, 0, parameters, master, m, v, gradients, norm_squared, coefficients, all,
           rounding.value_or(StochasticRounding{}));
}

}  // namespace llmc::cuda
