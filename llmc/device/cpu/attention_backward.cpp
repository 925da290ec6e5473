// Causal attention, backward. It recomputes the probabilities from the scores and the log-sum-exp, for a
// block of queries and a block of keys at a time (Dao et al., 2022). One thread does a whole key head with
// the query heads that share it, so that the gradients of its keys and values are summed in a fixed order.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/attention_head.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

// A head's keys and values, their gradients, and the scratch memory of a block of queries. The right-hand
// matrices of products are in panels (head_tiles.h).
template <class E>
struct BackwardScratch {
    BackwardScratch(float* memory, const AttentionSizes& s) {
        Scratch scratch(memory);
        for (E** head : {&keys, &keys_panels, &values}) *head = scratch.take<E>(s.head_elements());
        for (float** head : {&dkeys, &dvalues}) *head = scratch.take<float>(s.head_elements());
        for (E** block : {&rows, &queries_transposed, &queries_panels, &dout_transposed, &dout_panels}) {
            *block = scratch.take<E>(query_block * s.padded_head());
        }
        dqueries = scratch.take<float>(query_block * s.padded_head());
        for (float** block : {&probabilities, &dscores}) {
            *block = scratch.take<float>(query_block * key_block);
        }
        for (E** block : {&left_probabilities, &left_dscores}) {
            *block = scratch.take<E>(query_block * key_block);
        }
    }

    E *keys, *keys_panels, *values;
    float *dkeys, *dvalues;
    E* rows;  // plain copies: first queries, then dout
    E *queries_transposed, *queries_panels;
    E *dout_transposed, *dout_panels;
    float* dqueries;
    float* probabilities;  // first q . k, then the probabilities
    float* dscores;        // first dout . v, then the scores' gradient
    E *left_probabilities,
        *left_dscores;  // in bf16, the rounded copies that left_hand() and left_hand_transposed() make
};

// The tensors of a query head.
template <class X>
struct HeadTensors {
    HeadRows<const X> q, out, dout;
    HeadRows<X> dq;
    const float* lse;
};

// Stores `factor` times the rows of a matrix in rows [first, first + count) of a head.
template <class X>
void store_rows(HeadRows<X> to, const float* from, const AttentionSizes& s, std::int64_t first,
                std::int64_t count, float factor) {
    for (std::int64_t t = 0; t < count; ++t) {
        X* row = to.row(first + t);
        const float* values = from + t * s.padded_head();
#pragma omp simd
        for (std::int64_t c = 0; c < s.head_size; ++c) row[c] = from_float<X>(values[c] * factor);
    }
}

// The log-sum-exp and D of each query in a block.
struct QueryBlock {
    float lse[query_block] = {};
    float d[query_block] = {};  // D_t = dout_t . out_t
};

// Turns one key's row of products into probabilities (from q . k) and the scores' gradient (from dout . v).
// Queries that do not see the key get 0 in both.
void backward_scores(float* probabilities, float* dscores, const ScoreBlock& block, std::int64_t row,
                     const QueryBlock& queries, float scale) {
#pragma omp simd
    for (std::int64_t i = 0; i < block.queries; ++i) {
        probabilities[i] = exponential(std::fma(probabilities[i], scale, -queries.lse[i]));
        dscores[i] = probabilities[i] * (dscores[i] - queries.d[i]);
    }
    block.hide(probabilities, row, 0.0F);
    block.hide(dscores, row, 0.0F);
}

template <class X, class E>
void backward_block(const HeadTensors<X>& head, const BackwardScratch<E>& scratch, const AttentionSizes& s,
                    std::int64_t query) {
    const std::int64_t count = std::min(query_block, s.sequence - query);
    const std::int64_t rows = round_up(count, panel_width);
    const std::int64_t columns = s.padded_head();
    copy_rows(scratch.rows, head.q, s, query, count);
    copy_transposed_panels(scratch.queries_transposed, scratch.rows, rows, columns);
    copy_panels(scratch.queries_panels, query_block, scratch.rows, rows, columns);
    copy_rows(scratch.rows, head.dout, s, query, count);
    copy_transposed_panels(scratch.dout_transposed, scratch.rows, rows, columns);
    copy_panels(scratch.dout_panels, query_block, scratch.rows, rows, columns);
    std::fill_n(scratch.dqueries, query_block * columns, 0.0F);
    QueryBlock queries;
    for (std::int64_t i = 0; i < count; ++i) {
        queries.lse[i] = head.lse[query + i];
        queries.d[i] = lane_sum<float>(
            s.head_size, [dout = head.dout.row(query + i), out = head.out.row(query + i)](std::int64_t c) {
                return to_float(dout[c]) * to_float(out[c]);
            });
    }

    for_key_blocks(s, query, count, [&](const ScoreBlock& block) {
        multiply<false>(scratch.probabilities, query_block,
                        plain(scratch.keys + block.key * columns, columns), scratch.queries_transposed,
                        columns, block.keys, block.queries, columns);
        multiply<false>(scratch.dscores, query_block, plain(scratch.values + block.key * columns, columns),
                        scratch.dout_transposed, columns, block.keys, block.queries, columns);
        for (std::int64_t j = 0; j < block.keys; ++j) {
            backward_scores(scratch.probabilities + j * query_block, scratch.dscores + j * query_block, block,
                            j, queries, s.scale());
        }
        multiply<true>(scratch.dvalues + block.key * columns, columns,
                       left_hand(scratch.left_probabilities, scratch.probabilities, query_block, block.keys,
                                 block.queries),
                       scratch.dout_panels, query_block, block.keys, columns, block.queries);
        multiply<true>(
            scratch.dkeys + block.key * columns, columns,
            left_hand(scratch.left_dscores, scratch.dscores, query_block, block.keys, block.queries),
            scratch.queries_panels, query_block, block.keys, columns, block.queries);
        multiply<true>(scratch.dqueries, columns,
                       left_hand_transposed(scratch.left_dscores, scratch.dscores, query_block, block.keys,
                                            block.queries),
                       scratch.keys_panels + block.key * panel_width, s.padded_sequence(), block.queries,
                       columns, block.keys);
    });
    store_rows(head.dq, scratch.dqueries, s, query, count, s.scale());
}

}  // namespace

std::int64_t backward_scratch_floats(const AttentionSizes& s) {
    return 5 * s.head_elements() + query_block * (6 * s.padded_head() + 4 * key_block);
}

void CpuOps::compute(const AttentionBackward& op, const AttentionShape& sizes) {
    const AttentionSizes s = attention_sizes(sizes);
    const std::int64_t floats = backward_scratch_floats(s);
    float* const memory = workspace(threads_ * floats);
    with_elements(op.out.dtype, native_bf16_, [&](auto x, auto e) {
        using X = decltype(x);
        using E = decltype(e);
        parallel_tasks(threads_, s.batch * s.key_heads, [&](std::int64_t task, int thread) {
            const std::int64_t b = task / s.key_heads;
            const std::int64_t key_head = task % s.key_heads;
            const BackwardScratch<E> scratch(memory + thread * floats, s);
            copy_rows(scratch.keys, head_of<const X>(op.k, s, b, key_head), s, 0, s.sequence);
            copy_panels(scratch.keys_panels, s.padded_sequence(), scratch.keys, s.padded_sequence(),
                        s.padded_head());
            copy_rows(scratch.values, head_of<const X>(op.v, s, b, key_head), s, 0, s.sequence);
            std::fill_n(scratch.dkeys, s.head_elements(), 0.0F);
            std::fill_n(scratch.dvalues, s.head_elements(), 0.0F);
            for (std::int64_t h = key_head * s.group(); h < (key_head + 1) * s.group(); ++h) {
                const HeadTensors<X> head{
                    head_of<const X>(op.q, s, b, h), head_of<const X>(op.out.as<X>(), s, b, h),
                    head_of<const X>(op.dout.as<X>(), s, b, h), head_of<X>(op.dq, s, b, h),
                    op.lse.as<float>() + (b * s.heads + h) * s.sequence};
                for (std::int64_t query = 0; query < s.sequence; query += query_block) {
                    backward_block(head, scratch, s, query);
                }
            }
            store_rows(head_of<X>(op.dk, s, b, key_head), scratch.dkeys, s, 0, s.sequence, s.scale());
            store_rows(head_of<X>(op.dv, s, b, key_head), scratch.dvalues, s, 0, s.sequence, 1.0F);
        });
    });
}

}  // namespace llmc::cpu
