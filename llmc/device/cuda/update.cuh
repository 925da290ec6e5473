// The update (ops.h: optimizer_update), for the formulas of llmc/optim. It gives the same bits as the CPU device. The
// development of this kernel is in dev/adamw.cu.
#pragma once

#include <optional>
#include <span>

#include "llmc/device/cuda/grid.cuh"
#include "llmc/device/cuda/rounding.cuh"
#include "llmc/device/ops.h"
#include "llmc/optim/formulas.h"

namespace llmc::cuda {

// Stores a host value in device memory. No host buffer has to live until the copy is done.
template <class T>
__global__ void store_kernel(T* to, T value) {
    *to = value;
}

template <class Formula>
void store_numbers(const LaunchContext& on, StepNumbers<Formula>* to, const UpdateStep& step) {
    launch(on, store_kernel<StepNumbers<Formula>>, 1, 1, 0, to, StepNumbers<Formula>::of(step));
}

// The segments of a launch. Kernel parameters are in constant memory. A unit has at most
// 12 tensors, each of at most one segment (llmc/parallel/zero/parameter_store.cpp).
struct UpdateSegments {
    static constexpr int most = 16;
    int count;
    UpdateSegment segments[most];
};

inline UpdateSegments update_segments(std::span<const UpdateSegment> segments) {
    check(segments.size() <= UpdateSegments::most, "update: at most UpdateSegments::most segments");
    UpdateSegments all{};
    for (const UpdateSegment& segment : segments) {
        const std::int64_t previous_end = all.count > 0 ? all.segments[all.count - 1].end : 0;
        check(segment.begin >= previous_end && segment.end >= segment.begin,
              "update: segments are in increasing order");
        check(segment.begin % 4 == 0 && segment.end % 4 == 0 &&
                  (segment.in_packed < 0 || segment.in_packed % 4 == 0),
              "update: segments are whole quads");
        all.segments[all.count++] = segment;
    }
    return all;
}

template <class Formula>
inline constexpr int states_of = Formula::states;
// An array has at least one element.
template <class Formula>
inline constexpr int state_buffers_of = std::max(1, states_of<Formula>);

// Updates number e of a quad, whose state is in fp32.
template <class Formula>
__device__ __forceinline__ void update_number(const Formula& formula, int e, float& w, float g,
                                              const UpdateRates& rates,
                                              float (&state)[state_buffers_of<Formula>][4]) {
    if constexpr (states_of<Formula> == 0) {
        formula.update(w, g, rates);
    } else if constexpr (states_of<Formula> == 1) {
        formula.update(w, g, rates, state[0][e]);
    } else {
        formula.update(w, g, rates, state[0][e], state[1][e]);
    }
}

// The flat buffers of a launch. Without a master copy, `master` holds the parameters, and `parameters` is not used.
template <class Formula, class X, class Master, class State, class Gradient>
struct UpdateBuffers {
    X* parameters;
    Master* master;
    State* state[state_buffers_of<Formula>];
    const Gradient* gradients;
};

// How many blocks a multiprocessor holds. Random bits for three numbers of an element take more registers.
template <class State, bool stochastic>
inline constexpr int update_resident = stochastic && !std::is_same_v<State, float> ? 3 : 4;

// The grid is persistent (grid.cuh). A block first computes the clip factor and the segments' decay. Then it
// takes tiles of two quads per thread, whose eight loads, of up to 16 bytes, are in flight together. A thread's
// element index only increases, and so does its segment.
template <class Formula, class X, class Master, class State, class Gradient, bool stochastic>
__global__ void __launch_bounds__(256, update_resident<State, stochastic>)
    update_kernel4(UpdateBuffers<Formula, X, Master, State, Gradient> to, const double* norm_squared,
                   const StepNumbers<Formula>* numbers, UpdateSegments segments, StochasticRounding rounding,
                   StochasticRounding rounding_of_state) {
    constexpr int quads = 2, states = states_of<Formula>;
    constexpr bool has_master = !std::is_same_v<X, Master>, rounds_state = !std::is_same_v<State, float>;
    const double squared = *norm_squared;
    if (!std::isfinite(squared)) return;
    const StepNumbers<Formula> k = *numbers;
    SHARED(float, clip_of_block, [1]);
    SHARED(UpdateRates, rates, [UpdateSegments::most]);
    if (threadIdx.x == 0) clip_of_block[0] = k.clip(squared);
    if (static_cast<int>(threadIdx.x) < segments.count) {
        const UpdateSegment& segment = segments.segments[threadIdx.x];
        rates[threadIdx.x] = k.rates(segment.weight_decay, segment.rate_factor);
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
        Quad<State> ss[state_buffers_of<Formula>][quads];
        Quad<Gradient> gs[quads];
#pragma unroll
        for (int q = 0; q < quads; ++q) {
            at[q] = start + 4 * (q * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x));
            while (segment < segments.count && at[q] >= segments.segments[segment].end) ++segment;
            segment_at[q] =
                segment < segments.count && at[q] >= segments.segments[segment].begin ? segment : -1;
            if (segment_at[q] < 0) continue;
            ws[q] = load_quad_streaming(to.master + at[q]);
#pragma unroll
            for (int s = 0; s < states; ++s) ss[s][q] = load_quad_streaming(to.state[s] + at[q]);
            gs[q] = load_quad_streaming(to.gradients + at[q]);
        }
#pragma unroll
        for (int q = 0; q < quads; ++q) {
            if (segment_at[q] < 0) continue;
            float w[4], state[state_buffers_of<Formula>][4];
            widen(w, ws[q]);
#pragma unroll
            for (int s = 0; s < states; ++s) widen(state[s], ss[s][q]);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                update_number(k.formula, e, w[e], clip * to_float(gs[q][e]), rates[segment_at[q]], state);
#pragma unroll
            for (int s = 0; s < states; ++s)
                store_quad_streaming(to.state[s] + at[q],
                                     rounded<State, rounds_state>(state[s], rounding_of_state, k.step, at[q],
                                                                  rounded_state(s)));
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

// norm_squared and `numbers` are in device memory too. Without `rounding`, parameters are rounded to nearest.
template <class Formula, class X, class Master, class State, class Gradient>
void update(const LaunchContext& on, const UpdateBuffers<Formula, X, Master, State, Gradient>& to,
            const double* norm_squared, const StepNumbers<Formula>* numbers,
            std::span<const UpdateSegment> segments, const std::optional<StochasticRounding>& rounding = {},
            const std::optional<StochasticRounding>& rounding_of_state = {}, int block_threads = 256) {
    // Random bits are for bf16. Weights need them where they have no master copy.
    constexpr bool may_round = std::is_same_v<X, bf16>,
                   must_round = may_round && std::is_same_v<Master, bf16>;
    static_assert(std::is_same_v<Master, float> || must_round);
    check(block_threads <= 256, "update: a block has at most 256 threads");
    check(static_cast<int>(segments.size()) <= block_threads, "update: at least as many threads as segments");
    check(rounding ? may_round : !must_round, "update: stochastic rounding is of weights in bf16");
    check(rounding_of_state.has_value() == std::is_same_v<State, bf16>,
          "update: state in bf16 is rounded at random");
    for (const auto& random : {rounding, rounding_of_state}) {
        check(!random || random->first_element % 4 == 0,
              "update: the buffer's first element has an index that is a multiple of 4");
    }
    const UpdateSegments all = update_segments(segments);
    const std::int64_t end = segments.empty() ? 0 : segments.back().end;
    if (end == 0) return;
    const std::int64_t pieces = blocks_for<std::int64_t>(end, 8);
    const auto run = [&]<bool stochastic>() {
        const unsigned blocks =
            streaming_blocks(on.chip, pieces, block_threads, 256 * update_resident<State, stochastic>);
        launch(on, update_kernel4<Formula, X, Master, State, Gradient, stochastic>, blocks, block_threads, 0,
               to, norm_squared, numbers, all, rounding.value_or(StochasticRounding{}),
               rounding_of_state.value_or(StochasticRounding{}));
    };
    rounding ? run.template operator()<may_round>() : run.template operator()<must_round>();
}

}  // namespace llmc::cuda
