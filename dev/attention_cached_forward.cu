// Causal attention of new rows against a cache of keys and values, in two variants (llmc/device/ops.h). There
// are n rows at positions P ... P+n-1. Each head of row i takes the softmax of its products with the P + i +
// 1 keys so far, and the mean of their values with these weights.
//
// In generation n is 1. Keys and values are then read once, 2 (P+1) NH HS elements, and each takes part in
// two operations. In bf16 that is one operation per byte; an H100 could do 20 in fp32 (3.3 TB/s, 67 Tflop/s).
// So memory is the limit. With one block per head (12 blocks for GPT-2 124M), the data in flight per
// multiprocessor is a second limit. Its 8 warps request 4 keys and 4 values per lane at a time, 32 KiB per
// block.
//   1  A warp does a head of a row. Its lanes take the head's columns, one key after the other: loads of 64
//      or 128 bytes, the next one only after a sum over the warp.
//   2  A block does a head of a row. A few lanes read a row, 16 bytes each, so that a warp has 4 to 8 keys at
//      once, and 4 times as many in flight. Each group of lanes has its own softmax; these are combined at
//      the end (llmc/device/cuda/attention_cached_forward.cuh). Its shared memory is for 8 warps, so it has
//      one block size.
// If H/K query heads share a key head, the cache is H/K times smaller, and the operations are the same. Their
// blocks run at the same time: one reads from memory, the others from the L2 cache. With a window of W, only
// the last W rows are read. Both variants have both. A prompt (n > 1) has few rows and is computed once per
// text. Each row reads the keys anew, from cache.
#include "llmc/device/cuda/attention_cached_forward.cuh"

#include <algorithm>
#include <vector>

#include "dev/attention_forward_reference.h"
#include "dev/lab/lab.h"

namespace lab::attention_cached_forward_variants {

using namespace llmc::cuda;

// ---- 1: a warp does a head of a row ----

template <class X>
__global__ void attention_cached_forward_kernel1(X* out, X* cache, QueryKeyValue<const X> qkv,
                                                 CachedAttentionSizes sizes, float scale) {
    constexpr int most = 4;  // columns per lane
    const int head = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x % warp_threads);
    const int row = static_cast<int>(blockIdx.y * (blockDim.x / warp_threads) + threadIdx.x / warp_threads);
    if (row >= sizes.rows) return;
    const int stride = sizes.key_heads * sizes.head_size, key_head = head / sizes.group();
    const auto column = [&](int i) { return lane + i * 32; };
    const auto at = [&](int i) { return key_head * sizes.head_size + column(i); };
    const auto is_there = [&](int i) { return column(i) < sizes.head_size; };

    const X* const own = qkv.q.first + std::int64_t{row} * qkv.q.stride + head * sizes.head_size;
    const X* const own_key = qkv.k.first + std::int64_t{row} * qkv.k.stride;
    const X* const own_value = qkv.v.first + std::int64_t{row} * qkv.v.stride;
    const bool stores = head % sizes.group() == 0;
    X* const kept = cache + (std::int64_t{sizes.position} + row) * 2 * stride;
    float query[most] = {}, values[most] = {}, greatest = -INFINITY, sum = 0;
    for (int i = 0; i < most; ++i) {
        if (!is_there(i)) continue;
        query[i] = to_float(own[column(i)]) * scale;
        if (!stores) continue;
        kept[at(i)] = own_key[at(i)];
        kept[stride + at(i)] = own_value[at(i)];
    }
    const int end = sizes.position + row + 1;
    for (int j = max(0, end - sizes.window); j < end; ++j) {
        const std::int64_t new_row = j - sizes.position;
        const X* const key =
            new_row < 0 ? cache + std::int64_t{j} * 2 * stride : qkv.k.first + new_row * qkv.k.stride;
        const X* const value = new_row < 0 ? key + stride : qkv.v.first + new_row * qkv.v.stride;
        float score = 0;
        for (int i = 0; i < most; ++i) {
            if (is_there(i)) score += query[i] * to_float(key[at(i)]);
        }
        score = warp_sum(score);
        const float larger = fmaxf(greatest, score);
        const float factor = exp2_approximate(greatest - larger), p = exp2_approximate(score - larger);
        greatest = larger;
        sum = sum * factor + p;
        for (int i = 0; i < most; ++i) {
            if (is_there(i)) values[i] = values[i] * factor + p * to_float(value[at(i)]);
        }
    }
    for (int i = 0; i < most; ++i) {
        if (!is_there(i)) continue;
        out[(std::int64_t{row} * sizes.heads + head) * sizes.head_size + column(i)] =
            from_float<X>(values[i] / sum);
    }
}

template <class X>
class AttentionCachedForward : public Problem {
  public:
    AttentionCachedForward(const Shape& shape, Draw& draw)
        : sizes_{static_cast<int>(shape[0]), static_cast<int>(shape[1]),
                 static_cast<int>(shape[2]), static_cast<int>(shape[3]),
                 static_cast<int>(shape[4]), window_of(shape[5], shape[0] + shape[1])},
          given_(2 * (shape[0] + shape[1]) * channels()),
          cache_(given_.size()),
          qkv_(shape[0] * row_elements()),
          out_(shape[0] * shape[2] * shape[3]) {
        draw.normal(given_, 1);
        draw.normal(qkv_, 1);
        cache_.copy_from(given_);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const float scale = log2_e / std::sqrt(static_cast<float>(sizes_.head_size));
        const int warps = block_size / warp_threads;
        switch (variant) {
            case 1:
                return launch(on, attention_cached_forward_kernel1<X>,
                              dim3(static_cast<unsigned>(sizes_.heads),
                                   static_cast<unsigned>(blocks_for(sizes_.rows, warps))),
                              block_size, 0, out_.data(), cache_.data(), qkv(), sizes_, scale);
            case 2:
                return attention_cached_forward(on, out_.data(), cache_.data(), qkv(), sizes_);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        out_.clear();
        cache_.copy_from(given_);
    }

    void compare(Comparison& comparison) override {
        for (int row = 0; row < sizes_.rows; ++row) {
            for (int head = 0; head < sizes_.heads; ++head) compare_row(comparison, row, head);
            for (int part = 0; part < 2; ++part) {
                for (std::int64_t c = 0; c < channels(); ++c) {
                    const std::int64_t i = (2 * (sizes_.position + row) + part) * channels() + c;
                    comparison.see_equal("cache", i, to_float(cache_[i]),
                                         of_row(sizes_.position + row, part, c));
                }
            }
        }
    }

    // The keys and values that the first row sees are read; the new rows are read and written.
    double bytes() const override {
        const double seen = sizes_.rows + std::min(sizes_.position, sizes_.window - 1);
        return static_cast<double>(given_.bytes()) * seen / (sizes_.rows + sizes_.position) +
               static_cast<double>(qkv_.bytes()) + static_cast<double>(out_.bytes());
    }
    double flops() const override {
        double pairs = 0;
        for (int row = 0; row < sizes_.rows; ++row)
            pairs += std::min(sizes_.position + row + 1, sizes_.window);
        return 4.0 * sizes_.heads * sizes_.head_size * pairs;
    }

  private:
    // Elements of a row of the cache's keys, and of a row of q, k and v.
    std::int64_t channels() const { return std::int64_t{sizes_.key_heads} * sizes_.head_size; }
    std::int64_t row_elements() const {
        return std::int64_t{sizes_.heads} * sizes_.head_size + 2 * channels();
    }
    QueryKeyValue<const X> qkv() const {
        return packed_heads<const X>(qkv_.data(), sizes_.heads, sizes_.key_heads, sizes_.head_size);
    }

    // Key (part 0) or value (part 1) of any row.
    double of_row(int row, int part, std::int64_t c) const {
        if (row < sizes_.position) return to_float(given_[(2 * row + part) * channels() + c]);
        const std::int64_t place = std::int64_t{sizes_.heads} * sizes_.head_size + part * channels() + c;
        return to_float(qkv_[(row - sizes_.position) * row_elements() + place]);
    }

    void compare_row(Comparison& comparison, int row, int head) {
        const int columns = sizes_.head_size, end = sizes_.position + row + 1;
        const int oldest = std::max(0, end - sizes_.window), keys = end - oldest;
        const std::int64_t first = std::int64_t{head * sizes_.key_heads / sizes_.heads} * columns;
        const AttentionRow attention(
            keys, columns,
            [&](int c) { return to_float(qkv_[row * row_elements() + std::int64_t{head} * columns + c]); },
            [&](int j, int c) { return of_row(oldest + j, 0, first + c); });

        // A score has HS roundings, 4 of the scale and the product with it, and 2 of its difference from the
        // maximum, which is up to twice as large. The differences between successive maxima add up to at most
        // that, too. A power of two has 2 ulp (4 u). There are one factor, and the product with it, for each
        // key.
        constexpr double u = unit_roundoff<float>;
        const double n = keys;
        const double weight_error =
            std::expm1((columns + 10) * u * attention.largest_size() + 5 * u * (n + 8));
        for (int c = 0; c < columns; ++c) {
            const auto [value, size] =
                attention.output([&](int j) { return of_row(oldest + j, 1, first + c); });
            // The weights and their sum have similar errors. Then come the sum of n terms, and the division.
            const double error = size * (2 * weight_error + (3 * n + 4) * u);
            const std::int64_t i = (std::int64_t{row} * sizes_.heads + head) * columns + c;
            comparison.see("out", i, to_float(out_[i]), value, rounded<X>(value, error));
        }
    }

    CachedAttentionSizes sizes_;
    Array<X> given_, cache_, qkv_, out_;
};

const Registration registration({
    .name = "attention_cached_forward",
    .sizes = {"rows", "position", "heads", "head size", "key heads", "window"},
    .variants = {{1, "a warp does a head of a row", {32, 128}},
                 {2, "a block does, several keys at once", {256}}},
    .checked = {{1, 20, 1, 16, 1, 0},
                {1, 0, 2, 64, 2, 0},
                {3, 150, 2, 64, 2, 0},
                {2, 33, 1, 128, 1, 0},
                {1, 70, 1, 88, 1, 0},
                {2, 40, 4, 24, 2, 0},
                {2, 70, 2, 16, 1, 30}},
    .timed = {{1, 1023, 12, 64, 12, 0},
              {1, 1023, 25, 64, 25, 0},
              {1, 4095, 32, 128, 32, 0},
              {1024, 0, 12, 64, 12, 0},
              {1, 8191, 32, 128, 8, 0},
              {1, 8191, 32, 128, 8, 4096}},
    .takes = {},
    .make = make_problem<AttentionCachedForward>,
    .checked_for_races = {{2, 20, 1, 16, 1, 0}, {1, 5, 1, 64, 1, 0}, {1, 5, 1, 128, 1, 0}},
});

}  // namespace lab::attention_cached_forward_variants
