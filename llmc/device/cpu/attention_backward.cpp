// Causal attention, backward: the probabilities are made again from the scores and the log-sum-exp, a block
// of queries against a block of keys at a time (Dao et al., 2022). One thread does one head, so that the
// gradients of its keys and values are sums in a fixed order.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/attention_head.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/lane_sum.h"
#include "llmc/device/cpu/operands.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

// A head's keys, values and their gradients, and what a block of queries needs. Matrices that stand on the
// right of a product are in panels (head_tiles.h).
struct BackwardScratch {
    BackwardScratch(float* memory, const AttentionSizes& s) {
        Scratch scratch(memory);
        for (float** head : {&keys, &keys_transposed, &values_transposed, &dkeys, &dvalues}) {
            *head = scratch.take_zeroed(s.head_floats());
        }
        for (float** block : {&queries, &queries_panels, &dout, &dout_panels, &dqueries}) {
            *block = scratch.take(query_block * s.padded_head());
        }
        probabilities = scratch.take(query_block * score_columns);
        dscores = scratch.take(query_block * score_columns);
    }

    float *keys, *keys_transposed, *values_transposed;
    float *dkeys, *dvalues;
    float *queries, *queries_panels;  // times 1 / sqrt(HS)
    float *dout, *dout_panels;
    float* dqueries;
    float* probabilities;
    float* dscores;  // first dout . v, then the gradient of the scores
};

template <class X>
struct HeadTensors {
    HeadRows<const X> q, k, v, out, dout;
    HeadRows<X> dq, dk, dv;
    const float* lse;
};

// One row: scores become probabilities, dout . v the scores' gradient. Keys behind the query get 0 in both.
void backward_scores(float* probabilities, float* dscores, const ScoreBlock& block, std::int64_t row,
                     float lse, float d) {
    const std::int64_t panels = hide_unseen(probabilities, block, row);
#pragma omp simd
    for (std::int64_t j = 0; j < panels; ++j) {
        probabilities[j] = exponential(probabilities[j] - lse);
        dscores[j] = probabilities[j] * (dscores[j] - d);
    }
    std::fill(probabilities + panels, probabilities + block.keys, 0.0F);
    std::fill(dscores + panels, dscores + block.keys, 0.0F);
}

template <class X>
void backward_block(const HeadTensors<X>& head, const BackwardScratch& scratch, const AttentionSizes& s,
                    std::int64_t query) {
    const std::int64_t rows = std::min(query_block, s.sequence - query);
    const std::int64_t columns = s.padded_head();
    const float scale = 1.0F / std::sqrt(static_cast<float>(s.head_size));
    // Rows and columns of padding must be zeros here: they are terms of the sums over queries.
    for (float* block :
         {scratch.queries, scratch.queries_panels, scratch.dout, scratch.dout_panels, scratch.dqueries}) {
        std::fill_n(block, query_block * columns, 0.0F);
    }
    copy_rows(scratch.queries, head.q, s, query, rows, scale);
    copy_panels(scratch.queries_panels, query_block, head.q, s, query, rows, scale);
    copy_rows(scratch.dout, head.dout, s, query, rows, 1.0F);
    copy_panels(scratch.dout_panels, query_block, head.dout, s, query, rows, 1.0F);
    float lse[query_block] = {};
    float d[query_block] = {};  // D_t = dout_t . out_t
    for (std::int64_t i = 0; i < rows; ++i) {
        lse[i] = head.lse[query + i];
        d[i] = lane_sum<float>(
            s.head_size, [dout = head.dout.row(query + i), out = head.out.row(query + i)](std::int64_t c) {
                return to_float(dout[c]) * to_float(out[c]);
            });
    }

    for_key_blocks(query, rows, [&](const ScoreBlock& block) {
        multiply<false>(scratch.probabilities, score_columns, plain(scratch.queries, columns),
                        scratch.keys_transposed + block.key * columns, columns, block.rows, block.keys,
                        columns);
        multiply<false>(scratch.dscores, score_columns, plain(scratch.dout, columns),
                        scratch.values_transposed + block.key * columns, columns, block.rows, block.keys,
                        columns);
        for (std::int64_t i = 0; i < block.rows; ++i) {
            backward_scores(scratch.probabilities + i * score_columns, scratch.dscores + i * score_columns,
                            block, i, lse[i], d[i]);
        }
        multiply<true>(scratch.dvalues + block.key * columns, columns,
                       transposed(scratch.probabilities, score_columns), scratch.dout_panels, query_block,
                       block.keys, columns, block.rows);
        multiply<true>(scratch.dkeys + block.key * columns, columns,
                       transposed(scratch.dscores, score_columns), scratch.queries_panels, query_block,
                       block.keys, columns, block.rows);
        multiply<true>(scratch.dqueries, columns, plain(scratch.dscores, score_columns),
                       scratch.keys + block.key * panel_width, s.padded_sequence(), block.rows, columns,
                       block.keys);
    });

    for (std::int64_t i = 0; i < rows; ++i) {
        X* to = head.dq.row(query + i);
        const float* from = scratch.dqueries + i * columns;
#pragma omp simd
        for (std::int64_t c = 0; c < s.head_size; ++c) to[c] = from_float<X>(from[c] * scale);
    }
}

template <class X>
void store_rows(HeadRows<X> to, const float* from, const AttentionSizes& s) {
    for (std::int64_t t = 0; t < s.sequence; ++t) {
        X* row = to.row(t);
        const float* values = from + t * s.padded_head();
#pragma omp simd
        for (std::int64_t c = 0; c < s.head_size; ++c) row[c] = from_float<X>(values[c]);
    }
}

}  // namespace

std::int64_t backward_scratch_floats(const AttentionSizes& s) {
    return 5 * s.head_floats() + query_block * (5 * s.padded_head() + 2 * score_columns);
}

void CpuOps::attention_backward(const Tensor& dqkv, const Tensor& dout, const Tensor& qkv, const Tensor& out,
                                const Tensor& lse) {
    const AttentionSizes s = attention_sizes(qkv, lse);
    check_tensor(dqkv, qkv.dtype, qkv.shape, "dqkv");
    check_tensor(out, qkv.dtype, {s.batch, s.sequence, s.heads, s.head_size}, "out");
    check_tensor(dout, qkv.dtype, out.shape, "dout");
    const std::int64_t floats = backward_scratch_floats(s);
    float* const memory = workspace(threads_ * floats);
    with_dtype(qkv.dtype, [&](auto element) {
        using X = decltype(element);
        const X* const in = qkv.as<X>();
        X* const gradient = dqkv.as<X>();
        parallel_tasks(threads_, s.tasks(), [&](std::int64_t task, int thread) {
            const std::int64_t b = task / s.heads;
            const std::int64_t h = task % s.heads;
            const HeadTensors<X> head{part_of_qkv(in, s, 0, b, h),
                                      part_of_qkv(in, s, 1, b, h),
                                      part_of_qkv(in, s, 2, b, h),
                                      head_of<const X>(out.as<X>(), s, b, h),
                                      head_of<const X>(dout.as<X>(), s, b, h),
                                      part_of_qkv(gradient, s, 0, b, h),
                                      part_of_qkv(gradient, s, 1, b, h),
                                      part_of_qkv(gradient, s, 2, b, h),
                                      lse.as<float>() + task * s.sequence};
            const BackwardScratch scratch(memory + thread * floats, s);
            copy_panels(scratch.keys, s.padded_sequence(), head.k, s, 0, s.sequence, 1.0F);
            copy_transposed_panels(scratch.keys_transposed, head.k, s, s.sequence);
            copy_transposed_panels(scratch.values_transposed, head.v, s, s.sequence);
            for (std::int64_t query = 0; query < s.sequence; query += query_block) {
                backward_block(head, scratch, s, query);
            }
            store_rows(head.dk, scratch.dkeys, s);
            store_rows(head.dv, scratch.dvalues, s);
        });
    });
}

}  // namespace llmc::cpu
