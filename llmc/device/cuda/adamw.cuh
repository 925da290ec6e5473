// AdamW (ops.h: adamw). It gives the same bits as the CPU device (llmc/device/adamw.h). The development of this
// kernel is in dev/adamw.cu.
#pragma once

#include <optional>
#include <span>

#include "llmc/device/adamw.h"
#include "llmc/device/cuda/grid.cuh"
#include "llmc/device/cuda/rounding.cuh"
#include "llmc/device/ops.h"

namespace llmc::cuda {

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

inline AdamWSegments adamw_segments(std::span<const AdamWSegment> segments) {
    check(segments.size() <= AdamWSegments::most, "adamw: at most AdamWSegments::most segments");
    AdamWSegments all{};
    for (const AdamWSegment& segment : segments) {
        const std::int64_t previous_end = all.count > 0 ? all.segments[all.count - 1].end : 0;
        check(segment.begin >= previous_end && segment.end >= segment.begin,
              "adamw: segments are in increasing order");
        check(segment.begin % 4 == 0 && segment.end % 4 == 0 &&
                  (segment.in_small < 0 || segment.in_small % 4 == 0),
              "adamw: segments are whole quads");
        all.segments[all.count++] = segment;
    }
    return all;
}

// The flat buffers of a launch. Without a master copy, `master` holds the parameters, and `parameters` is not used.
template <class X, class Master, class Moment, class Gradient>
struct AdamWBuffers {
    X* parameters;
    Master* master;
    Moment *m, *v;
    const Gradient* gradients;
};

// How many blocks a multiprocessor holds. Random bits for three numbers of an element take more registers.
template <class Moment, bool stochastic>
inline constexpr int adamw_resident = stochastic && !std::is_same_v<Moment, float> ? 3 : 4;

// The grid is persistent (grid.cuh). A block first computes the clip factor and the segments' decay. Then it
// takes tiles of two quads per thread, whose eight loads, of up to 16 bytes, are in flight together. A thread's
// element index only increases, and so does its segment.
template <class X, class Master, class Moment, class Gradient, bool stochastic>
__global__ void __launch_bounds__(256, adamw_resident<Moment, stochastic>)
    adamw_kernel4(AdamWBuffers<X, Master, Moment, Gradient> to, const double* norm_squared,
                  const AdamWCoefficients* coefficients, AdamWSegments segments, StochasticRounding rounding,
                  StochasticRounding rounding_of_moments) {
    constexpr int quads = 2;
    constexpr bool has_master = !std::is_same_v<X, Master>, rounds_moments = !std::is_same_v<Moment, float>;
    const double squared = *norm_squared;
    if (!std::isfinite(squared)) return;
    const AdamWCoefficients k = *coefficients;
    SHARED(float, clip_of_block, [1]);
    SHARED(float, keep, [AdamWSegments::most]);
    if (threadIdx.x == 0) clip_of_block[0] = adamw_clip(squared, k);
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
        Quad<Master> ws[quads];
        Quad<Moment> ms[quads], vs[quads];
        Quad<Gradient> gs[quads];
#pragma unroll
        for (int q = 0; q < quads; ++q) {
            at[q] = start + 4 * (q * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
            while (segment < segments.count && at[q] >= segments.segments[segment].end) ++segment;
            segment_at[q] =
                segment < segments.count && at[q] >= segments.segments[segment].begin ? segment : -1;
            if (segment_at[q] < 0) continue;
            ws[q] = load_quad_streaming(to.master + at[q]);
            ms[q] = load_quad_streaming(to.m + at[q]);
            vs[q] = load_quad_streaming(to.v + at[q]);
            gs[q] = load_quad_streaming(to.gradients + at[q]);
        }
#pragma unroll
        for (int q = 0; q < quads; ++q) {
            if (segment_at[q] < 0) continue;
            float w[4], m[4], v[4];
            widen(w, ws[q]);
            widen(m, ms[q]);
            widen(v, vs[q]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                adamw_update(w[e], m[e], v[e], to_float(gs[q][e]), clip, keep[segment_at[q]], k);
            }
            store_quad_streaming(to.m + at[q], rounded<Moment, rounds_moments>(m, rounding_of_moments, k.step,
                                                                               at[q], Rounded::first_moment));
            store_quad_streaming(to.v + at[q],
                                 rounded<Moment, rounds_moments>(v, rounding_of_moments, k.step, at[q],
                                                                 Rounded::second_moment));
            // The forward pass reads the parameters next.
            const auto weights = rounded<X, stochastic>(w, rounding, k.step, at[q], Rounded::weight);
            if constexpr (has_master) {
                store_quad_streaming(to.master + at[q], Quad<float>{w[0], w[1], w[2], w[3]});
                store_quad(to.parameters + at[q], weights);
            } else {
                store_quad(to.master + at[q], weights);
            }
        }
    }
}

// norm_squared and coefficients are in device memory too. Without `rounding`, parameters are rounded to nearest.
template <class X, class Master, class Moment, class Gradient>
void adamw(const LaunchContext& on, const AdamWBuffers<X, Master, Moment, Gradient>& to,
           const double* norm_squared, const AdamWCoefficients* coefficients,
           std::span<const AdamWSegment> segments, const std::optional<StochasticRounding>& rounding = {},
           const std::optional<StochasticRounding>& rounding_of_moments = {}, int block_threads = 256) {
    // Random bits are for bf16. Weights need them where they have no master copy.
    constexpr bool may_round = std::is_same_v<X, bf16>,
                   must_round = may_round && std::is_same_v<Master, bf16>;
    static_assert(std::is_same_v<Master, float> || must_round);
    check(block_threads <= 256, "adamw: a block has at most 256 threads");
    check(static_cast<int>(segments.size()) <= block_threads, "adamw: at least as many threads as segments");
    check(rounding ? may_round : !must_round, "adamw: stochastic rounding is of weights in bf16");
    check(rounding_of_moments.has_value() == std::is_same_v<Moment, bf16>,
          "adamw: moments in bf16 are rounded at random");
    for (const auto& random : {rounding, rounding_of_moments}) {
        check(!random || random->first_element % 4 == 0,
              "adamw: the buffer's first element has an index that is a multiple of 4");
    }
    const AdamWSegments all = adamw_segments(segments);
    const std::int64_t end = segments.empty() ? 0 : segments.back().end;
    if (end == 0) return;
    const std::int64_t pieces = blocks_for<std::int64_t>(end, 8);
    const auto run = [&]<bool stochastic>() {
        const unsigned blocks =
            streaming_blocks(on.chip, pieces, block_threads, 256 * adamw_resident<Moment, stochastic>);
        launch(on, adamw_kernel4<X, Master, Moment, Gradient, stochastic>, blocks, block_threads, 0, to,
               norm_squared, coefficients, all, rounding.value_or(StochasticRounding{}),
               rounding_of_moments.value_or(StochasticRounding{}));
    };
    rounding ? run.template operator()<may_round>() : run.template operator()<must_round>();
}

}  // namespace llmc::cuda
