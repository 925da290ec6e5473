// Shared by attention's forward and backward passes: a head's place in its rows, its copies, and the blocks
// of scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "llmc/core/dtype.h"
#include "llmc/core/tensor.h"
#include "llmc/device/cpu/head_tiles.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"
#include "llmc/device/heads.h"
#include "llmc/device/ops.h"

namespace llmc::cpu {

// Scores are computed for a block of queries and a block of keys at a time. The scores of such a pair of
// blocks fit into the L1 cache. They are stored transposed, one row per key. The softmax then works on
// vectors of queries, and most products read the scores as they lie in memory.
inline constexpr std::int64_t query_block = 32;
inline constexpr std::int64_t key_block = 128;

// `window` is the number of keys that a query sees at most.
struct AttentionSizes {
    std::int64_t batch, sequence, heads, head_size;
    std::int64_t key_heads = heads;
    std::int64_t window = sequence;

    std::int64_t padded_sequence() const { return round_up(sequence, panel_width); }
    std::int64_t padded_head() const { return round_up(head_size, panel_width); }
    std::int64_t head_elements() const { return padded_sequence() * padded_head(); }
    float scale() const { return 1.0F / std::sqrt(static_cast<float>(head_size)); }
    std::int64_t all_heads() const { return batch * heads; }
    // The query heads that share a key head.
    std::int64_t group() const { return heads / key_heads; }
    // The first key that this query and later ones see, rounded down to whole panels.
    std::int64_t first_key(std::int64_t query) const {
        return std::max(std::int64_t{0}, query - window + 1) / panel_width * panel_width;
    }
};

inline AttentionSizes attention_sizes(const AttentionShape& s) {
    return {s.batch, s.sequence, s.heads, s.head_size, s.key_heads, s.window};
}

// Calls f(x, e). x has the type of q's elements. e has the type of the elements that are multiplied: bf16
// if the processor has bf16 instructions, otherwise fp32.
template <class F>
void with_elements(DType dtype, [[maybe_unused]] bool native_bf16, const F& f) {
#if defined(__x86_64__)
    if (dtype == DType::bf16 && native_bf16) return f(bfloat16{}, bfloat16{});
#endif
    with_dtype(dtype, [&](auto x) { f(x, float{}); });
}

// The scratch memory of a thread in floats, enough for either type of multiplied elements.
std::int64_t forward_scratch_floats(const AttentionSizes& sizes);
std::int64_t backward_scratch_floats(const AttentionSizes& sizes);
std::int64_t cached_scratch_floats(const AttentionSizes& sizes);

// The rows of one head, t = 0 ... T-1, `stride` elements apart.
template <class X>
struct HeadRows {
    X* data;
    std::int64_t stride;

    X* row(std::int64_t t) const { return data + t * stride; }
};

// Head h of `heads` for sequence b
template <class X>
HeadRows<X> head_of(const Heads& heads, const AttentionSizes& s, std::int64_t b, std::int64_t h) {
    const std::int64_t stride = heads.rows.shape.last();
    return {heads.rows.as<std::remove_const_t<X>>() + b * s.sequence * stride + heads.first + h * s.head_size,
            stride};
}

// The same for a tensor (B,T,H,D)
template <class X>
HeadRows<X> head_of(X* tensor, const AttentionSizes& s, std::int64_t b, std::int64_t h) {
    const std::int64_t stride = s.heads * s.head_size;
    return {tensor + b * s.sequence * stride + h * s.head_size, stride};
}

// Copies rows [first, first + count) to a plain matrix with s.padded_head() columns. Columns from D on are
// zeros, and so are the rows that pad to whole panels.
template <class E, class X>
void copy_rows(E* to, HeadRows<X> from, const AttentionSizes& s, std::int64_t first, std::int64_t count) {
    const std::int64_t columns = s.padded_head();
    for (std::int64_t t = 0; t < count; ++t) {
        const X* row = from.row(first + t);
        E* copy = to + t * columns;
        if constexpr (std::is_same_v<E, std::remove_const_t<X>>) {
            std::copy_n(row, s.head_size, copy);
        } else {
#pragma omp simd
            for (std::int64_t c = 0; c < s.head_size; ++c) copy[c] = to_float(row[c]);
        }
        std::fill(copy + s.head_size, copy + columns, E{});
    }
    std::fill(to + count * columns, to + round_up(count, panel_width) * columns, E{});
}

// One block of scores: queries [query, query + queries) against keys [key, key + keys), both padded to whole
// panels. Padded keys come after every query, so the causal mask hides them too.
struct ScoreBlock {
    std::int64_t query, queries;
    std::int64_t key, keys;
    std::int64_t window;

    // Sets the scores of the queries that do not see the key of this row: the first ones, which come before
    // the key, and the last ones, whose windows begin after it.
    void hide(float* scores, std::int64_t row, float value) const {
        std::fill_n(scores, queries_before(key + row), value);
        const std::int64_t end = queries_before(key + row + window);
        std::fill(scores + end, scores + queries, value);
    }

  private:
    std::int64_t queries_before(std::int64_t row) const {
        return std::clamp(row - query, std::int64_t{0}, queries);
    }
};

// Calls f(block) for each block of keys that queries [query, query + count) attend to.
template <class F>
void for_key_blocks(const AttentionSizes& s, std::int64_t query, std::int64_t count, const F& f) {
    const std::int64_t end = round_up(query + count, panel_width);
    for (std::int64_t key = s.first_key(query); key < end; key += key_block) {
        f(ScoreBlock{query, round_up(count, panel_width), key, std::min(key_block, end - key), s.window});
    }
}

// Hands out pieces of a thread's scratch memory. Each element takes the space of a float, even if it is
// smaller.
class Scratch {
  public:
    explicit Scratch(float* memory) : next_(memory) {}

    template <class E>
    E* take(std::int64_t elements) {
        float* const piece = next_;
        next_ += elements;
        return reinterpret_cast<E*>(piece);
    }

  private:
    float* next_;
};

}  // namespace llmc::cpu
