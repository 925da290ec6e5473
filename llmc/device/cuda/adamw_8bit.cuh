// AdamW with moments in 8 bits (ops.h: adamw; eight_bit_moments.h). It gives the same bits as the CPU device.
//
// An element reads and writes its fp32 master copy and two bytes of moments, reads its gradient, and writes its
// parameter: 18 bytes in bf16 with gradients in fp32, in place of 30. For each of its two moments it looks up eight
// entries of a table in shared memory. A warp has a block of 256 elements, whose greatest magnitudes it finds by
// shuffles.
#pragma once

#include "llmc/device/cuda/adamw.cuh"
#include "llmc/device/cuda/reduce.cuh"
#include "llmc/device/eight_bit_moments.h"

namespace llmc::cuda {

// The flat buffers of a launch. Without a master copy, `master` holds the parameters, and `parameters` is not used.
template <class X, class Master, class Gradient>
struct EightBitBuffers {
    X* parameters;
    Master* master;
    std::uint8_t *m, *v;
    float *m_amax, *v_amax;    // of each block
    float *small_m, *small_v;  // of the tensors with AdamWSegment::in_small
    const Gradient* gradients;
};

// In constant memory, as all kernel parameters; blocks copy them to shared memory.
struct EightBitTables {
    float first[256], second[256];
};

// nearest_entries() of eight_bit_moments.h, for one number
__device__ __forceinline__ std::uint8_t nearest_in(const float* table, float x) {
    int above = 1;  // no entry in [1, above) is above x
#pragma unroll
    for (int step = 128; step > 0; step /= 2) {
        if (above + step <= 255 && table[above + step - 1] <= x) above += step;
    }
    return static_cast<std::uint8_t>(above - (x - table[above - 1] <= table[above] - x ? 1 : 0));
}

// One moment of a lane's quads.
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
    // Second moments above 0 are never stored as 0 (to_8_bits).
    template <bool is_second>
    __device__ __forceinline__ void store(int q, std::uint8_t* entries, float amax,
                                          const float* table) const {
        std::uint8_t four[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            four[e] = nearest_in(table, amax > 0 ? values[q][e] / amax : 0.0f);
            if (is_second && four[e] == 0 && values[q][e] > 0) four[e] = 1;
        }
        *reinterpret_cast<uchar4*>(entries) = make_uchar4(four[0], four[1], four[2], four[3]);
    }
};

template <class X, class Master, class Gradient, bool stochastic>
__global__ void __launch_bounds__(256, 3)
    adamw_eight_bit_kernel1(EightBitBuffers<X, Master, Gradient> to, const double* norm_squared,
                            const AdamWCoefficients* coefficients, AdamWSegments segments,
                            EightBitTables tables, StochasticRounding rounding, std::int64_t blocks) {
    constexpr bool has_master = !std::is_same_v<X, Master>;
    const double squared = *norm_squared;
    if (!std::isfinite(squared)) return;
    const AdamWCoefficients k = *coefficients;
    SHARED(float, clip_of_block, [1]);
    SHARED(float, keep, [AdamWSegments::most]);
    SHARED(float, first, [256]);
    SHARED(float, second, [256]);
    if (threadIdx.x == 0) clip_of_block[0] = adamw_clip(squared, k);
    if (static_cast<int>(threadIdx.x) < segments.count) {
        keep[threadIdx.x] = adamw_keep(k.learning_rate, segments.segments[threadIdx.x].weight_decay);
    }
    for (int i = static_cast<int>(threadIdx.x); i < 256; i += static_cast<int>(blockDim.x)) {
        first[i] = tables.first[i];
        second[i] = tables.second[i];
    }
    __syncthreads();
    const float clip = clip_of_block[0];

    const int warps = static_cast<int>(blockDim.x / warp_threads),
              lane = static_cast<int>(threadIdx.x % warp_threads);
    int segment = 0;
    for (std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / warp_threads;
         block < blocks; block += static_cast<std::int64_t>(gridDim.x) * warps) {
        // Only the lane that will write them reads them.
        const float m_amax = __shfl_sync(all_lanes, lane == 0 ? to.m_amax[block] : 0, 0, warp_threads);
        const float v_amax = __shfl_sync(all_lanes, lane == 0 ? to.v_amax[block] : 0, 0, warp_threads);
        EightBitQuads m, v;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const std::int64_t at = block * eight_bit_block + 4 * (q * warp_threads + lane);
            m.load(q, to.m + at, m_amax, first);
            v.load(q, to.v + at, v_amax, second);
            while (segment < segments.count && at >= segments.segments[segment].end) ++segment;
            if (segment == segments.count || at < segments.segments[segment].begin) continue;
            const AdamWSegment& of = segments.segments[segment];
            const bool is_small = of.in_small >= 0;
            const std::int64_t small = of.in_small + at - of.begin;
            if (is_small) {
                widen(m.values[q], load_quad(to.small_m + small));
                widen(v.values[q], load_quad(to.small_v + small));
            }
            float w[4];
            widen(w, load_quad_streaming(to.master + at));
            const Quad<Gradient> g = load_quad_streaming(to.gradients + at);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                adamw_update(w[e], m.values[q][e], v.values[q][e], to_float(g[e]), clip, keep[segment], k);
            }
            const auto weights = rounded<X, stochastic>(w, rounding, k.step, at, Rounded::weight);
            if constexpr (has_master) {
                store_quad_streaming(to.master + at, Quad<float>{w[0], w[1], w[2], w[3]});
                store_quad(to.parameters + at, weights);
            } else {
                store_quad(to.master + at, weights);
            }
            if (is_small) {  // its moments count as 0 in the block
                const auto& [m0, m1, m2, m3] = m.values[q];
                const auto& [v0, v1, v2, v3] = v.values[q];
                store_quad(to.small_m + small, Quad<float>{m0, m1, m2, m3});
                store_quad(to.small_v + small, Quad<float>{v0, v1, v2, v3});
#pragma unroll
                for (int e = 0; e < 4; ++e) m.values[q][e] = v.values[q][e] = 0;
            }
        }
        const float new_m_amax = m.greatest(), new_v_amax = v.greatest();
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const std::int64_t at = block * eight_bit_block + 4 * (q * warp_threads + lane);
            m.store<false>(q, to.m + at, new_m_amax, first);
            v.store<true>(q, to.v + at, new_v_amax, second);
        }
        if (lane == 0) {
            to.m_amax[block] = new_m_amax;
            to.v_amax[block] = new_v_amax;
        }
    }
}

// n elements, whole blocks. norm_squared and coefficients are in device memory too. Without `rounding`, parameters are
// rounded to nearest.
template <class X, class Master, class Gradient>
void adamw_8bit(const LaunchContext& on, const EightBitBuffers<X, Master, Gradient>& to, std::int64_t n,
                const double* norm_squared, const AdamWCoefficients* coefficients,
                std::span<const AdamWSegment> segments,
                const std::optional<StochasticRounding>& rounding = {}, int block_threads = 256) {
    constexpr bool may_round = std::is_same_v<X, bf16>,
                   must_round = may_round && std::is_same_v<Master, bf16>;
    check(n % eight_bit_block == 0, "adamw: moments in 8 bits are whole blocks");
    check(block_threads <= 256 && block_threads % warp_threads == 0,
          "adamw: a block has whole warps, at most eight");
    check(rounding ? may_round : !must_round, "adamw: stochastic rounding is of weights in bf16");
    check(!rounding || rounding->first_element % 4 == 0,
          "adamw: the buffer's first element has an index that is a multiple of 4");
    const AdamWSegments all = adamw_segments(segments);
    check(all.count <= block_threads, "adamw: at least as many threads as segments");
    if (segments.empty() || segments.back().end == 0) return;
    EightBitTables tables;
    std::ranges::copy(table_of_first_moments(), tables.first);
    std::ranges::copy(table_of_second_moments(), tables.second);
    const std::int64_t blocks = n / eight_bit_block;
    const auto run = [&]<bool stochastic>() {
        const unsigned grid = streaming_blocks(on.chip, blocks * warp_threads, block_threads, 256 * 3);
        launch(on, adamw_eight_bit_kernel1<X, Master, Gradient, stochastic>, grid, block_threads, 0, to,
               norm_squared, coefficients, all, tables, rounding.value_or(StochasticRounding{}), blocks);
    };
    rounding ? run.template operator()<may_round>() : run.template operator()<must_round>();
}

}  // namespace llmc::cuda
