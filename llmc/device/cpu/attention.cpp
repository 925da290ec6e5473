// Causal attention, forward: for a block of queries at a time, over blocks of keys, with the softmax kept up
// to date (Dao et al., "FlashAttention", 2022; Milakov & Gimelshein, "Online normalizer calculation for
// softmax", 2018). No matrix of T x T scores exists. Products are of copies of one head, in fp32 or, where the
// processor multiplies bf16, in that; everything else is in fp32.
#include <algorithm>
#include <cmath>

#include "llmc/device/cpu/attention_head.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/operands.h"

namespace llmc::cpu {

namespace {

// The softmax of a block of queries over the keys seen so far: sum_i = sum_j exp(s_ij - greatest_i).
class RunningSoftmax {
  public:
    RunningSoftmax() { std::fill_n(greatest_, query_block, -infinity); }

    // Takes further scores s, which become exp(s - greatest), and returns what earlier results of each query must
    // be multiplied by. What comes in are products q . k, a row for each key.
    const float* add(float* products, const ScoreBlock& block, float scale) {
        for (std::int64_t j = 0; j < block.keys; ++j) {
            std::fill_n(products + j * query_block, block.unseeing(j), -infinity);
        }
        for (std::int64_t first = 0; first < block.queries; first += panel_width) {
            add_panel(products + first, block.keys, scale, first);
        }
        return factor_;
    }
    float reciprocal(std::int64_t query) const { return 1.0F / sum_[query]; }
    float log_sum(std::int64_t query) const { return greatest_[query] + std::log(sum_[query]); }

  private:
    void add_panel(float* products, std::int64_t keys, float scale, std::int64_t first) {
        float largest[panel_width];
        std::fill_n(largest, panel_width, -infinity);
        for (std::int64_t j = 0; j < keys; ++j) {
            const float* row = products + j * query_block;
#pragma omp simd
            for (std::int64_t i = 0; i < panel_width; ++i)
                largest[i] = row[i] > largest[i] ? row[i] : largest[i];
        }
        float larger[panel_width];
#pragma omp simd
        for (std::int64_t i = 0; i < panel_width; ++i) {
            larger[i] = std::max(greatest_[first + i], largest[i] * scale);
        }
        float added[panel_width] = {};
        for (std::int64_t j = 0; j < keys; ++j) {
            float* row = products + j * query_block;
#pragma omp simd
            for (std::int64_t i = 0; i < panel_width; ++i) {
                row[i] = exponential(std::fma(row[i], scale, -larger[i]));
                added[i] += row[i];
            }
        }
#pragma omp simd
        for (std::int64_t i = 0; i < panel_width; ++i) {
            factor_[first + i] = exponential(greatest_[first + i] - larger[i]);
            sum_[first + i] = sum_[first + i] * factor_[first + i] + added[i];
            greatest_[first + i] = larger[i];
        }
    }

    float greatest_[query_block];
    float sum_[query_block] = {};
    float factor_[query_block];
};

// A head's keys and values, and what a block of queries needs.
template <class E>
struct ForwardScratch {
    ForwardScratch(float* memory, const AttentionSizes& s) {
        Scratch scratch(memory);
        for (E** head : {&keys, &value_rows, &values}) *head = scratch.take<E>(s.head_elements());
        for (E** block : {&query_rows, &queries}) *block = scratch.take<E>(query_block * s.padded_head());
        out = scratch.take<float>(query_block * s.padded_head());
        scores = scratch.take<float>(query_block * key_block);
        probabilities = scratch.take<E>(query_block * key_block);
    }

    E* keys;
    E *value_rows, *values;   // as they are, and in panels
    E *query_rows, *queries;  // as they are, and transposed in panels
    float* out;               // not yet divided by the sum of the softmax
    float* scores;
    E* probabilities;  // for left_hand_transposed()
};

template <class X, class E>
void forward_block(HeadRows<X> out, float* lse, HeadRows<const X> q, const ForwardScratch<E>& scratch,
                   const AttentionSizes& s, std::int64_t query) {
    const std::int64_t count = std::min(query_block, s.sequence - query);
    const std::int64_t columns = s.padded_head();
    copy_rows(scratch.query_rows, q, s, query, count);
    copy_transposed_panels(scratch.queries, scratch.query_rows, round_up(count, panel_width), columns);
    std::fill_n(scratch.out, query_block * columns, 0.0F);
    RunningSoftmax softmax;

    for_key_blocks(query, count, [&](const ScoreBlock& block) {
        multiply<false>(scratch.scores, query_block, plain(scratch.keys + block.key * columns, columns),
                        scratch.queries, columns, block.keys, block.queries, columns);
        const float* factor = softmax.add(scratch.scores, block, s.scale());
        for (std::int64_t i = 0; i < block.queries; ++i) {
            float* sum = scratch.out + i * columns;
#pragma omp simd
            for (std::int64_t c = 0; c < columns; ++c) sum[c] *= factor[i];
        }
        multiply<true>(scratch.out, columns,
                       left_hand_transposed(scratch.probabilities, scratch.scores, query_block, block.keys,
                                            block.queries),
                       scratch.values + block.key * panel_width, s.padded_sequence(), block.queries, columns,
                       block.keys);
    });

    for (std::int64_t i = 0; i < count; ++i) {
        X* to = out.row(query + i);
        const float* from = scratch.out + i * columns;
        const float reciprocal = softmax.reciprocal(i);
#pragma omp simd
        for (std::int64_t c = 0; c < s.head_size; ++c) to[c] = from_float<X>(from[c] * reciprocal);
        lse[query + i] = softmax.log_sum(i);
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
    return 3 * s.head_elements() + query_block * (3 * s.padded_head() + 2 * key_block);
}

void CpuOps::attention_forward(const Tensor& out, const Tensor& lse, const Tensor& qkv) {
    const AttentionSizes s = attention_sizes(attention_forward_sizes(out, lse, qkv));
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
            copy_rows(scratch.keys, part_of_qkv(all, s, 1, b, h), s, 0, end);
            copy_rows(scratch.value_rows, part_of_qkv(all, s, 2, b, h), s, 0, end);
            copy_panels(scratch.values, s.padded_sequence(), scratch.value_rows, round_up(end, panel_width),
                        s.padded_head());
            for (std::int64_t query = tasks.first_query(part); query < end; query += query_block) {
                forward_block(head_of(out.as<X>(), s, b, h), lse.as<float>() + head * s.sequence,
                              part_of_qkv(all, s, 0, b, h), scratch, s, query);
            }
        });
    });
}

std::int64_t CpuOps::attention_floats(const WorkspaceRequest& request) const {
    const AttentionSizes s{request.batch, request.sequence, request.heads, request.size_of_head()};
    return threads_ *
           std::max({forward_scratch_floats(s), backward_scratch_floats(s), cached_scratch_floats(s)});
}

}  // namespace llmc::cpu
