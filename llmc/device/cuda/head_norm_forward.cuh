// The root-mean-square norm of heads (ops.h: head_norm_forward, head_norm_sums).
// head_norm_parts.cuh says how threads share a head.
#pragma once

#include "llmc/device/cuda/head_norm_parts.cuh"

namespace llmc::cuda {

namespace detail {

// The heads whose loads a thread has in flight at once.
template <int pieces>
inline constexpr int head_norm_forward_held = pieces == 1 ? 4 : 1;

}  // namespace detail

// With `only_sums`, rstd gets the sums of squares, and nothing else is written.
//   heads: the heads of all rows; count: the heads of a row
template <class X, int pieces, bool only_sums>
__global__ void __launch_bounds__(detail::head_norm_max_threads, pieces == 1 ? 2 : 1)
    head_norm_forward_kernel3(HeadPlaces<X> out, float* rstd, HeadPlaces<const X> in, const X* weight,
                              float eps, RankSums shared, unsigned heads, int count, int size) {
    constexpr int pack = Packed<X>::size, held = detail::head_norm_forward_held<pieces>;
    // The groups of a block take heads in turn, so that neighbors read neighboring heads.
    const unsigned first = blockIdx.x * held * blockDim.y + threadIdx.y;

    // Beyond the last head or column there are zeros, which add nothing to any sum.
    Packed<X> x[held][pieces];
#pragma unroll
    for (int r = 0; r < held; ++r) {
        const unsigned head = first + r * blockDim.y;
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
            const int column = detail::head_column<X>(p);
            x[r][p] = from_bits<X>({});
            if (head < heads && column < size) {
                x[r][p] = load_streaming(in.at(head / count, static_cast<int>(head % count), size, column));
            }
        }
    }
    float sums[held];
#pragma unroll
    for (int r = 0; r < held; ++r) {
        sums[r] = 0;
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
#pragma unroll
            for (int i = 0; i < pack; ++i) sums[r] += to_float(x[r][p][i]) * to_float(x[r][p][i]);
        }
    }
    detail::add_over_group(sums, 0);

    Packed<X> w[pieces];
    if constexpr (!only_sums) {
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
            w[p] = detail::head_weight(weight, detail::head_column<X>(p), size);
        }
    }
#pragma unroll
    for (int r = 0; r < held; ++r) {
        const unsigned head = first + r * blockDim.y;
        if (head >= heads) break;
        if constexpr (only_sums) {
            if (threadIdx.x == 0) rstd[head] = sums[r];
        } else {
            const float sum = shared.sums ? shared.of_row(head, heads) : sums[r];
            const float scale = rsqrtf(sum / shared.size + eps);
            if (threadIdx.x == 0) rstd[head] = scale;
#pragma unroll
            for (int p = 0; p < pieces; ++p) {
                const int column = detail::head_column<X>(p);
                if (column >= size) break;
#pragma unroll
                for (int i = 0; i < pack; ++i) {
                    x[r][p][i] = from_float<X>(to_float(x[r][p][i]) * scale * to_float(w[p][i]));
                }
                store(out.at(head / count, static_cast<int>(head % count), size, column), x[r][p]);
            }
        }
    }
}

namespace detail {

template <bool only_sums, class X>
void launch_head_norm_forward(const LaunchContext& on, HeadPlaces<X> out, float* rstd, HeadPlaces<const X> in,
                              const X* weight, float eps, RankSums shared, std::int64_t rows, int count,
                              int size, int block_threads) {
    check(has_whole_packs(out, size) && has_whole_packs(in, size), "head norm: pieces of 16 bytes");
    const unsigned heads = count_heads(rows, count);
    const HeadGroups g = head_groups<X>(size, block_threads);
    with_pieces(g, [&]<int pieces>() {
        const auto block_heads = static_cast<unsigned>(head_norm_forward_held<pieces> * g.groups);
        launch(on, head_norm_forward_kernel3<X, pieces, only_sums>, blocks_for(heads, block_heads),
               dim3(static_cast<unsigned>(g.threads), static_cast<unsigned>(g.groups)), 0, out, rstd, in,
               weight, eps, shared, heads, count, size);
    });
}

}  // namespace detail

// out, in: `count` heads of `size` elements in each of the rows; rstd fp32 (rows, count); weight X (size) or
// null. A head has at most 24 KiB. If ranks share the rows, the count is 1.
template <class X>
void head_norm_forward(const LaunchContext& on, HeadPlaces<X> out, float* rstd, HeadPlaces<const X> in,
                       const X* weight, float eps, RankSums shared, std::int64_t rows, int count, int size,
                       int block_threads = 256) {
    detail::launch_head_norm_forward<false>(on, out, rstd, in, weight, eps, shared, rows, count, size,
                                            block_threads);
}

// sums fp32 (rows)
template <class X>
void head_norm_sums(const LaunchContext& on, float* sums, HeadPlaces<const X> in, std::int64_t rows, int size,
                    int block_threads = 256) {
    detail::launch_head_norm_forward<true, X>(on, {nullptr, 0}, sums, in, nullptr, 0, {}, rows, 1, size,
                                              block_threads);
}

}  // namespace llmc::cuda
