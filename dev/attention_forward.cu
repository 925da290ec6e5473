// Causal attention forward, in six variants (llmc/device/ops.h). For each query of each head: its products
// with the keys up to itself, their softmax, and the mean of the values with these weights.
//
// There are two products of T x T x HS, and causality needs half of each: 4 B NH T T HS / 2 operations.
// Memory reads qkv and writes a third as much, so there are T/4 operations per byte in bf16. From T = 1024
// on, tensor cores and not memory are the limit, if the T x T scores never leave the multiprocessor.
//   1  Three kernels with a (T,T) matrix in memory between them; a thread does a row. That is 10 T T bytes
//      per head to write and read, and neighboring threads access elements that are T apart.
//   2  A warp does a query, 32 keys at a time, with a running softmax: no matrix. But every query reads all
//      its keys and values anew, from cache.
//   3  A block does 64 queries on tiles in shared memory, a thread 4 x 4 scores in registers. Each number
//      that is read is used four times. The limit is now fp32 arithmetic (attention_forward_fp32.cuh).
//   4  Tensor cores: four warps of 16 queries. The rows of a tile are 128 or 256 bytes apart, so that the
//      eight rows of an 8x8 matrix are in the same banks and are read one after the other. Nothing is
//      computed while tiles are loaded.
//   5  The chunks of a row are permuted (c ^ row & 7): no bank conflicts. cp.async loads values during the
//      product with the keys, and the next keys during the product with the values.
//   6  32 queries per warp: a key read from shared memory is used twice. Reads then take half of the tensor
//      cores' time, not all of it. Masks only on the diagonal, longest tiles first, whole rows stored
//      (attention_forward.cuh). With blocks of 256 threads, eight warps of 16 queries share the tile instead.
// With a window of W keys, a query sees W - W (W - 1) / (2 T) keys on average and not (T + 1) / 2; tiles
// outside the window are skipped. If H/K query heads share a key head, keys and values are H/K times fewer
// bytes, and the operations are the same. Variants 3 and 6 have windows; all have shared key heads. In
// variants 3 to 5 a thread or warp has a fixed share of a tile, so they have one block size.
#include "llmc/device/cuda/attention_forward.cuh"

#include <optional>
#include <vector>

#include "dev/attention_backward_reference.h"
#include "dev/attention_forward_reference.h"
#include "dev/lab/lab.h"

namespace lab::attention_forward_variants {

using namespace llmc::cuda;

// ---- a head's place, from its number b H + h ----

template <class X>
__device__ HeadRows<X> head_of_qkv(const QueryKeyValue<X>& qkv, const AttentionSizes& s, int part, int head) {
    const int b = head / s.heads, h = head % s.heads;
    if (part == 0) return head_of(qkv.q, s, b, h);
    return head_of(part == 1 ? qkv.k : qkv.v, s, b, s.key_head(h));
}
template <class X>
__device__ HeadRows<X> head_of_out(X* out, const AttentionSizes& s, int head) {
    return llmc::cuda::head_of_out(out, s, head / s.heads, head % s.heads);
}

// ---- 1: scores (B NH,T,T) in memory, a thread per row ----

template <class X>
__global__ void attention_scores_kernel1(float* scores, QueryKeyValue<const X> qkv, AttentionSizes sizes,
                                         float scale) {
    const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= sizes.all_heads() * sizes.sequence) return;
    const int head = row / sizes.sequence, query = row % sizes.sequence;
    const X* q = head_of_qkv(qkv, sizes, 0, head).row(query);
    const HeadRows<const X> k = head_of_qkv(qkv, sizes, 1, head);
    for (int j = 0; j <= query; ++j) {
        float sum = 0;
        for (int c = 0; c < sizes.head_size; ++c) sum += to_float(q[c]) * to_float(k.row(j)[c]);
        scores[std::int64_t{row} * sizes.sequence + j] = sum * scale;
    }
}

// Replaces the scores by probabilities.
__global__ void attention_softmax_kernel1(float* scores, float* lse, AttentionSizes sizes) {
    const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= sizes.all_heads() * sizes.sequence) return;
    const int query = row % sizes.sequence;
    float* s = scores + std::int64_t{row} * sizes.sequence;
    float greatest = -INFINITY;
    for (int j = 0; j <= query; ++j) greatest = fmaxf(greatest, s[j]);
    float sum = 0;
    for (int j = 0; j <= query; ++j) sum += exp2_approximate(s[j] - greatest);
    for (int j = 0; j <= query; ++j) s[j] = exp2_approximate(s[j] - greatest) / sum;
    lse[row] = greatest * ln_2 + logf(sum);
}

template <class X>
__global__ void attention_values_kernel1(X* out, const float* scores, QueryKeyValue<const X> qkv,
                                         AttentionSizes sizes) {
    const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (row >= sizes.all_heads() * sizes.sequence) return;
    const int head = row / sizes.sequence, query = row % sizes.sequence;
    const float* p = scores + std::int64_t{row} * sizes.sequence;
    const HeadRows<const X> v = head_of_qkv(qkv, sizes, 2, head);
    X* to = head_of_out(out, sizes, head).row(query);
    for (int c = 0; c < sizes.head_size; ++c) {
        float sum = 0;
        for (int j = 0; j <= query; ++j) sum += p[j] * to_float(v.row(j)[c]);
        to[c] = from_float<X>(sum);
    }
}

// ---- 2: a warp does a query ----

template <class X>
__global__ void attention_forward_kernel2(X* out, float* lse, QueryKeyValue<const X> qkv,
                                          AttentionSizes sizes, float scale) {
    const int query = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / warp_threads);
    if (query >= sizes.sequence) return;
    const int head = static_cast<int>(blockIdx.y), lane = own_lane();
    const X* q = head_of_qkv(qkv, sizes, 0, head).row(query);
    const HeadRows<const X> k = head_of_qkv(qkv, sizes, 1, head), v = head_of_qkv(qkv, sizes, 2, head);
    constexpr int own_columns = 4;  // lane, lane + 32 ...
    float sums[own_columns] = {}, sum = 0, greatest = -INFINITY;
    for (int first_key = 0; first_key <= query; first_key += warp_threads) {
        const int key = first_key + lane;
        float score = -INFINITY;
        if (key <= query) {
            score = 0;
            for (int c = 0; c < sizes.head_size; c += Packed<X>::size) {
                const Packed<X> a = load(q + c), b = load(k.row(key) + c);
                for (int i = 0; i < Packed<X>::size; ++i) score = fmaf(to_float(a[i]), to_float(b[i]), score);
            }
        }
        const float larger = fmaxf(greatest, warp_maximum(score) * scale);
        const float factor = exp2_approximate(greatest - larger);
        const float p = exp2_approximate(fmaf(score, scale, -larger));
        greatest = larger;
        sum = sum * factor + warp_sum(p);
        for (float& of_column : sums) of_column *= factor;
        const int keys = min(warp_threads, query + 1 - first_key);
        for (int j = 0; j < keys; ++j) {
            const float p_j = __shfl_sync(all_lanes, p, j);
            const X* value = v.row(first_key + j);
            for (int i = 0; i < own_columns; ++i) {
                const int c = lane + i * warp_threads;
                if (c < sizes.head_size) sums[i] = fmaf(p_j, to_float(value[c]), sums[i]);
            }
        }
    }
    X* to = head_of_out(out, sizes, head).row(query);
    for (int i = 0; i < own_columns; ++i) {
        const int c = lane + i * warp_threads;
        if (c < sizes.head_size) to[c] = from_float<X>(sums[i] / sum);
    }
    if (lane == 0) lse[std::int64_t{head} * sizes.sequence + query] = greatest * ln_2 + logf(sum);
}

// ---- 4 and 5: a block does 64 queries on tensor cores, a warp 16 ----

inline constexpr int tile_rows = 64, tile_threads = 128;
inline constexpr int no_window = 1 << 30;  // hides nothing

// Rows in the same order as in memory.
template <int columns_>
struct PlainTile {
    using Element = bf16;

    static constexpr int rows = tile_rows, columns = columns_;
    static constexpr std::size_t elements = std::size_t{rows} * columns;
    bf16* data;

    __device__ bf16* chunk(int row, int c) const { return data + row * columns + c * 8; }
};

template <int columns>
__device__ void copy_tile(PlainTile<columns> to, HeadRows<const bf16> from, int first, int sequence,
                          int head_size) {
    for (int i = static_cast<int>(threadIdx.x); i < tile_rows * columns / 8; i += tile_threads) {
        const int row = i / (columns / 8), chunk = i % (columns / 8);
        Packed<bf16> x{};
        if (chunk * 8 < head_size && first + row < sequence) x = load(from.row(first + row) + chunk * 8);
        store(to.chunk(row, chunk), x);
    }
}

// The results so far of a warp's 16 queries.
template <int columns>
struct Rows {
    Block sums[1][columns / 16] = {};
    llmc::cuda::detail::RunningSoftmax<1> softmax;

    template <class AnyTile>
    __device__ __forceinline__ void multiply_queries(Block (&scores)[1][tile_rows / 16], AnyTile queries,
                                                     AnyTile keys, int first_query, int first_key,
                                                     float scale) {
        const int row = own_warp() * 16;
        llmc::cuda::detail::multiply_queries(scores, queries, row, keys);
        llmc::cuda::detail::hide_unseen(scores, first_query + row, first_key, no_window);
        float factors[1][2];
        softmax.raise(factors, scores, scale);
        llmc::cuda::detail::scale_rows(sums, factors);
    }
    template <class AnyTile>
    __device__ __forceinline__ void multiply_values(Block (&scores)[1][tile_rows / 16], AnyTile values,
                                                    float scale) {
        llmc::cuda::detail::multiply_values(sums, softmax, scores, scale, values);
    }
    __device__ __forceinline__ void store(bf16* out, float* lse, const AttentionSizes& sizes, int head,
                                          int first_query) {
        float reciprocals[1][2];
        softmax.finish(reciprocals);
        llmc::cuda::detail::scale_rows(sums, reciprocals);
        const HeadRows<bf16> to = head_of_out(out, sizes, head);
        for (int half = 0; half < 2; ++half) {
            const int query = first_query + own_warp() * 16 + block_row(2 * half);
            if (query >= sizes.sequence) continue;
            if (threadIdx.x % 4 == 0) {
                lse[std::int64_t{head} * sizes.sequence + query] =
                    softmax.greatest[0][half] * ln_2 + logf(softmax.sum[0][half]);
            }
            for (int c = 0; c < columns / 16; ++c) {
                for (int n = 0; n < 2; ++n) {
                    const int column = 16 * c + block_column(n, 0);
                    if (column >= sizes.head_size) continue;
                    *reinterpret_cast<std::uint32_t*>(to.row(query) + column) =
                        pack_pair<bf16>(sums[0][c][n][2 * half], sums[0][c][n][2 * half + 1]);
                }
            }
        }
    }
};

template <int columns>
__global__ void __launch_bounds__(tile_threads)
    attention_forward_kernel4(bf16* out, float* lse, QueryKeyValue<const bf16> qkv, AttentionSizes sizes,
                              float scale) {
    using AnyTile = PlainTile<columns>;
    SharedAllocator shared;
    const AnyTile queries{shared.take<bf16>(AnyTile::elements)}, keys{shared.take<bf16>(AnyTile::elements)},
        values{shared.take<bf16>(AnyTile::elements)};
    const int first_query = static_cast<int>(blockIdx.x) * tile_rows, head = static_cast<int>(blockIdx.y);
    const HeadRows<const bf16> q = head_of_qkv(qkv, sizes, 0, head), k = head_of_qkv(qkv, sizes, 1, head),
                               v = head_of_qkv(qkv, sizes, 2, head);
    copy_tile(queries, q, first_query, sizes.sequence, sizes.head_size);
    Rows<columns> rows;
    for (int first_key = 0; first_key <= first_query; first_key += tile_rows) {
        __syncthreads();
        copy_tile(keys, k, first_key, sizes.sequence, sizes.head_size);
        copy_tile(values, v, first_key, sizes.sequence, sizes.head_size);
        __syncthreads();
        Block scores[1][tile_rows / 16] = {};
        rows.multiply_queries(scores, queries, keys, first_query, first_key, scale);
        rows.multiply_values(scores, values, scale);
    }
    rows.store(out, lse, sizes, head, first_query);
}

template <int columns>
__global__ void __launch_bounds__(tile_threads)
    attention_forward_kernel5(bf16* out, float* lse, QueryKeyValue<const bf16> qkv, AttentionSizes sizes,
                              float scale) {
    using AnyTile = Tile<bf16, tile_rows, columns>;
    SharedAllocator shared;
    const AnyTile queries{shared.take<bf16>(AnyTile::elements)}, keys{shared.take<bf16>(AnyTile::elements)},
        values{shared.take<bf16>(AnyTile::elements)};
    const int first_query = static_cast<int>(blockIdx.x) * tile_rows, head = static_cast<int>(blockIdx.y);
    const auto start = [&](AnyTile to, int part, int first) {
        load_tile<tile_threads>(to, head_of_qkv(qkv, sizes, part, head), first, sizes.sequence,
                                sizes.head_size);
    };
    start(queries, 0, first_query);
    start(keys, 1, 0);
    copy_async_commit();
    Rows<columns> rows;
    for (int first_key = 0; first_key <= first_query; first_key += tile_rows) {
        copy_async_wait<0>();
        __syncthreads();
        start(values, 2, first_key);
        copy_async_commit();
        Block scores[1][tile_rows / 16] = {};
        rows.multiply_queries(scores, queries, keys, first_query, first_key, scale);
        copy_async_wait<0>();
        __syncthreads();
        if (first_key + tile_rows <= first_query) start(keys, 1, first_key + tile_rows);
        copy_async_commit();
        rows.multiply_values(scores, values, scale);
    }
    rows.store(out, lse, sizes, head, first_query);
}

template <class X>
class AttentionForward : public Problem {
  public:
    AttentionForward(const Shape& shape, Draw& draw)
        : sizes_{shape[0],
                 static_cast<int>(shape[1]),
                 static_cast<int>(shape[2]),
                 static_cast<int>(shape[3]),
                 static_cast<int>(shape[4]),
                 window_of(shape[5], shape[1])},
          qkv_(shape[0] * shape[1] * packed_row(sizes_)),
          out_(elements()),
          lse_(sizes_.all_heads() * sizes_.sequence) {
        draw.normal(qkv_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        if (variant == 6 && block_size == 256) return run_eight_warps(on);
        if (variant == 6) {
            return attention_forward(on, out_.data(), lse_.data(), packed_heads<const X>(qkv_.data(), sizes_),
                                     sizes_);
        }
        if constexpr (!std::is_same_v<X, fp16>) return run_earlier(variant, block_size, on);
        llmc::programming_error("no such variant");
    }

    // The tile of variant 6, of which a thread has half the work; a barrier waits for twice the warps.
    void run_eight_warps(const LaunchContext& on) {
        if constexpr (!std::is_same_v<X, float>) {
            using llmc::cuda::AttentionForwardTiling, llmc::cuda::detail::launch_attention_forward;
            const QueryKeyValue<const X> qkv = packed_heads<const X>(qkv_.data(), sizes_);
            if (sizes_.head_size <= 64) {
                launch_attention_forward<AttentionForwardTiling<X, 64, 16, 2, 8>>(on, out_.data(),
                                                                                  lse_.data(), qkv, sizes_);
            } else {
                launch_attention_forward<AttentionForwardTiling<X, 128, 16, 1, 8>>(on, out_.data(),
                                                                                   lse_.data(), qkv, sizes_);
            }
        }
    }

    void run_earlier(int variant, int block_size, const LaunchContext& on) {
        const float scale = attention_scale(sizes_);
        X* out = out_.data();
        const QueryKeyValue<const X> qkv = packed_heads<const X>(qkv_.data(), sizes_);
        const int sequence = sizes_.sequence, warps = block_size / warp_threads;
        const auto heads = static_cast<unsigned>(sizes_.all_heads());
        const auto blocks = [](std::int64_t n, int a_block) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(n, a_block));
        };
        const unsigned rows = blocks(heads * std::int64_t{sequence}, block_size);
        const auto launch_tiles = [&](auto kernel, std::size_t tile_elements) {
            launch(on, kernel, dim3(blocks(sequence, tile_rows), heads), block_size,
                   3 * SharedAllocator::bytes<bf16>(tile_elements), out, lse_.data(), qkv, sizes_, scale);
        };
        switch (variant) {
            case 1:
                if (!scores_) scores_.emplace(heads * std::int64_t{sequence} * sequence);
                launch(on, attention_scores_kernel1<X>, rows, block_size, 0, scores_->data(), qkv, sizes_,
                       scale);
                launch(on, attention_softmax_kernel1, rows, block_size, 0, scores_->data(), lse_.data(),
                       sizes_);
                return launch(on, attention_values_kernel1<X>, rows, block_size, 0, out, scores_->data(), qkv,
                              sizes_);
            case 2:
                return launch(on, attention_forward_kernel2<X>, dim3(blocks(sequence, warps), heads),
                              block_size, 0, out, lse_.data(), qkv, sizes_, scale);
            case 3:
                return attention_forward_without_tensor_cores(on, out, lse_.data(), qkv, sizes_);
            case 4:
            case 5:
                if constexpr (std::is_same_v<X, bf16>) {
                    const bool narrow = sizes_.head_size <= 64;
                    const auto narrow_kernel =
                        variant == 4 ? attention_forward_kernel4<64> : attention_forward_kernel5<64>;
                    const auto wide_kernel =
                        variant == 4 ? attention_forward_kernel4<128> : attention_forward_kernel5<128>;
                    return launch_tiles(narrow ? narrow_kernel : wide_kernel,
                                        tile_rows * (narrow ? 64 : 128));
                }
                [[fallthrough]];
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        out_.clear();
        lse_.clear();
        if (scores_) scores_->clear();
    }

    void compare(Comparison& comparison) override {
        for (std::int64_t head = 0; head < sizes_.all_heads(); ++head) {
            for (int t = 0; t < sizes_.sequence; ++t) compare_row(comparison, head, t);
        }
    }

    double bytes() const override {
        return static_cast<double>(qkv_.bytes()) + static_cast<double>(out_.bytes());
    }
    double flops() const override { return 4.0 * sizes_.head_size * pairs_of(sizes_); }

  private:
    std::int64_t elements() const { return sizes_.all_heads() * sizes_.sequence * sizes_.head_size; }

    std::int64_t at(std::int64_t head, int t, int part, int c) const {
        return qkv_index(sizes_, head, t, part) + c;
    }

    void compare_row(Comparison& comparison, std::int64_t head, int t) {
        const int columns = sizes_.head_size;
        const int first = sizes_.first_key(t);
        const AttentionRow attention(
            t + 1 - first, columns, [&](int c) { return to_float(qkv_[at(head, t, 0, c)]); },
            [&](int j, int c) { return to_float(qkv_[at(head, first + j, 1, c)]); });

        // A score has HS roundings, which tensor cores do by truncation (2 u each). The scale and the product
        // with it add 4. The difference from the maximum adds 2, and is up to twice as large as a score. The
        // differences between successive maxima add up to at most that, too. A power of two has 2 ulp (4 u).
        // Each 32 keys add one such power as a factor, and the product with it.
        constexpr double u = unit_roundoff<float>;
        const double n = t + 1 - first, largest_size = attention.largest_size();
        const double weight_error = std::expm1((2 * columns + 10) * u * largest_size + 5 * u * (n / 32 + 2));
        // The n roundings of the sum, that of the logarithm, and those of the maximum times ln 2.
        comparison.see("lse", head * sizes_.sequence + t, lse_[head * sizes_.sequence + t],
                       attention.log_sum_exp(), weight_error + n * u + 5 * u * (std::log(n) + largest_size));
        for (int c = 0; c < columns; ++c) {
            double all = 0;  // sum of the values' magnitudes
            const auto [value, size] = attention.output([&](int j) {
                const double x = to_float(qkv_[at(head, first + j, 2, c)]);
                all += std::fabs(x);
                return x;
            });
            // The weights and their sum have similar errors. Tensor cores take rounded weights, of which the greatest
            // is 1. Then come the truncated sum of n terms, the sum of weights, and the division.
            const double rounding =
                rounding_of_weights<X>.error(size) + rounding_of_weights<X>.absolute * all;
            const double error = size * (2 * weight_error + (3 * n + 4) * u) + rounding;
            const std::int64_t i =
                ((head / sizes_.heads * sizes_.sequence + t) * sizes_.heads + head % sizes_.heads) * columns +
                c;
            comparison.see("out", i, to_float(out_[i]), value, rounded<X>(value, error));
        }
    }

    AttentionSizes sizes_;
    Array<X> qkv_, out_;
    Array<float> lse_;
    std::optional<Array<float>> scores_;
};

const Registration registration({
    .name = "attention_forward",
    .sizes = {"batch", "sequence", "heads", "head size", "key heads", "window"},
    .variants = {{1, "a thread does a row of a (T,T) matrix in memory", {64, 256}},
                 {2, "a warp does a query, softmax kept up to date", {32, 128}},
                 {3, "tiles in shared memory, fp32", {256}},
                 {4, "tensor cores", {128}},
                 {5, "cp.async, no bank conflicts", {128}},
                 {6, "32 queries a warp, longest first", {128, 256}}},
    .checked = {{1, 70, 1, 16, 1, 0},
                {1, 1, 2, 64, 2, 0},
                {2, 129, 2, 64, 1, 0},
                {1, 66, 3, 128, 3, 0},
                {1, 150, 1, 88, 1, 0},
                {1, 150, 2, 24, 1, 35}},
    .timed = {{8, 1024, 12, 64, 12, 0},
              {2, 4096, 12, 64, 12, 0},
              {4, 1024, 16, 128, 16, 0},
              {1, 4096, 16, 128, 16, 0},
              {1, 8192, 32, 128, 8, 0},
              {1, 8192, 32, 128, 8, 1024}},
    .takes =
        [](int variant, llmc::DType dtype, const Shape& shape) {
            if (variant == 1 && shape[1] > 1024) return false;                // its matrix is too large
            if (shape[5] != 0 && variant != 3 && variant != 6) return false;  // has no windows
            return variant == 6   ? dtype != llmc::DType::fp32
                   : variant <= 3 ? dtype != llmc::DType::fp16
                                  : dtype == llmc::DType::bf16;
        },
    .make = make_problem<AttentionForward>,
    .checked_for_races = {{1, 130, 1, 16, 1, 0}, {1, 130, 1, 128, 1, 0}},
});

}  // namespace lab::attention_forward_variants
