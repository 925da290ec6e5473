// Causal attention backward without tensor cores, used for fp32 (ops.h: attention_backward). All arithmetic
// is in fp32 whatever X is; the kernel lab also runs it with bf16. attention_backward.cuh says why there are
// two kernels; their development is in dev/attention_backward.cu.
//
// Both kernels hold 32 rows of queries and 32 of keys in shared memory. One of the two stays, and the other
// moves along the sequence. The 256 threads compute the 32x32 scores, 2x2 per thread. Then they sum over the
// scores' rows or columns: a thread has every eighth group of four columns of one row of the result.
#pragma once

#include "llmc/device/cuda/attention_tiles.cuh"

namespace llmc::cuda {

// Rows are padded by four floats. Eight rows that are read at the same column then use different banks.
template <int columns>
struct PlainTile {
    static constexpr int rows = 32, stride = columns + 4;
    static constexpr int elements = rows * stride;
    float* data;

    __device__ __forceinline__ float* row(int r) const { return data + r * stride; }
};

template <int columns>
struct PlainBackward {
    static constexpr int threads = 256, rows = 32;
    static constexpr int pieces = columns / rows;  // groups of four columns that a thread sums
    using Tile = PlainTile<columns>;
    using Scores = PlainTile<rows>;
    using Sums = Packed<float>[pieces];

    // The block's shared memory
    Tile queries, dout, keys, values;
    Scores p, ds;
    float *log2_sum, *row_dots;  // for each query: lse for base 2, and D

    static constexpr std::size_t shared_bytes() {
        return 4 * SharedAllocator::bytes<float>(Tile::elements) +
               2 * SharedAllocator::bytes<float>(Scores::elements) + 2 * SharedAllocator::bytes<float>(rows);
    }
    __device__ __forceinline__ void take(SharedAllocator& shared) {
        for (Tile* tile : {&queries, &dout, &keys, &values}) tile->data = shared.take<float>(Tile::elements);
        for (Scores* scores : {&p, &ds}) scores->data = shared.take<float>(Scores::elements);
        for (float** row : {&log2_sum, &row_dots}) *row = shared.take<float>(rows);
    }

    // Loads rows first ... of a head, with zeros past the end of the sequence and of the head.
    template <class X>
    static __device__ __forceinline__ void load_rows(Tile to, HeadRows<const X> from, int first,
                                                     const AttentionSizes& s) {
        constexpr int pack = Packed<X>::size, packs = columns / pack;
        for (int i = static_cast<int>(threadIdx.x); i < rows * packs; i += threads) {
            const int r = i / packs, c = i % packs * pack;
            Packed<X> x{};
            if (first + r < s.sequence && c < s.head_size) x = load(from.row(first + r) + c);
#pragma unroll
            for (int j = 0; j < pack; j += 4) {
                store(to.row(r) + c + j, Packed<float>{to_float(x[j]), to_float(x[j + 1]), to_float(x[j + 2]),
                                                       to_float(x[j + 3])});
            }
        }
    }

    // The thread's 2x2 elements of a b^T: rows i, i + 16 of a and j, j + 16 of b
    static __device__ __forceinline__ void dot_products(float (&sums)[2][2], Tile a, Tile b) {
        const int i = static_cast<int>(threadIdx.x) / 16, j = static_cast<int>(threadIdx.x) % 16;
#pragma unroll 4
        for (int c = 0; c < columns; c += 4) {
            const Packed<float> x[2] = {load(a.row(i) + c), load(a.row(i + 16) + c)};
            const Packed<float> y[2] = {load(b.row(j) + c), load(b.row(j + 16) + c)};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
#pragma unroll
                for (int m = 0; m < 4; ++m) sums[m / 2][m % 2] += x[m / 2][n] * y[m % 2][n];
            }
        }
    }

    // p = exp(s - lse) and ds = p (dout . v - D), or 0 if the query does not see the key
    __device__ __forceinline__ void make_scores(int query, int key, int window, float scale) const {
        float s[2][2] = {}, dp[2][2] = {};
        dot_products(s, queries, keys);
        dot_products(dp, dout, values);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int i = static_cast<int>(threadIdx.x) / 16 + m / 2 * 16;
            const int j = static_cast<int>(threadIdx.x) % 16 + m % 2 * 16;
            const float probability = sees(query + i, key + j, window)
                                          ? exp2_approximate(s[m / 2][m % 2] * scale - log2_sum[i])
                                          : 0.0f;
            p.row(i)[j] = probability;
            ds.row(i)[j] = probability * (dp[m / 2][m % 2] - row_dots[i]);
        }
    }

    // The thread's row of the sums, and its first column
    static __device__ __forceinline__ int sum_row() { return static_cast<int>(threadIdx.x) / 8; }
    static __device__ __forceinline__ int sum_column() { return static_cast<int>(threadIdx.x) % 8 * 4; }

    // sums += the thread's row of the weights, or of their transpose, times the matrix
    template <bool transposed>
    static __device__ __forceinline__ void add_products(Sums& sums, Scores weights, Tile matrix) {
        const int r = sum_row();
#pragma unroll 4
        for (int k = 0; k < rows; ++k) {
            const float weight = transposed ? weights.row(k)[r] : weights.row(r)[k];
#pragma unroll
            for (int n = 0; n < pieces; ++n) {
                const Packed<float> x = load(matrix.row(k) + sum_column() + n * rows);
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[n][i] += weight * x[i];
            }
        }
    }

    template <class X>
    static __device__ __forceinline__ void store_sums(HeadRows<X> to, int first, const AttentionSizes& s,
                                                      const Sums& sums, float factor) {
        const int t = first + sum_row();
        if (t >= s.sequence) return;
#pragma unroll
        for (int n = 0; n < pieces; ++n) {
            const int c = sum_column() + n * rows;
            if (c >= s.head_size) continue;
            Quad<X> four;
#pragma unroll
            for (int i = 0; i < 4; ++i) four[i] = from_float<X>(sums[n][i] * factor);
            store_quad(to.row(t) + c, four);
        }
    }
};

// A block owns 32 queries. It computes D_t = dout_t . out_t, which it stores in row_dots for the other
// kernel, then dq_t = scale sum_j ds_tj k_j.
template <int columns, class X>
__global__ void __launch_bounds__(256, 1)
    attention_backward_queries_kernel2(RowHeads<X> dq_rows, float* row_dots, const X* dout,
                                       QueryKeyValue<const X> qkv, const X* out, const float* lse,
                                       AttentionSizes s, float scale) {
    using Plain = PlainBackward<columns>;
    const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y), head = b * s.heads + h;
    // The last queries see the most keys; their blocks start first.
    const int query = static_cast<int>(gridDim.x - 1 - blockIdx.x) * Plain::rows;
    SharedAllocator shared;
    Plain block;
    block.take(shared);

    Plain::load_rows(block.queries, head_of(qkv.q, s, b, h), query, s);
    Plain::load_rows(block.dout, head_of_out(dout, s, b, h), query, s);
    __syncthreads();
    {
        const int r = Plain::sum_row(), t = query + r;
        const X* const o = head_of_out(out, s, b, h).row(t);
        const std::int64_t place = std::int64_t{head} * s.sequence + t;
        float d = 0;
        if (t < s.sequence) {
            for (int c = Plain::sum_column(); c < s.head_size; c += Plain::rows) {
                const Packed<float> g = load(block.dout.row(r) + c);
                const Quad<X> four = load_quad(o + c);
#pragma unroll
                for (int i = 0; i < 4; ++i) d += g[i] * to_float(four[i]);
            }
        }
#pragma unroll
        for (int distance = 4; distance > 0; distance /= 2) d += __shfl_xor_sync(all_lanes, d, distance);
        if (threadIdx.x % 8 == 0) {
            block.row_dots[r] = d;
            // A query past the end of the sequence has no probabilities.
            block.log2_sum[r] = t < s.sequence ? lse[place] * log2_e : INFINITY;
            if (t < s.sequence) row_dots[place] = d;
        }
    }

    typename Plain::Sums dq = {};
    const int key_head = s.key_head(h);
    for (int key = s.first_key(query) / Plain::rows * Plain::rows; key <= query; key += Plain::rows) {
        Plain::load_rows(block.keys, head_of(qkv.k, s, b, key_head), key, s);
        Plain::load_rows(block.values, head_of(qkv.v, s, b, key_head), key, s);
        __syncthreads();
        block.make_scores(query, key, s.window, scale);
        __syncthreads();
        Plain::template add_products<false>(dq, block.ds, block.keys);
        __syncthreads();
    }
    Plain::store_sums(head_of(dq_rows, s, b, h), query, s, dq, scale * ln_2);
}

// A block owns 32 keys of a key head: dv_j = sum_t p_tj dout_t, dk_j = scale sum_t ds_tj q_t. The sums go
// over the query heads that share these keys, one after the other.
template <int columns, class X>
__global__ void __launch_bounds__(256, 1)
    attention_backward_keys_kernel2(RowHeads<X> dk_rows, RowHeads<X> dv_rows, const float* row_dots,
                                    const X* dout, QueryKeyValue<const X> qkv, const float* lse,
                                    AttentionSizes s, float scale) {
    using Plain = PlainBackward<columns>;
    const int b = static_cast<int>(blockIdx.z), key_head = static_cast<int>(blockIdx.y);
    const int key = static_cast<int>(blockIdx.x) * Plain::rows;
    SharedAllocator shared;
    Plain block;
    block.take(shared);
    Plain::load_rows(block.keys, head_of(qkv.k, s, b, key_head), key, s);
    Plain::load_rows(block.values, head_of(qkv.v, s, b, key_head), key, s);

    typename Plain::Sums dk = {}, dv = {};
    const int end = min(s.sequence, key + Plain::rows - 1 + s.window);
    for (int h = key_head * s.group(); h < (key_head + 1) * s.group(); ++h) {
        for (int query = key; query < end; query += Plain::rows) {
            Plain::load_rows(block.queries, head_of(qkv.q, s, b, h), query, s);
            Plain::load_rows(block.dout, head_of_out(dout, s, b, h), query, s);
            if (threadIdx.x < Plain::rows) {
                const int r = static_cast<int>(threadIdx.x);
                const bool inside = query + r < s.sequence;
                const std::int64_t place = (std::int64_t{b} * s.heads + h) * s.sequence + query + r;
                block.log2_sum[r] = inside ? lse[place] * log2_e : INFINITY;
                block.row_dots[r] = inside ? row_dots[place] : 0.0f;
            }
            __syncthreads();
            block.make_scores(query, key, s.window, scale);
            __syncthreads();
            Plain::template add_products<true>(dv, block.p, block.dout);
            Plain::template add_products<true>(dk, block.ds, block.queries);
            __syncthreads();
        }
    }
    Plain::store_sums(head_of(dk_rows, s, b, key_head), key, s, dk, scale * ln_2);
    Plain::store_sums(head_of(dv_rows, s, b, key_head), key, s, dv, 1.0f);
}

// For head sizes up to `columns`; row_dots fp32 (B,H,T) is scratch memory.
template <int columns, class X>
void launch_plain_attention_backward(const LaunchContext& on, const QueryKeyValue<X>& dqkv, const X* dout,
                                     const QueryKeyValue<const X>& qkv, const X* out, const float* lse,
                                     float* row_dots, const AttentionSizes& s) {
    using Plain = PlainBackward<columns>;
    const auto grid = [&](int heads) {
        return dim3(static_cast<unsigned>(blocks_for(s.sequence, Plain::rows)), static_cast<unsigned>(heads),
                    static_cast<unsigned>(s.batch));
    };
    launch(on, attention_backward_queries_kernel2<columns, X>, grid(s.heads), Plain::threads,
           Plain::shared_bytes(), dqkv.q, row_dots, dout, qkv, out, lse, s, attention_scale(s));
    launch(on, attention_backward_keys_kernel2<columns, X>, grid(s.key_heads), Plain::threads,
           Plain::shared_bytes(), dqkv.k, dqkv.v, row_dots, dout, qkv, lse, s, attention_scale(s));
}

}  // namespace llmc::cuda
