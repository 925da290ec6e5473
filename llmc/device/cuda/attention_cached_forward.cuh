// Causal attention of new rows against a cache of keys and values, for generation. It reads the cache once
// and does few operations per byte. Memory is thus the limit, and tensor cores would not help: all arithmetic
// is in fp32. attention_forward.cuh is for whole sequences.
#pragma once

#include "llmc/device/cuda/attention_tiles.cuh"

namespace llmc::cuda {

// q of H heads and k, v of K heads in n rows; cache (T,2,K,D), out (n,H,D). The cache has `position` rows
// before the new ones. A row sees at most `window` keys.
struct CachedAttentionSizes {
    int rows, position, heads, head_size;
    int key_heads = heads;
    int window = position + rows;  // hides nothing

    __host__ __device__ int group() const { return heads / key_heads; }
};

// For head sizes up to `columns`. A group of lanes reads a row of a head, 16 bytes per lane. The groups of a
// block take the keys in turn. Each group has its own running softmax; these are combined at the end.
template <class X, int columns_>
struct CachedAttentionTiling {
    static constexpr int columns = columns_, threads = 256, warps = threads / warp_threads;
    static constexpr int group = columns / Packed<X>::size, groups_of_warp = warp_threads / group;
    static constexpr int groups = threads / group;
    // Keys whose loads a group has in flight.
    static constexpr int in_flight = 4;
};

namespace detail {

// The softmax over some keys: sum_j p_j and sum_j p_j v_j with p_j = 2^(s_j - greatest). Without keys,
// `greatest` is -infinity.
template <int columns>
struct PartialSoftmax {
    float greatest = -INFINITY, sum = 0;
    float values[columns] = {};

    // The factor that rescales a part's sums from its maximum `greatest` to `larger`, a maximum at least as
    // large.
    __device__ __forceinline__ static float factor(float greatest, float larger) {
        return greatest == -INFINITY ? 0 : exp2_approximate(greatest - larger);
    }

    __device__ __forceinline__ void add_key(float score, const float (&value)[columns]) {
        const float larger = fmaxf(greatest, score);
        const float earlier = factor(greatest, larger), p = exp2_approximate(score - larger);
        greatest = larger;
        sum = fmaf(sum, earlier, p);
#pragma unroll
        for (int c = 0; c < columns; ++c) values[c] = fmaf(values[c], earlier, p * value[c]);
    }

    // Combines this lane's part with that of the lane at this distance, which does the same.
    __device__ __forceinline__ void join_lane(int distance LLMC_SITE) {
        const float other = __shfl_xor_sync(all_lanes, greatest, distance, warp_threads LLMC_PASS_SITE);
        const float larger = fmaxf(greatest, other);
        const float own = factor(greatest, larger), of_other = factor(other, larger);
        greatest = larger;
        sum =
            fmaf(sum, own, __shfl_xor_sync(all_lanes, sum, distance, warp_threads LLMC_PASS_SITE) * of_other);
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            values[c] =
                fmaf(values[c], own,
                     __shfl_xor_sync(all_lanes, values[c], distance, warp_threads LLMC_PASS_SITE) * of_other);
        }
    }
};

template <class X>
__device__ __forceinline__ void widen(float (&to)[Packed<X>::size], const Packed<X>& from) {
#pragma unroll
    for (int c = 0; c < Packed<X>::size; ++c) to[c] = to_float(from[c]);
}

}  // namespace detail

// Block (x, y) computes head x of row y. It takes the new keys from qkv, so it need not wait for other blocks
// to put them into the cache. Neighboring heads that share keys run at the same time: memory is read once,
// and the L2 cache serves the others. `scale` is log2(e) / sqrt(D).
template <class X, int columns>
__global__ void __launch_bounds__(CachedAttentionTiling<X, columns>::threads)
    attention_cached_forward_kernel2(X* out, X* cache, QueryKeyValue<const X> qkv, CachedAttentionSizes sizes,
                                     float scale) {
    using Tiling = CachedAttentionTiling<X, columns>;
    constexpr int pack = Packed<X>::size, group = Tiling::group, in_flight = Tiling::in_flight;
    SHARED(float, greatest_of_warps, [Tiling::warps]);
    SHARED(float, sums_of_warps, [Tiling::warps]);
    SHARED(float, values_of_warps, [Tiling::warps * columns]);

    const int head = static_cast<int>(blockIdx.x), row = static_cast<int>(blockIdx.y);
    const int lane = own_lane(), warp = own_warp();
    const int column = lane % group * pack;
    const bool has_columns = column < sizes.head_size;
    const int key_head = head / sizes.group();
    const int stride = sizes.key_heads * sizes.head_size, place = key_head * sizes.head_size + column;
    // A key's row of `part`, which is 0 (keys) or 1 (values) in the cache; `rows` has the new ones.
    const auto row_of = [&](int key, int part, const RowHeads<const X>& rows) {
        return key < sizes.position ? cache + (std::int64_t{key} * 2 + part) * stride + place
                                    : rows.first + std::int64_t{key - sizes.position} * rows.stride + place;
    };

    Packed<X> packed_query{};
    if (has_columns)
        packed_query = load(qkv.q.first + std::int64_t{row} * qkv.q.stride + head * sizes.head_size + column);
    const int own_key = sizes.position + row;
    // The first of the heads that share keys stores them.
    if (warp == 0 && lane < group && has_columns && head % sizes.group() == 0) {
        X* const kept = cache + std::int64_t{own_key} * 2 * stride + place;
        store(kept, load(row_of(own_key, 0, qkv.k)));
        store(kept + stride, load(row_of(own_key, 1, qkv.v)));
    }
    float query[pack];
    detail::widen(query, packed_query);
#pragma unroll
    for (int c = 0; c < pack; ++c) query[c] *= scale;

    const int keys = own_key + 1;
    detail::PartialSoftmax<pack> softmax;
    // All lanes of a warp do the same number of rounds, even if some have no key left, since their shuffles
    // add up the parts of a score.
    for (int first = max(0, keys - sizes.window) + warp * Tiling::groups_of_warp; first < keys;
         first += in_flight * Tiling::groups) {
        Packed<X> key[in_flight], value[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; ++i) {
            const int j = first + i * Tiling::groups + lane / group;
            key[i] = value[i] = {};
            if (j < keys && has_columns) {
                key[i] = load(row_of(j, 0, qkv.k));
                value[i] = load(row_of(j, 1, qkv.v));
            }
        }
#pragma unroll
        for (int i = 0; i < in_flight; ++i) {
            float wide[pack], score = 0;
            detail::widen(wide, key[i]);
#pragma unroll
            for (int c = 0; c < pack; ++c) score = fmaf(query[c], wide[c], score);
#pragma unroll
            for (int distance = group / 2; distance > 0; distance /= 2) {
                score += __shfl_xor_sync(all_lanes, score, distance);
            }
            detail::widen(wide, value[i]);
            if (first + i * Tiling::groups + lane / group < keys) softmax.add_key(score, wide);
        }
    }

#pragma unroll
    for (int distance = group; distance < warp_threads; distance *= 2) softmax.join_lane(distance);
    if (lane < group) {
#pragma unroll
        for (int c = 0; c < pack; ++c) values_of_warps[warp * columns + column + c] = softmax.values[c];
        if (lane == 0) {
            greatest_of_warps[warp] = softmax.greatest;
            sums_of_warps[warp] = softmax.sum;
        }
    }
    __syncthreads();

    const int c = static_cast<int>(threadIdx.x);
    if (c >= sizes.head_size) return;
    float greatest = -INFINITY, sum = 0, value = 0;
#pragma unroll
    for (int w = 0; w < Tiling::warps; ++w) greatest = fmaxf(greatest, greatest_of_warps[w]);
#pragma unroll
    for (int w = 0; w < Tiling::warps; ++w) {
        const float factor = detail::PartialSoftmax<pack>::factor(greatest_of_warps[w], greatest);
        sum = fmaf(sums_of_warps[w], factor, sum);
        value = fmaf(values_of_warps[w * columns + c], factor, value);
    }
    out[(std::int64_t{row} * sizes.heads + head) * sizes.head_size + c] = from_float<X>(value / sum);
}

// As in ops.h. D is a multiple of 8 up to 128; there are at most 65535 new rows.
template <class X>
void attention_cached_forward(const LaunchContext& on, X* out, X* cache, const QueryKeyValue<const X>& qkv,
                              const CachedAttentionSizes& sizes) {
    const int head_size = sizes.head_size;
    check(head_size % 8 == 0 && head_size <= 128, "attention: the head size is a multiple of 8 up to 128");
    check(sizes.rows <= 65535, "attention: at most 65535 new rows");
    const float scale = log2_e / std::sqrt(static_cast<float>(head_size));
    const auto run = [&]<int columns>() {
        launch(on, attention_cached_forward_kernel2<X, columns>,
               dim3(static_cast<unsigned>(sizes.heads), static_cast<unsigned>(sizes.rows)),
               CachedAttentionTiling<X, columns>::threads, 0, out, cache, qkv, sizes, scale);
    };
    if (head_size <= 32) return run.template operator()<32>();
    if (head_size <= 64) return run.template operator()<64>();
    run.template operator()<128>();
}

}  // namespace llmc::cuda
