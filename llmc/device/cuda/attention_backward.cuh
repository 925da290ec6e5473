// Causal attention backward in the manner of FlashAttention (ops.h: attention_backward). It recomputes the
// probabilities, a tile at a time, from the scores and the log-sum-exp of the forward pass. No (T,T) matrix
// is stored. The kernels for bf16 and fp16 run on tensor cores; the fp32 kernels are in
// attention_backward_fp32.cuh. The development of these kernels is in dev/attention_backward.cu.
//
// dq sums over keys; dk and dv sum over queries. A block that computed all three would add to other blocks'
// results with atomics, in an order that changes from run to run. So there are two kernels. Each owns its
// results and sums them in a fixed order:
//   queries:  s = q k^T, dp = dout v^T, dq += ds k         3 products, over the keys up to the diagonal
//   keys:     s, dp again, dv += p^T dout, dk += ds^T q    4 products, over the queries from the diagonal on
// These are 7 products instead of 5. With equally busy tensor cores, the speed is 5/7 of that of a kernel
// with atomics. The advantages:
// - There is no dq in fp32 that is accumulated in memory and converted later.
// - There is a block for each 128 rows (64 at head size 128) for any batch. A kernel with one block per head,
//   which adds in order, needs as many heads as the GPU has multiprocessors (kernel 4 in
//   dev/attention_backward.cu).
// - p and ds stay in registers, as described below.
//
// Each warp works alone on its 32 rows (16 at head size 128). It computes the scores of these rows, which the
// keys kernel computes transposed. The registers of p and ds are then already the
// first operand of the next product. They never go through shared memory, and the only barrier is the one
// that protects the moving tile. With 32 rows, each operand read from shared memory serves two products.
//
// A 16x8x16 multiplication takes 2 cycles of an A100's multiprocessor. Reading its second operand (256 bytes)
// takes 2 cycles too. This gives the following cycles of reading per cycle of multiplying. They include reads
// of the warp's own rows that are not in registers.
//   head size  64: 0.75 in the keys kernel, 0.5 in the queries kernel
//   head size 128: 1.1 and 1.0
// A kernel of 5 products that exchanges p and ds through shared memory has about 1.
//
// The queries kernel also computes D_t = dout_t . out_t and stores it for the keys kernel, since it has dout
// at hand. A kernel of its own would read dout and out just for it; at T = 1024 that costs a few percent of
// the total.
//
// A multiprocessor runs two blocks, 8 warps with up to 255 registers per thread: the whole register file. A
// block has 16 to 64.5 KB of shared memory. Both blocks fit on sm_80 and sm_90; at head size 128 only one
// fits on sm_86.
#pragma once

#include "llmc/device/cuda/attention_backward_fp32.cuh"
#include "llmc/device/cuda/attention_backward_parts.cuh"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

// A block owns a tile of queries and goes over the keys that these attend to.
template <class X, int columns>
__global__ void __launch_bounds__(128, 2)
    attention_backward_queries_kernel5(RowHeads<X> dq_rows, float* row_values, const X* dout,
                                       QueryKeyValue<const X> qkv, const X* out, const float* lse,
                                       AttentionSizes s, float scale) {
    using T = AttentionBackwardTiling<X, columns>;
    const int b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y), head = b * s.heads + h;
    // The last queries see the most keys. Their blocks start first, so that the last blocks to run are short.
    const int first = static_cast<int>(gridDim.x - 1 - blockIdx.x) * T::owned;
    const int row = own_warp() * T::warp_rows, query = first + row;  // the warp's first

    SharedAllocator shared;
    X* const stages = shared.take<X>(2 * T::stages * T::Moving::elements);
    const auto keys = [&](int stage) { return typename T::Moving{stages + 2 * stage * T::Moving::elements}; };
    const auto values = [&](int stage) {
        return typename T::Moving{stages + (2 * stage + 1) * T::Moving::elements};
    };
    using Copy = TileCopy<X, T::threads, columns>;
    const int begin = s.first_key(first) / T::step * T::step, key_head = s.key_head(h);
    Copy copy_k(head_of(qkv.k, s, b, key_head), begin, s.sequence, s.head_size);
    Copy copy_v(head_of(qkv.v, s, b, key_head), begin, s.sequence, s.head_size);
    const auto load_next = [&](int stage) {
        copy_k.start(keys(stage));
        copy_v.rows_left = copy_k.rows_left;  // one register for both
        copy_v.start(values(stage));
        copy_k.advance(T::step);
        copy_v.advance(T::step);
        copy_async_commit();
    };
    load_next(0);

    // Registers hold the warp's queries (q) and their dout (g).
    typename T::Rows q, g;
    float log2_sum[T::row_blocks][2], d[T::row_blocks][2];  // for rows lane / 4 and lane / 4 + 8
#pragma unroll
    for (int m = 0; m < T::row_blocks; ++m) {
        d[m][0] = d[m][1] = 0;
#pragma unroll
        for (int c = 0; c < T::depth; c += 2) {
            Operand o[2];
            load_two_a(q[m][c], q[m][c + 1], head_of(qkv.q, s, b, h), query + 16 * m, 16 * c, s);
            load_two_a(g[m][c], g[m][c + 1], head_of_out(dout, s, b, h), query + 16 * m, 16 * c, s);
            load_two_a(o[0], o[1], head_of_out(out, s, b, h), query + 16 * m, 16 * c, s);
#pragma unroll
            for (int i = 0; i < 8; ++i) d[m][i % 2] += dot_pairs<X>(g[m][c + i / 4][i % 4], o[i / 4][i % 4]);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int t = query + 16 * m + own_lane() / 4 + 8 * i;
            d[m][i] = row_reduce(d[m][i], Sum{});
            // A query past the end of the sequence has no probabilities.
            log2_sum[m][i] = t < s.sequence ? lse[std::int64_t{head} * s.sequence + t] * log2_e : INFINITY;
            if (own_lane() % 4 == 0) {
                float* const to = row_values + T::row_value_index(s, head, t);
                to[0] = log2_sum[m][i];
                to[1] = d[m][i];
            }
        }
    }

    typename T::Sums dq = {};
    const int end = min(s.sequence, first + T::owned);
    for (int key = begin, stage = 0; key < end; key += T::step, stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();
        if (key + T::step < end) load_next(stage ^ 1);
        if (key >= query + T::warp_rows || query >= s.sequence) continue;
        if (key + T::step + s.window <= query + 1)
            continue;  // passed by the windows of all the warp's queries

        typename T::Scores p = {}, ds = {};
        score_products<T>(
            p, [&](Operand& a, int m, int c, int) { copy_operand(a, q[m][c]); }, keys(stage));
        score_products<T>(
            ds, [&](Operand& a, int m, int c, int) { copy_operand(a, g[m][c]); }, values(stage));
        // On the diagonal, or where some keys have left a window
        if (key + T::step > query + 1 || key + s.window < query + T::warp_rows) {
            for_each_score<T>([&](int m, int n, int j, int i) {
                if (!sees(query + 16 * m + block_row(i), key + 16 * n + block_column(j, i), s.window))
                    p[m][n][j][i] = -INFINITY;
            });
        }
        for_each_score<T>([&](int m, int n, int j, int i) {
            const float x = exp2_approximate(p[m][n][j][i] * scale - log2_sum[m][i / 2]);
            ds[m][n][j][i] = x * (ds[m][n][j][i] - d[m][i / 2]);
        });
        add_products<T>(dq, ds, keys(stage));
    }

    __syncthreads();  // before the tiles' memory is used for the result
    static_assert(T::Owned::elements <= 2 * T::stages * T::Moving::elements);
    store_sums<T>(head_of(dq_rows, s, b, h), first, s, dq, scale * ln_2, typename T::Owned{stages}, row);
}

// A block owns a tile of keys and goes over the queries that attend to them: those of the first query head
// that shares the keys, then those of the next one. Scores are transposed here: a row belongs to a key.
template <class X, int columns>
__global__ void __launch_bounds__(128, 2)
    attention_backward_keys_kernel5(RowHeads<X> dk_rows, RowHeads<X> dv_rows, const float* row_values,
                                    const X* dout, QueryKeyValue<const X> qkv, AttentionSizes s,
                                    float scale) {
    using T = AttentionBackwardTiling<X, columns>;
    const int b = static_cast<int>(blockIdx.z), key_head = static_cast<int>(blockIdx.y);
    const int first = static_cast<int>(blockIdx.x) * T::owned;
    const int thread = static_cast<int>(threadIdx.x);
    const int row = own_warp() * T::warp_rows, key = first + row;  // the warp's first

    SharedAllocator shared;
    const typename T::Owned keys{shared.take<X>(T::Owned::elements)};
    const typename T::Owned values{shared.take<X>(T::Owned::elements)};
    X* const stages = shared.take<X>(2 * T::stages * T::Moving::elements);
    float* const row_stages = shared.take<float>(2 * T::stages * T::step);
    const auto queries = [&](int stage) {
        return typename T::Moving{stages + 2 * stage * T::Moving::elements};
    };
    const auto douts = [&](int stage) {
        return typename T::Moving{stages + (2 * stage + 1) * T::Moving::elements};
    };
    const auto rows = [&](int stage) { return row_stages + 2 * stage * T::step; };

    using Copy = TileCopy<X, T::threads, columns>;
    int h = key_head * s.group();
    Copy copy_q(head_of(qkv.q, s, b, h), first, s.sequence, s.head_size);
    Copy copy_dout(head_of_out(dout, s, b, h), first, s.sequence, s.head_size);
    const float* copy_rows = row_values + T::row_value_index(s, b * s.heads + h, first) + 4 * thread;
    const auto load_next = [&](int stage) {
        copy_q.start(queries(stage));
        copy_dout.rows_left = copy_q.rows_left;  // one register for both
        copy_dout.start(douts(stage));
        if (thread < T::step / 2) copy_async_16(rows(stage) + 4 * thread, copy_rows, true);
        copy_q.advance(T::step);
        copy_dout.advance(T::step);
        copy_rows += 2 * T::step;
        copy_async_commit();
    };

    load_tile<T::threads>(keys, head_of(qkv.k, s, b, key_head), first, s.sequence, s.head_size);
    load_tile<T::threads>(values, head_of(qkv.v, s, b, key_head), first, s.sequence, s.head_size);
    load_next(0);

    // If registers suffice, they hold the warp's keys.
    constexpr bool held = T::row_blocks == 1;
    typename T::Rows k;
    if constexpr (held) {
        copy_async_wait<0>();
        __syncthreads();
#pragma unroll
        for (int c = 0; c < T::depth; ++c) load_a(k[0][c], keys, row, 16 * c);
    }

    typename T::Sums dk = {}, dv = {};
    // The last key's window ends here.
    const int end = min(s.sequence, first + T::owned - 1 + s.window);
    for (int query = first, stage = 0; query < end; stage ^= 1) {
        copy_async_wait<0>();
        __syncthreads();
        const int own_query = query;
        query += T::step;
        if (query >= end && ++h < (key_head + 1) * s.group()) {
            query = first;
            copy_q = Copy(head_of(qkv.q, s, b, h), first, s.sequence, s.head_size);
            copy_dout = Copy(head_of_out(dout, s, b, h), first, s.sequence, s.head_size);
            copy_rows = row_values + T::row_value_index(s, b * s.heads + h, first) + 4 * thread;
        }
        if (query < end) load_next(stage ^ 1);
        if (own_query + T::step <= key || key >= s.sequence) continue;
        if (key + T::warp_rows + s.window <= own_query + 1) continue;  // all keys of the warp have left

        typename T::Scores p = {}, ds = {};
        score_products<T>(
            p,
            [&](Operand& a, int m, int c, int lane) {
                held ? copy_operand(a, k[m][c]) : load_a(a, keys, row + 16 * m, 16 * c, lane);
            },
            queries(stage));
        score_products<T>(
            ds, [&](Operand& a, int m, int c, int lane) { load_a(a, values, row + 16 * m, 16 * c, lane); },
            douts(stage));
        // On the diagonal, or where some keys have left a window
        if (key + T::warp_rows > own_query + 1 || key + s.window < own_query + T::step)
            hide_transposed<T>(p, key, own_query, s.window);
        weigh_transposed<T>(p, ds, rows(stage), scale);
        add_products<T>(dv, p, douts(stage));
        add_products<T>(dk, ds, queries(stage));
    }

    // Only this warp has read its rows of the tiles, so it may now write them.
    const int b_again = hidden_from_compiler(blockIdx.z), head_again = hidden_from_compiler(blockIdx.y);
    store_sums<T>(head_of(dk_rows, s, b_again, head_again), first, s, dk, scale * ln_2, keys, row);
    store_sums<T>(head_of(dv_rows, s, b_again, head_again), first, s, dv, 1.0f, values, row);
}

// For head sizes up to `columns`
template <class X, int columns>
void launch_attention_backward(const LaunchContext& on, const QueryKeyValue<X>& dqkv, const X* dout,
                               const QueryKeyValue<const X>& qkv, const X* out, const float* lse,
                               float* row_values, const AttentionSizes& s) {
    using T = AttentionBackwardTiling<X, columns>;
    constexpr std::size_t stages = SharedAllocator::bytes<X>(2 * T::stages * T::Moving::elements);
    constexpr std::size_t owned = 2 * SharedAllocator::bytes<X>(T::Owned::elements);
    constexpr std::size_t rows = SharedAllocator::bytes<float>(2 * T::stages * T::step);
    const auto grid = [&](int heads) {
        return dim3(static_cast<unsigned>(blocks_for(s.sequence, T::owned)), static_cast<unsigned>(heads),
                    static_cast<unsigned>(s.batch));
    };
    launch(on, attention_backward_queries_kernel5<X, columns>, grid(s.heads), T::threads, stages, dqkv.q,
           row_values, dout, qkv, out, lse, s, attention_scale(s));
    launch(on, attention_backward_keys_kernel5<X, columns>, grid(s.key_heads), T::threads,
           owned + stages + rows, dqkv.k, dqkv.v, row_values, dout, qkv, s, attention_scale(s));
}

static_assert(attention_backward_tile ==
              std::max(AttentionBackwardTiling<bf16, 64>::owned, AttentionBackwardTiling<bf16, 128>::owned));
inline std::size_t attention_backward_workspace_bytes(const AttentionSizes& sizes) {
    return attention_backward_workspace_bytes(sizes.all_heads(), sizes.sequence);
}

// dqkv, qkv: heads in rows of any tensors; dout, out X (B,T,H,D); lse fp32 (B,H,T). The workspace has
// attention_backward_workspace_bytes. D is a multiple of 8 up to 128. All addresses are multiples of 16
// bytes.
template <class X>
void attention_backward(const LaunchContext& on, const QueryKeyValue<X>& dqkv, const X* dout,
                        const QueryKeyValue<const X>& qkv, const X* out, const float* lse, void* workspace,
                        const AttentionSizes& sizes) {
    check(sizes.head_size % 8 == 0 && sizes.head_size <= 128,
          "attention: the head size is a multiple of 8 up to 128");
    check(sizes.batch <= 65535 && sizes.heads <= 65535, "attention: at most 65535 sequences and heads");
    auto* const row_values = static_cast<float*>(workspace);
    const auto launch_columns = [&]<int columns>() {
        if constexpr (std::is_same_v<X, float>) {
            launch_plain_attention_backward<columns>(on, dqkv, dout, qkv, out, lse, row_values, sizes);
        } else {
            launch_attention_backward<X, columns>(on, dqkv, dout, qkv, out, lse, row_values, sizes);
        }
    };
    if (sizes.head_size <= 64) {
        launch_columns.template operator()<64>();
    } else {
        launch_columns.template operator()<128>();
    }
}

}  // namespace llmc::cuda
