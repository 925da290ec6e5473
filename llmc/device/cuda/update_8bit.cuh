// The update with state in 8 bits (ops.h: optimizer_update; eight_bit_state.h). It gives the same bits as the CPU
// device.
//
// With AdamW, an element reads and writes its fp32 master copy and two bytes of state, reads its gradient, and writes
// its parameter: 18 bytes in bf16 with gradients in fp32, in place of 30. For each of the two bytes it looks up eight
// entries of a table in shared memory. A warp has a block of 256 elements, whose greatest magnitudes it finds by
// shuffles.
#pragma once

#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/cuda/update.cuh"
#include "llmc/device/eight_bit_state.h"

namespace llmc::cuda {

// The flat buffers of a launch. Without a master copy, `master` holds the parameters, and `parameters` is not used.
template <class Formula, class X, class Master, class Gradient>
struct EightBitBuffers {
    static constexpr int states = states_of<Formula>;
    X* parameters;
    Master* master;
    std::uint8_t* state[states];
    float* amax[states];    // of each block
    float* packed[states];  // of the tensors with UpdateSegment::in_packed
    const Gradient* gradients;
};

// In constant memory, as all kernel parameters; blocks copy them to shared memory.
template <class Formula>
struct EightBitTables {
    float of_state[states_of<Formula>][256];
};

// The tables' signs, read on the host.
template <class Formula, int state>
inline constexpr bool has_sign = Formula::description.state[state].has_sign;

// nearest_entries() of eight_bit_state.h, for one number
__device__ __forceinline__ std::uint8_t nearest_in(const float* table, float x) {
    int above = 1;  // no entry in [1, above) is above x
#pragma unroll
    for (int step = 128; step > 0; step /= 2) {
        if (above + step <= 255 && table[above + step - 1] <= x) above += step;
    }
    return static_cast<std::uint8_t>(above - (x - table[above - 1] <= table[above] - x ? 1 : 0));
}

// One tensor of state of a lane's quads.
struct EightBitQuads {
    float values[2][4];

    __device__ __forceinline__ void load(int q, const std::uint8_t* entries, float amax, const float* table) {
        const uchar4 four = *reinterpret_cast<const uchar4*>(entries);
        values[q][0] = table[four.x] * amax;
        values[q][1] = table[four.y] * amax;
        values[q][2] = table[four.z] * amax;
        values[q][3] = table[four.w] * amax;
    }
    // The greatest magnitude of the warp's block.
    __device__ __forceinline__ float greatest(LLMC_ONLY_SITE) const {
        float amax = 0;
#pragma unroll
        for (const auto& quad : values) {
#pragma unroll
            for (const float x : quad) amax = fmaxf(amax, fabsf(x));
        }
        return warp_maximum(amax LLMC_PASS_SITE);
    }
    // Without a sign, numbers above 0 are never stored as 0 (to_8_bits).
    template <bool has_sign>
    __device__ __forceinline__ void store(int q, std::uint8_t* entries, float amax,
                                          const float* table) const {
        std::uint8_t four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            four[e] = nearest_in(table, amax > 0 ? values[q][e] / amax : 0.0f);
            if (!has_sign && four[e] == 0 && values[q][e] > 0) four[e] = 1;
        }
        *reinterpret_cast<uchar4*>(entries) = make_uchar4(four[0], four[1], four[2], four[3]);
    }
};

template <class Formula, class X, class Master, class Gradient, bool stochastic>
__global__ void __launch_bounds__(256, 3)
    update_eight_bit_kernel1(EightBitBuffers<Formula, X, Master, Gradient> to, const double* norm_squared,
                             const StepNumbers<Formula>* numbers, UpdateSegments segments,
                             EightBitTables<Formula> tables, StochasticRounding rounding,
                             std::int64_t blocks) {
    constexpr int states = states_of<Formula>;
    constexpr bool has_master = !std::is_same_v<X, Master>;
    const double squared = *norm_squared;
    if (!std::isfinite(squared)) return;
    const StepNumbers<Formula> k = *numbers;
    SHARED(float, clip_of_block, [1]);
    SHARED(UpdateRates, rates, [UpdateSegments::most]);
    SHARED(float, table, [states][256]);
    if (threadIdx.x == 0) clip_of_block[0] = k.clip(squared);
    if (static_cast<int>(threadIdx.x) < segments.count) {
        const UpdateSegment& segment = segments.segments[threadIdx.x];
        rates[threadIdx.x] = k.rates(segment.weight_decay, segment.rate_factor);
    }
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += static_cast<int>(blockDim.x)) {
#pragma unroll
        for (int s = 0; s < states; ++s) table[s][i] = tables.of_state[s][i];
    }
    __syncthreads();
    const float clip = clip_of_block[0];

    const int warps = static_cast<int>(blockDim.x / warp_threads),
              lane = static_cast<int>(threadIdx.x % warp_threads);
    int segment = 0;
    for (std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / warp_threads;
         block < blocks; block += static_cast<std::int64_t>(gridDim.x) * warps) {
        // Only the lane that will write them reads them.
        float amax[states];
#pragma unroll
        for (int s = 0; s < states; ++s)
            amax[s] = __shfl_sync(all_lanes, lane == 0 ? to.amax[s][block] : 0, 0, warp_threads);
        EightBitQuads state[states];
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const std::int64_t at = block * eight_bit_block + 4 * (q * warp_threads + lane);
#pragma unroll
            for (int s = 0; s < states; ++s) state[s].load(q, to.state[s] + at, amax[s], table[s]);
            while (segment < segments.count && at >= segments.segments[segment].end) ++segment;
            if (segment == segments.count || at < segments.segments[segment].begin) continue;
            const UpdateSegment& of = segments.segments[segment];
            const bool is_small = of.in_packed >= 0;
            const std::int64_t small = of.in_packed + at - of.begin;
            float w[4], values[states][4];
#pragma unroll
            for (int s = 0; s < states; ++s) {
                if (is_small) widen(state[s].values[q], load_quad(to.packed[s] + small));
#pragma unroll
                for (int e = 0; e < 4; ++e) values[s][e] = state[s].values[q][e];
            }
            widen(w, load_quad_streaming(to.master + at));
            const Quad<Gradient> g = load_quad_streaming(to.gradients + at);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                update_number(k.formula, e, w[e], clip * to_float(g[e]), rates[segment], values);
            const auto weights = rounded<X, stochastic>(w, rounding, k.step, at, Rounded::weight);
            if constexpr (has_master) {
                store_quad_streaming(to.master + at, Quad<float>{w[0], w[1], w[2], w[3]});
                store_quad(to.parameters + at, weights);
            } else {
                store_quad(to.master + at, weights);
            }
#pragma unroll
            for (int s = 0; s < states; ++s) {
                const auto& [x0, x1, x2, x3] = values[s];
                if (is_small) store_quad(to.packed[s] + small, Quad<float>{x0, x1, x2, x3});
#pragma unroll
                for (int e = 0; e < 4; ++e)  // a small tensor counts as 0 in the block
                    state[s].values[q][e] = is_small ? 0 : values[s][e];
            }
        }
#pragma unroll
        for (int s = 0; s < states; ++s) amax[s] = state[s].greatest();
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const std::int64_t at = block * eight_bit_block + 4 * (q * warp_threads + lane);
            state[0].template store<has_sign<Formula, 0>>(q, to.state[0] + at, amax[0], table[0]);
            if constexpr (states == 2)
                state[1].template store<has_sign<Formula, 1>>(q, to.state[1] + at, amax[1], table[1]);
        }
        if (lane == 0) {
#pragma unroll
            for (int s = 0; s < states; ++s) to.amax[s][block] = amax[s];
        }
    }
}

// n elements, whole blocks. norm_squared and `numbers` are in device memory too. Without `rounding`, parameters are
// rounded to nearest.
template <class Formula, class X, class Master, class Gradient>
void update_8bit(const LaunchContext& on, const EightBitBuffers<Formula, X, Master, Gradient>& to,
                 std::int64_t n, const double* norm_squared, const StepNumbers<Formula>* numbers,
                 std::span<const UpdateSegment> segments,
                 const std::optional<StochasticRounding>& rounding = {}, int block_threads = 256) {
    constexpr bool may_round = std::is_same_v<X, bf16>,
                   must_round = may_round && std::is_same_v<Master, bf16>;
    check(n % eight_bit_block == 0, "update: state in 8 bits is whole blocks");
    check(block_threads <= 256 && block_threads % warp_threads == 0,
          "update: a block has whole warps, at most eight");
    check(rounding ? may_round : !must_round, "update: stochastic rounding is of weights in bf16");
    check(!rounding || rounding->first_element % 4 == 0,
          "update: the buffer's first element has an index that is a multiple of 4");
    const UpdateSegments all = update_segments(segments);
    check(all.count <= block_threads, "update: at least as many threads as segments");
    if (segments.empty() || segments.back().end == 0) return;
    EightBitTables<Formula> tables;
    for (int s = 0; s < states_of<Formula>; ++s)
        std::ranges::copy(table_in_8_bits(Formula::description.state[static_cast<std::size_t>(s)].has_sign),
                          tables.of_state[s]);
    const std::int64_t blocks = n / eight_bit_block;
    const auto run = [&]<bool stochastic>() {
        const unsigned grid = streaming_blocks(on.chip, blocks * warp_threads, block_threads, 256 * 3);
        launch(on, update_eight_bit_kernel1<Formula, X, Master, Gradient, stochastic>, grid, block_threads, 0,
               to, norm_squared, numbers, all, tables, rounding.value_or(StochasticRounding{}), blocks);
    };
    rounding ? run.template operator()<may_round>() : run.template operator()<must_round>();
}

}  // namespace llmc::cuda
