// What attention's two passes share: where a head lies in qkv, its copies in fp32, and the causal mask.
#pragma once

#include <algorithm>
#include <cstdint>

#include "llmc/core/dtype.h"
#include "llmc/core/tensor.h"
#include "llmc/device/cpu/head_tiles.h"
#include "llmc/device/cpu/operands.h"
#include "llmc/device/cpu/parallel.h"
#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

// Scores are made for a block of queries and a block of keys at a time: they fit in the first-level cache.
inline constexpr std::int64_t query_block = 32;
inline constexpr std::int64_t key_block = 128;
// The distance between rows of a block of scores: not a power of two, so that its columns do not all fall
// into the same few sets of the cache.
inline constexpr std::int64_t score_columns = key_block + 16;

struct AttentionSizes {
    std::int64_t batch, sequence, heads, head_size;

    std::int64_t padded_sequence() const { return round_up(sequence, panel_width); }
    std::int64_t padded_head() const { return round_up(head_size, panel_width); }
    std::int64_t head_floats() const { return padded_sequence() * padded_head(); }
    std::int64_t tasks() const { return batch * heads; }
};

// The sizes of qkv (B,T,3,NH,HS), once it and lse (B,NH,T) are as they should be.
inline AttentionSizes attention_sizes(const Tensor& qkv, const Tensor& lse) {
    check(qkv.shape.dimensions() == 5 && qkv.shape[2] == 3, "qkv is (B,T,3,NH,HS)");
    const AttentionSizes s{qkv.shape[0], qkv.shape[1], qkv.shape[3], qkv.shape[4]};
    check_dtype(qkv, qkv.dtype, "qkv");
    check_tensor(lse, DType::fp32, {s.batch, s.heads, s.sequence}, "lse");
    return s;
}

// The scratch memory of a thread.
std::int64_t forward_scratch_floats(const AttentionSizes& sizes);
std::int64_t backward_scratch_floats(const AttentionSizes& sizes);

// The rows of one head, t = 0 ... T-1, `stride` elements apart.
template <class X>
struct HeadRows {
    X* data;
    std::int64_t stride;

    X* row(std::int64_t t) const { return data + t * stride; }
};

// Part 0 (q), 1 (k) or 2 (v) of qkv (B,T,3,NH,HS) for sequence b and head h
template <class X>
HeadRows<X> part_of_qkv(X* qkv, const AttentionSizes& s, int part, std::int64_t b, std::int64_t h) {
    const std::int64_t stride = 3 * s.heads * s.head_size;
    return {qkv + b * s.sequence * stride + (part * s.heads + h) * s.head_size, stride};
}

// A tensor (B,T,NH,HS) for sequence b and head h
template <class X>
HeadRows<X> head_of(X* tensor, const AttentionSizes& s, std::int64_t b, std::int64_t h) {
    const std::int64_t stride = s.heads * s.head_size;
    return {tensor + b * s.sequence * stride + h * s.head_size, stride};
}

// Rows [first, first + count), times `factor`, as a plain matrix of s.padded_head() columns.
template <class X>
void copy_rows(float* to, HeadRows<X> from, const AttentionSizes& s, std::int64_t first, std::int64_t count,
               float factor) {
    for (std::int64_t t = 0; t < count; ++t) {
        const X* row = from.row(first + t);
        float* copy = to + t * s.padded_head();
#pragma omp simd
        for (std::int64_t c = 0; c < s.head_size; ++c) copy[c] = to_float(row[c]) * factor;
    }
}

// The same as panels of the head's columns, `panel_depth` rows deep.
template <class X>
void copy_panels(float* to, std::int64_t panel_depth, HeadRows<X> from, const AttentionSizes& s,
                 std::int64_t first, std::int64_t count, float factor) {
    for (std::int64_t t = 0; t < count; ++t) {
        const X* row = from.row(first + t);
        for (std::int64_t c = 0; c < s.head_size; c += panel_width) {
            const std::int64_t width = std::min(panel_width, s.head_size - c);
            float* copy = to + c * panel_depth + t * panel_width;
#pragma omp simd
            for (std::int64_t j = 0; j < width; ++j) copy[j] = to_float(row[c + j]) * factor;
        }
    }
}

// The transposed rows [0, count) as panels of 16 positions, s.padded_head() rows deep.
template <class X>
void copy_transposed_panels(float* to, HeadRows<X> from, const AttentionSizes& s, std::int64_t count) {
    for (std::int64_t first = 0; first < count; first += panel_width) {
        float* panel = to + first * s.padded_head();
        const std::int64_t width = std::min(panel_width, count - first);
        for (std::int64_t c = 0; c < s.head_size; ++c) {
            for (std::int64_t j = 0; j < width; ++j) {
                panel[c * panel_width + j] = to_float(from.row(first + j)[c]);
            }
        }
    }
}

// One block of scores: queries [query, query + rows) against keys [key, key + keys).
struct ScoreBlock {
    std::int64_t query, rows;
    std::int64_t key, keys;
};

// The causal mask of one row of a block: the scores that count are the first ones, as many as is returned, a
// whole number of panels; of these, keys behind the query are set to -infinity.
inline std::int64_t hide_unseen(float* scores, const ScoreBlock& block, std::int64_t row) {
    const std::int64_t seen = std::clamp(block.query + row - block.key + 1, std::int64_t{0}, block.keys);
    const std::int64_t panels = round_up(seen, panel_width);
    std::fill(scores + seen, scores + panels, -infinity);
    return panels;
}

// f(block) for the blocks of keys that queries [query, query + rows) see. rows are padded to whole tiles and
// keys to whole panels; padded keys lie behind every query, so that the causal mask covers them too.
template <class F>
void for_key_blocks(std::int64_t query, std::int64_t rows, const F& f) {
    const std::int64_t end = round_up(query + rows, panel_width);
    for (std::int64_t key = 0; key < end; key += key_block) {
        f(ScoreBlock{query, round_up(rows, tile_height), key, std::min(key_block, end - key)});
    }
}

// Hands out pieces of a thread's scratch memory.
class Scratch {
  public:
    explicit Scratch(float* memory) : next_(memory) {}

    float* take(std::int64_t floats) {
        float* const piece = next_;
        next_ += floats;
        return piece;
    }
    // Zeroed, as padding must be.
    float* take_zeroed(std::int64_t floats) {
        float* const piece = take(floats);
        std::fill_n(piece, floats, 0.0F);
        return piece;
    }

  private:
    float* next_;
};

}  // namespace llmc::cpu
