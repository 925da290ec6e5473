// Causal attention, forward: for a block of queries at a time, over blocks of keys, with the softmax kept up
// to date (Dao et al., "FlashAttention", 2022; Milakov & Gimelshein, "Online normalizer calculation for
// softmax", 2018). No matrix of T x T scores exists. Products are of copies of one head, in fp32 or, where the
// processor multiplies bf16, in that; everything else is in fp32.
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

// The softmax of one query over the keys seen so far: sum = sum_j exp(s_j - greatest).
struct RunningSoftmax {
    float greatest = -infinity;
    float sum = 0.0F;

    // Takes further scores s = `scale` products, which become exp(s - greatest), and returns what earlier
    // results must be multiplied by.
    float add(float* products, float scale, std::int64_t keys) {
        float largest = -infinity;
#pragma omp simd reduction(max : largest)
        for (std::int64_t j = 0; j < keys; ++j) largest = products[j] > largest ? products[j] : largest;
        const float larger = std::max(greatest, largest * scale);
#pragma omp simd
        for (std::int64_t j = 0; j < keys; ++j) {
            products[j] = exponential(std::fma(products[j], scale, -larger));
        }
        const float added = lane_sum<float, panel_width>(keys, [=](std::int64_t j) { return products[j]; });
        const float factor = exponential(greatest - larger);
        greatest = larger;
        sum = sum * factor + added;
        return factor;
    }
};

// The causal mask of one query's row of a block: the scores that count are the first ones, as many as is
// returned, a whole number of panels; of these, keys behind the query are set to -infinity.
std::int64_t hide_unseen(float* scores, const ScoreBlock& block, std::int64_t row) {
    const std::int64_t seen = std::clamp(block.query + row - block.key + 1, std::int64_t{0}, block.keys);
    const std::int64_t panels = round_up(seen, panel_width);
    std::fill(scores + seen, scores + panels, -infinity);
    return panels;
}

// A head's keys and values, and what a block of queries needs.
template <class E>
struct ForwardScratch {
    ForwardScratch(float* memory, const AttentionSizes& s) {
        Scratch scratch(memory);
        for (E** head : {&rows, &keys, &values}) *head = scratch.take<E>(s.head_elements());
        queries = scratch.take<E>(query_block * s.padded_head());
        out = scratch.take<float>(query_block * s.padded_head());
        scores = scratch.take<float>(query_block * score_columns);
        probabilities = scratch.take<E>(query_block * score_columns);
    }

    E* rows;    // keys, then values, as they are copied
    E* keys;    // transposed, in panels of positions
    E* values;  // in panels of columns
    E* queries;
    float* out;  // not yet divided by the sum of the softmax
    float* scores;
    E* probabilities;  // for left_hand()
};

template <class X, class E>
void forward_block(HeadRows<X> out, float* lse, HeadRows<const X> q, const ForwardScratch<E>& scratch,
                   const AttentionSizes& s, std::int64_t query) {
    const std::int64_t rows = std::min(query_block, s.sequence - query);
    const std::int64_t columns = s.padded_head();
    copy_rows(scratch.queries, q, s, query, rows);
    std::fill_n(scratch.out, query_block * columns, 0.0F);
    RunningSoftmax softmax[query_block];

    for_key_blocks(query, rows, [&](const ScoreBlock& block) {
        multiply<false>(scratch.scores, score_columns, plain(scratch.queries, columns),
                        scratch.keys + block.key * columns, columns, block.queries, block.keys, columns);
        for (std::int64_t i = 0; i < block.queries; ++i) {
            float* scores = scratch.scores + i * score_columns;
            const std::int64_t panels = hide_unseen(scores, block, i);
            const float factor = softmax[i].add(scores, s.scale(), panels);
            std::fill(scores + panels, scores + block.keys, 0.0F);
            float* sum = scratch.out + i * columns;
#pragma omp simd
            for (std::int64_t c = 0; c < columns; ++c) sum[c] *= factor;
        }
        multiply<true>(
            scratch.out, columns,
            left_hand(scratch.probabilities, scratch.scores, score_columns, block.queries, block.keys),
            scratch.values + block.key * panel_width, s.padded_sequence(), block.queries, columns,
            block.keys);
    });

    for (std::int64_t i = 0; i < rows; ++i) {
        X* to = out.row(query + i);
        const float* from = scratch.out + i * columns;
        const float reciprocal = 1.0F / softmax[i].sum;
#pragma omp simd
        for (std::int64_t c = 0; c < s.head_size; ++c) to[c] = from_float<X>(from[c] * reciprocal);
        lse[query + i] = softmax[i].greatest + std::log(softmax[i].sum);
    }
}

// A task is a head or, where there are few heads, a part of its blocks of queries. No result depends on how
// the blocks are divided.
struct ForwardTasks {
    ForwardTasks(const AttentionSizes& s, int threads)
        : blocks(divide_up(s.sequence, query_block)),
          parts(std::clamp(divide_up(4 * threads, std::max(std::int64_t{1}, s.tasks())), std::int64_t{1},
                           std::max(std::int64_t{1}, blocks))) {}

    std::int64_t first_query(std::int64_t part) const { return part * blocks / parts * query_block; }

    std::int64_t blocks;
    std::int64_t parts;
};

}  // namespace

std::int64_t forward_scratch_floats(const AttentionSizes& s) {
    return 3 * s.head_elements() + query_block * (2 * s.padded_head() + 2 * score_columns);
}

void CpuOps::attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv) {
    const AttentionSizes s = attention_sizes(qkv, lse);
    check_tensor(out, qkv.dtype, {s.batch, s.sequence, s.heads, s.head_size}, "out");
    const ForwardTasks tasks(s, threads_);
    const std::int64_t floats = forward_scratch_floats(s);
    float* const memory = workspace(threads_ * floats);
    with_elements(qkv.dtype, native_bf16_, [&](auto x, auto e) {
        using X = decltype(x);
        using E = decltype(e);
        const X* const all = qkv.as<X>();
        parallel_tasks(threads_, s.tasks() * tasks.parts, [&](std::int64_t task, int thread) {
            const std::int64_t head = task / tasks.parts;
            const std::int64_t part = task % tasks.parts;
            const std::int64_t b = head / s.heads;
            const std::int64_t h = head % s.heads;
            const std::int64_t end = std::min(s.sequence, tasks.first_query(part + 1));
            const ForwardScratch<E> scratch(memory + thread * floats, s);
            const std::int64_t rows = round_up(end, panel_width);
            copy_rows(scratch.rows, part_of_qkv(all, s, 1, b, h), s, 0, end);
            copy_transposed_panels(scratch.keys, scratch.rows, rows, s.padded_head());
            copy_rows(scratch.rows, part_of_qkv(all, s, 2, b, h), s, 0, end);
            copy_panels(scratch.values, s.padded_sequence(), scratch.rows, rows, s.padded_head());
            for (std::int64_t query = tasks.first_query(part); query < end; query += query_block) {
                forward_block(head_of(out.as<X>(), s, b, h), lse.as<float>() + head * s.sequence,
                              part_of_qkv(all, s, 0, b, h), scratch, s, query);
            }
        });
    });
}

std::int64_t CpuOps::attention_floats(const WorkspaceRequest& request) const {
    const AttentionSizes s{request.batch, request.sequence, request.heads, request.channels / request.heads};
    return threads_ * std::max(forward_scratch_floats(s), backward_scratch_floats(s));
}

}  // namespace llmc::cpu
