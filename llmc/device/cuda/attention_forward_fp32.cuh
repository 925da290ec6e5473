// Causal attention forward without tensor cores, all in fp32. attention_forward.cuh uses it for fp32. It is
// also a step in the development of the bf16 kernel (dev/attention_forward.cu).
#pragma once

#include "llmc/device/cuda/attention_tiles.cuh"

namespace llmc::cuda {

// A block computes 64 queries of a head. Block (x, y, z) has head x of sequence y, the last queries first. 16
// neighboring threads share four queries. Each computes 4 x key_rows/16 scores and 4 x columns/16 outputs, so
// that it uses each number from shared memory at least four times. Heads have up to `columns` channels;
// missing ones are read as 0.
template <int columns_, int key_rows_>
struct AttentionForwardFp32Tiling {
    static constexpr int columns = columns_, key_rows = key_rows_, query_rows = 64, threads = 256;
    // The row strides. Rows are padded by four floats, so that 8 rows are in different banks.
    static constexpr int stride = columns + 4, p_stride = key_rows + 4;
    static constexpr std::size_t shared_bytes = SharedAllocator::bytes<float>(query_rows * stride) +
                                                2 * SharedAllocator::bytes<float>(key_rows * stride) +
                                                SharedAllocator::bytes<float>(query_rows * p_stride);
};

namespace detail {

// Loads rows first ... of a head as fp32, with all `threads` of the block.
template <int threads, int rows, int columns, int stride, class X>
__device__ __forceinline__ void load_widened(float* to, HeadRows<const X> from, int first, int sequence,
                                             int head_size) {
    constexpr int pack = Packed<X>::size, packs = columns / pack;
#pragma unroll
    for (int i = 0; i < rows * packs / threads; ++i) {
        const int n = static_cast<int>(threadIdx.x) + i * threads;
        const int row = n / packs, column = n % packs * pack;
        Packed<X> x{};
        if (column < head_size && first + row < sequence) x = load(from.row(first + row) + column);
#pragma unroll
        for (int j = 0; j < pack; j += 4) {
            store(to + row * stride + column + j,
                  Packed<float>{to_float(x[j]), to_float(x[j + 1]), to_float(x[j + 2]), to_float(x[j + 3])});
        }
    }
}

template <class X>
__device__ __forceinline__ void store_four(X* to, const float (&x)[4]) {
    if constexpr (std::is_same_v<X, float>) {
        store(to, Packed<float>{x[0], x[1], x[2], x[3]});
    } else {
        *reinterpret_cast<uint2*>(to) = {pack_pair<X>(x[0], x[1]), pack_pair<X>(x[2], x[3])};
    }
}

// Reduces over the 16 neighboring threads that share queries.
template <class Operation>
__device__ __forceinline__ float half_warp_reduce(float x, Operation operation LLMC_SITE) {
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
        x = operation(x, __shfl_xor_sync(all_lanes, x, distance, warp_threads LLMC_PASS_SITE));
    }
    return x;
}

}  // namespace detail

// `scale`: log2(e) / sqrt(HS)
template <class X, class Tiling>
__global__ void __launch_bounds__(Tiling::threads, 2)
    attention_forward_kernel3(X* out, float* lse, QueryKeyValue<const X> qkv, AttentionSizes sizes,
                              float scale) {
    constexpr int threads = Tiling::threads, columns = Tiling::columns, stride = Tiling::stride,
                  query_rows = Tiling::query_rows, key_rows = Tiling::key_rows, p_stride = Tiling::p_stride;
    constexpr int own_keys = key_rows / 16, own_fours = columns / 64;
    SharedAllocator shared;
    float* const queries = shared.take<float>(query_rows * stride);
    float* const keys = shared.take<float>(key_rows * stride);
    float* const values = shared.take<float>(key_rows * stride);
    float* const probabilities = shared.take<float>(query_rows * p_stride);

    const int h = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.y);
    const int first_query = static_cast<int>(gridDim.z - 1 - blockIdx.z) * query_rows;
    const int column = static_cast<int>(threadIdx.x % 16), row = static_cast<int>(threadIdx.x / 16) * 4;
    const HeadRows<const X> k = head_of(qkv.k, sizes, b, sizes.key_head(h)),
                            v = head_of(qkv.v, sizes, b, sizes.key_head(h));
    detail::load_widened<threads, query_rows, columns, stride>(queries, head_of(qkv.q, sizes, b, h),
                                                               first_query, sizes.sequence, sizes.head_size);

    float sums[4][own_fours][4] = {};  // sum_j p_j v_j
    float sum[4] = {};                 // sum of the probabilities of this thread's keys
    float greatest[4] = {no_score, no_score, no_score, no_score};
    const int keys_seen = min(sizes.sequence, first_query + query_rows);
    for (int first_key = sizes.first_key(first_query) / key_rows * key_rows; first_key < keys_seen;
         first_key += key_rows) {
        __syncthreads();  // the previous tile is no longer needed
        detail::load_widened<threads, key_rows, columns, stride>(keys, k, first_key, sizes.sequence,
                                                                 sizes.head_size);
        detail::load_widened<threads, key_rows, columns, stride>(values, v, first_key, sizes.sequence,
                                                                 sizes.head_size);
        __syncthreads();

        // The scores of keys column, column + 16, ...
        float scores[4][own_keys] = {};
#pragma unroll 4
        for (int c = 0; c < columns; c += 4) {
            Packed<float> q[4], key[own_keys];
#pragma unroll
            for (int i = 0; i < 4; ++i) q[i] = load(queries + (row + i) * stride + c);
#pragma unroll
            for (int j = 0; j < own_keys; ++j) key[j] = load(keys + (column + 16 * j) * stride + c);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < own_keys; ++j) scores[i][j] = fmaf(q[i][n], key[j][n], scores[i][j]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float larger = greatest[i];
#pragma unroll
            for (int j = 0; j < own_keys; ++j) {
                if (!sees(first_query + row + i, first_key + column + 16 * j, sizes.window))
                    scores[i][j] = -INFINITY;
                larger = fmaxf(larger, scores[i][j]);
            }
            larger = detail::half_warp_reduce(larger, Maximum{});
            const float factor = exp2_approximate((greatest[i] - larger) * scale);
            greatest[i] = larger;
            sum[i] *= factor;
#pragma unroll
            for (int f = 0; f < own_fours; ++f) {
#pragma unroll
                for (int n = 0; n < 4; ++n) sums[i][f][n] *= factor;
            }
#pragma unroll
            for (int j = 0; j < own_keys; ++j) {
                const float p = exp2_approximate((scores[i][j] - larger) * scale);
                sum[i] += p;
                probabilities[(row + i) * p_stride + column + 16 * j] = p;
            }
        }
        __syncwarp();  // the same half of a warp writes and reads a row of probabilities

        // The sums of columns 4 * column ... 4 * column + 3 and, for `columns` = 128, of those 64 to the
        // right
#pragma unroll 2
        for (int j = 0; j < key_rows; j += 4) {
            Packed<float> p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) p[i] = load(probabilities + (row + i) * p_stride + j);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int f = 0; f < own_fours; ++f) {
                    const Packed<float> value = load(values + (j + n) * stride + 64 * f + 4 * column);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
#pragma unroll
                        for (int m = 0; m < 4; ++m) sums[i][f][m] = fmaf(p[i][n], value[m], sums[i][f][m]);
                    }
                }
            }
        }
    }

    const HeadRows<X> to = head_of_out(out, sizes, b, h);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float whole = detail::half_warp_reduce(sum[i], Sum{});
        const float reciprocal = 1 / whole;
        const int query = first_query + row + i;
        if (query >= sizes.sequence) continue;
        if (column == 0) {
            lse[(std::int64_t{b} * sizes.heads + h) * sizes.sequence + query] =
                greatest[i] * scale * ln_2 + logf(whole);
        }
#pragma unroll
        for (int f = 0; f < own_fours; ++f) {
#pragma unroll
            for (int n = 0; n < 4; ++n) sums[i][f][n] *= reciprocal;
            const int c = 64 * f + 4 * column;
            if (c < sizes.head_size) detail::store_four(to.row(query) + c, sums[i][f]);
        }
    }
}

template <class X, class Tiling>
void launch_attention_forward_kernel3(const LaunchContext& on, X* out, float* lse,
                                      const QueryKeyValue<const X>& qkv, const AttentionSizes& sizes) {
    const int tiles = blocks_for(sizes.sequence, Tiling::query_rows);
    check(tiles <= 65535 && sizes.batch <= 65535, "attention: at most 65535 tiles and 65535 sequences");
    launch(on, attention_forward_kernel3<X, Tiling>,
           dim3(static_cast<unsigned>(sizes.heads), static_cast<unsigned>(sizes.batch),
                static_cast<unsigned>(tiles)),
           Tiling::threads, Tiling::shared_bytes, out, lse, qkv, sizes, attention_scale(sizes));
}

// Same parameters as attention_forward (attention_forward.cuh).
template <class X>
void attention_forward_without_tensor_cores(const LaunchContext& on, X* out, float* lse,
                                            const QueryKeyValue<const X>& qkv, const AttentionSizes& sizes) {
    if (sizes.head_size <= 64) {
        launch_attention_forward_kernel3<X, AttentionForwardFp32Tiling<64, 64>>(on, out, lse, qkv, sizes);
    } else {
        launch_attention_forward_kernel3<X, AttentionForwardFp32Tiling<128, 32>>(on, out, lse, qkv, sizes);
    }
}

}  // namespace llmc::cuda
