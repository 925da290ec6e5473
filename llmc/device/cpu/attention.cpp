// Causal attention, forward. It takes a block of queries at a time and goes over blocks of keys with a
// running softmax (Dao et al., "FlashAttention", 2022; Milakov & Gimelshein, "Online normalizer calculation
// for softmax", 2018). The T x T matrix of scores is never stored. Products use copies of one head: in bf16
// if the processor has bf16 instructions, otherwise in fp32. Everything else is in fp32.
#include <algorithm>
#include <cmath>
#include <limits>

#include "llmc/device/cpu/attention_head.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

// The softmax of a block of queries over the keys so far. greatest_i is the maximum over j of s_ij, and
// sum_i the sum over j of exp(s_ij - greatest_i). A window may hide all keys of a block from a query. The
// maximum therefore begins as a finite number: differences between two of infinity would be NaN.
class RunningSoftmax {
  public:
    RunningSoftmax() { std::fill_n(greatest_, query_block, std::numeric_limits<float>::lowest()); }

    // Adds scores s to the softmax. `products` holds q . k, a row per key, and is replaced by exp(s -
    // greatest). Returns the factor of each query by which its earlier results must be multiplied.
    const float* add(float* products, const ScoreBlock& block, float scale) {
        for (std::int64_t j = 0; j < block.keys; ++j) {
            block.hide(products + j * query_block, j, -infinity);
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
        float new_greatest[panel_width];
#pragma omp simd
        for (std::int64_t i = 0; i < panel_width; ++i) {
            new_greatest[i] = std::max(greatest_[first + i], largest[i] * scale);
        }
        float added[panel_width] = {};
        for (std::int64_t j = 0; j < keys; ++j) {
            float* row = products + j * query_block;
#pragma omp simd
            for (std::int64_t i = 0; i < panel_width; ++i) {
                row[i] = exponential(std::fma(row[i], scale, -new_greatest[i]));
                added[i] += row[i];
            }
        }
#pragma omp simd
        for (std::int64_t i = 0; i < panel_width; ++i) {
            factor_[first + i] = exponential(greatest_[first + i] - new_greatest[i]);
            sum_[first + i] = sum_[first + i] * factor_[first + i] + added[i];
            greatest_[first + i] = new_greatest[i];
        }
    }

    float greatest_[query_block];
    float sum_[query_block] = {};
    float factor_[query_block];
};

// A head's keys and values, and the scratch memory of a block of queries.
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
    E *value_rows, *values;   // plain, and in panels
    E *query_rows, *queries;  // plain, and transposed in panels
    float* out;               // sums of values, not yet divided by the softmax's sum
    float* scores;
    E* probabilities;  // in bf16, the rounded copy that left_hand_transposed() makes
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

    for_key_blocks(s, query, count, [&](const ScoreBlock& block) {
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

// Divides the work into tasks. A task is a head or, if there are few heads, some of its blocks of queries.
// The results do not depend on this division.
struct ForwardTasks {
    ForwardTasks(const AttentionSizes& s, int threads)
        : blocks(divide_up(s.sequence, query_block)),
          parts(std::clamp(divide_up(4 * threads, std::max(std::int64_t{1}, s.all_heads())), std::int64_t{1},
                           std::max(std::int64_t{1}, blocks))) {}

    std::int64_t first_query(std::int64_t part) const { return part * blocks / parts * query_block; }

    std::int64_t blocks;
    std::int64_t parts;
};

}  // namespace

std::int64_t forward_scratch_floats(const AttentionSizes& s) {
    return 3 * s.head_elements() + query_block * (3 * s.padded_head() + 2 * key_block);
}

void CpuOps::compute(const AttentionForward& op, const AttentionShape& sizes) {
    const AttentionSizes s = attention_sizes(sizes);
    const ForwardTasks tasks(s, threads_);
    const std::int64_t floats = forward_scratch_floats(s);
    float* const memory = workspace(threads_ * floats);
    with_elements(op.out.dtype, native_bf16_, [&](auto x, auto e) {
        using X = decltype(x);
        using E = decltype(e);
        parallel_tasks(threads_, s.all_heads() * tasks.parts, [&](std::int64_t task, int thread) {
            const std::int64_t head = task / tasks.parts;
            const std::int64_t part = task % tasks.parts;
            const std::int64_t b = head / s.heads;
            const std::int64_t h = head % s.heads, key_head = h / s.group();
            const std::int64_t begin = s.first_key(tasks.first_query(part));
            const std::int64_t end = std::min(s.sequence, tasks.first_query(part + 1));
            const std::int64_t columns = s.padded_head();
            const ForwardScratch<E> scratch(memory + thread * floats, s);
            copy_rows(scratch.keys + begin * columns, head_of<const X>(op.k, s, b, key_head), s, begin,
                      end - begin);
            copy_rows(scratch.value_rows, head_of<const X>(op.v, s, b, key_head), s, begin, end - begin);
            copy_panels(scratch.values + begin * panel_width, s.padded_sequence(), scratch.value_rows,
                        round_up(end - begin, panel_width), columns);
            for (std::int64_t query = tasks.first_query(part); query < end; query += query_block) {
                forward_block(head_of(op.out.as<X>(), s, b, h), op.lse.as<float>() + head * s.sequence,
                              head_of<const X>(op.q, s, b, h), scratch, s, query);
            }
        });
    });
}

std::int64_t CpuOps::attention_floats(const WorkspaceRequest& request) const {
    const AttentionSizes s{request.batch, request.sequence, request.heads, request.size_of_head()};
    return threads_ *
           std::max({forward_scratch_floats(s), backward_scratch_floats(s), cached_scratch_floats(s)});
}

namespace {

// Computes one query's output from `count` keys and values. `memory` has cached_scratch_floats.
template <class X>
void attend(X* out, const X* q, HeadRows<const X> keys, HeadRows<const X> values, std::int64_t count,
            const AttentionSizes& s, float* memory) {
    float* const query = memory;
    float* const sum = query + s.head_size;
    float* const weights = sum + s.head_size;
#pragma omp simd
    for (std::int64_t c = 0; c < s.head_size; ++c) query[c] = to_float(q[c]) * s.scale();

    float greatest = -infinity;
    for (std::int64_t j = 0; j < count; ++j) {
        const X* const key = keys.row(j);
        weights[j] =
            lane_sum<float>(s.head_size, [=](std::int64_t c) { return query[c] * to_float(key[c]); });
        greatest = std::max(greatest, weights[j]);
    }
#pragma omp simd
    for (std::int64_t j = 0; j < count; ++j) weights[j] = exponential(weights[j] - greatest);
    const float total = lane_sum<float>(count, [=](std::int64_t j) { return weights[j]; });

    std::fill_n(sum, s.head_size, 0.0F);
    for (std::int64_t j = 0; j < count; ++j) {
        const X* const value = values.row(j);
        const float weight = weights[j];
#pragma omp simd
        for (std::int64_t c = 0; c < s.head_size; ++c) sum[c] += weight * to_float(value[c]);
    }
    const float reciprocal = 1.0F / total;
#pragma omp simd
    for (std::int64_t c = 0; c < s.head_size; ++c) out[c] = from_float<X>(sum[c] * reciprocal);
}

}  // namespace

std::int64_t cached_scratch_floats(const AttentionSizes& s) { return s.sequence + 2 * s.head_size; }

void CpuOps::compute(const AttentionCachedForward& op, const CachedAttentionShape& sizes) {
    const AttentionSizes s{1, sizes.capacity, sizes.heads, sizes.head_size, sizes.key_heads, sizes.window};
    const std::int64_t floats = cached_scratch_floats(s), channels = s.key_heads * s.head_size;
    float* const memory = workspace(threads_ * floats);
    with_dtype(op.out.dtype, [&](auto element) {
        using X = decltype(element);
        X* const kept = op.cache.as<X>();
        const HeadRows<const X> queries = head_of<const X>(op.q, s, 0, 0),
                                new_keys = head_of<const X>(op.k, s, 0, 0),
                                new_values = head_of<const X>(op.v, s, 0, 0);
        for (std::int64_t i = 0; i < sizes.rows; ++i) {
            X* const row = kept + 2 * (op.position + i) * channels;
            std::copy_n(new_keys.row(i), channels, row);
            std::copy_n(new_values.row(i), channels, row + channels);
        }
        const HeadRows<const X> keys{kept, 2 * channels}, values{kept + channels, 2 * channels};
        parallel_tasks(threads_, sizes.rows * s.heads, [&](std::int64_t task, int thread) {
            const std::int64_t i = task / s.heads, h = task % s.heads;
            const std::int64_t first = h / s.group() * s.head_size;
            const std::int64_t end = op.position + i + 1, begin = std::max(std::int64_t{0}, end - s.window);
            attend<X>(op.out.as<X>() + task * s.head_size, queries.row(i) + h * s.head_size,
                      {keys.row(begin) + first, keys.stride}, {values.row(begin) + first, values.stride},
                      end - begin, s, memory + thread * floats);
        });
    });
}

}  // namespace llmc::cpu
