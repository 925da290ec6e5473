// Causal attention of new rows against the keys and values of all before them, for generation: the scores of one query
// with every key, their softmax, and the sum of the values. Nothing is kept for a backward pass, and a row is so little
// work that no tiles are made of it, as attention.cpp does: that is for whole sequences.
#include <algorithm>

#include "llmc/device/cpu/attention_head.h"
#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/cpu/lane_sum.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

namespace {

// One query, against the first `count` rows of the keys and values of its head. `memory`: cached_scratch_floats.
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

void CpuOps::attention_cached_forward(const Tensor& out, const Tensor& cache, const Tensor& qkv,
                                      std::int64_t position) {
    const CachedHeadSizes sizes = attention_cached_forward_sizes(out, cache, qkv, position);
    const AttentionSizes s{1, sizes.capacity, sizes.heads, sizes.head_size};
    const std::int64_t floats = cached_scratch_floats(s), channels = s.heads * s.head_size;
    float* const memory = workspace(threads_ * floats);
    with_dtype(qkv.dtype, [&](auto element) {
        using X = decltype(element);
        const X* const rows = qkv.as<X>();
        X* const kept = cache.as<X>();
        X* const to = out.as<X>();
        for (std::int64_t i = 0; i < sizes.rows; ++i) {
            std::copy_n(rows + (3 * i + 1) * channels, 2 * channels, kept + 2 * (position + i) * channels);
        }
        parallel_tasks(threads_, sizes.rows * s.heads, [&](std::int64_t task, int thread) {
            const std::int64_t i = task / s.heads, first = task % s.heads * s.head_size;
            attend<X>(to + i * channels + first, rows + 3 * i * channels + first,
                      {kept + first, 2 * channels}, {kept + channels + first, 2 * channels}, position + i + 1,
                      s, memory + thread * floats);
        });
    });
}

}  // namespace llmc::cpu
