// Causal attention forward (ops.h: attention_forward). For each block of queries it goes over blocks of keys
// with a running softmax, so that no (T,T) matrix exists (Dao, "FlashAttention-2", 2023). The kernel
// for bf16 and fp16 uses tensor cores. It rounds the probabilities to 16 bits for their product with the values; all
// else is fp32.
// The fp32 kernel is in attention_forward_fp32.cuh. The development of this kernel is in
// dev/attention_forward.cu.
#pragma once

#include <type_traits>

#include "llmc/device/cuda/attention_forward_fp32.cuh"
#include "llmc/device/cuda/attention_tiles.cuh"

namespace llmc::cuda {

namespace detail {

// The running softmax of a warp's rows over the keys so far: sum = sum_j 2^(s_j scale - greatest). The scores
// s are not yet multiplied by `scale`, which includes log2(e). A lane has two rows of each block of 16; its
// `sum` covers only its own columns.
template <int row_blocks>
struct RunningSoftmax {
    float greatest[row_blocks][2];
    float sum[row_blocks][2];

    __device__ __forceinline__ RunningSoftmax() {
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
            greatest[r][0] = greatest[r][1] = no_score;
            sum[r][0] = sum[r][1] = 0;
        }
    }

    // Raises the maxima to those of further scores and rescales `sum`. The caller must multiply its own
    // earlier sums of values by `factors`.
    template <int key_blocks>
    __device__ __forceinline__ void raise(float (&factors)[row_blocks][2],
                                          const Block (&scores)[row_blocks][key_blocks],
                                          float scale LLMC_SITE) {
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float larger = -INFINITY;
#pragma unroll
                for (int j = 0; j < key_blocks; ++j) {
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        larger =
                            fmaxf(larger, fmaxf(scores[r][j][n][2 * half], scores[r][j][n][2 * half + 1]));
                    }
                }
                larger = fmaxf(greatest[r][half], row_reduce(larger, Maximum() LLMC_PASS_SITE) * scale);
                factors[r][half] = exp2_approximate(greatest[r][half] - larger);
                greatest[r][half] = larger;
                sum[r][half] *= factors[r][half];
            }
        }
    }

    // Turns the block's scores into probabilities, not yet divided by their sum, and adds them to `sum`.
    __device__ __forceinline__ void exponentiate(Block& scores, int r, float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {  // NOLINT(modernize-loop-convert): like the loops around it
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_approximate(fmaf(scores[n][i], scale, -greatest[r][half]));
                    sum[r][half] += scores[n][i];
                }
            }
        }
    }

    // Completes the sums over all columns, and returns their reciprocals.
    __device__ __forceinline__ void finish(float (&reciprocals)[row_blocks][2] LLMC_SITE) {
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                sum[r][half] = row_reduce(sum[r][half], Sum() LLMC_PASS_SITE);
                reciprocals[r][half] = __fdividef(1, sum[r][half]);
            }
        }
    }
};

// scores += q k^T, for the queries from `row` on
template <int row_blocks, int key_blocks, class QueryTile, class KeyTile>
__device__ __forceinline__ void multiply_queries(Block (&scores)[row_blocks][key_blocks], QueryTile queries,
                                                 int row, KeyTile keys LLMC_SITE) {
    const int lane = lane_id();
#pragma unroll
    for (int column = 0; column < KeyTile::columns; column += 16) {
        Operand q[row_blocks];
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) load_a(q[r], queries, row + 16 * r, column, lane LLMC_PASS_SITE);
#pragma unroll
        for (int j = 0; j < key_blocks; ++j) {
            Operand k;
            load_b_transposed(k, keys, 16 * j, column, lane LLMC_PASS_SITE);
#pragma unroll
            for (int r = 0; r < row_blocks; ++r)
                multiply_add<typename KeyTile::Element>(scores[r][j], q[r], k LLMC_PASS_SITE);
        }
    }
}

// Sets scores of keys that their query does not see to -infinity. The blocks begin at `query` and `key`.
template <int row_blocks, int key_blocks>
__device__ __forceinline__ void hide_unseen(Block (&scores)[row_blocks][key_blocks], int query, int key,
                                            int window) {
#pragma unroll
    for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
        for (int j = 0; j < key_blocks; ++j) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (!sees(query + 16 * r + block_row(i), key + 16 * j + block_column(n, i), window)) {
                        scores[r][j][n][i] = -INFINITY;
                    }
                }
            }
        }
    }
}

template <int row_blocks, int column_blocks>
__device__ __forceinline__ void scale_rows(Block (&sums)[row_blocks][column_blocks],
                                           const float (&factors)[row_blocks][2]) {
#pragma unroll
    for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
        for (int c = 0; c < column_blocks; ++c) {
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) sums[r][c][n][i] *= factors[r][i / 2];
            }
        }
    }
}

// sums += p v, with p = 2^(scores scale - greatest). p is computed 16 keys at a time, so that tensor cores
// work on some while others are computed.
template <int row_blocks, int key_blocks, int column_blocks, class ValueTile>
__device__ __forceinline__ void multiply_values(Block (&sums)[row_blocks][column_blocks],
                                                RunningSoftmax<row_blocks>& softmax,
                                                Block (&scores)[row_blocks][key_blocks], float scale,
                                                ValueTile values LLMC_SITE) {
    using X = typename ValueTile::Element;
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < key_blocks; ++j) {
        Operand p[row_blocks];
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
            softmax.exponentiate(scores[r][j], r, scale);
            round_to_a<X>(p[r], scores[r][j]);
        }
#pragma unroll
        for (int c = 0; c < column_blocks; ++c) {
            Operand v;
            load_b(v, values, 16 * j, 16 * c, lane LLMC_PASS_SITE);
#pragma unroll
            for (int r = 0; r < row_blocks; ++r) multiply_add<X>(sums[r][c], p[r], v LLMC_PASS_SITE);
        }
    }
}

}  // namespace detail

// The work division of attention_forward_kernel6, for heads of up to `columns` elements X, bf16 or fp16. Each of
// the `warps` has `warp_rows` queries. Tiles have 64 keys or values; shared memory holds one of each. Registers
// suffice for `blocks` blocks per multiprocessor.
//
// With 32 queries, a warp uses each key that it reads from shared memory twice, and tensor cores wait less
// for shared memory. This takes all registers: from sm_100 on, a thread spills 8 or 16 bytes.
template <class X, int columns_, int warp_rows_, int blocks_, int warps = 4>
struct AttentionForwardTiling {
    using Element = X;
    static constexpr int columns = columns_, warp_rows = warp_rows_, blocks = blocks_;
    static constexpr int threads = warps * warp_threads;
    using QueryTile = Tile<X, warps * warp_rows, columns>;
    using KeyTile = Tile<X, 64, columns>;
    static constexpr std::size_t shared_bytes =
        SharedAllocator::bytes<X>(QueryTile::elements) + 2 * SharedAllocator::bytes<X>(KeyTile::elements);
};

// A block computes a tile of a head's queries; block (x, y, z) has head x of sequence y. The tiles are in
// decreasing order, since the last has the most keys and should not start last. Blocks of neighboring heads,
// which may share keys, run at the same time. `scale` is log2(e) / sqrt(D).
template <class Tiling>
__global__ void __launch_bounds__(Tiling::threads, Tiling::blocks)
    attention_forward_kernel6(typename Tiling::Element* out, float* lse,
                              QueryKeyValue<const typename Tiling::Element> qkv, AttentionSizes sizes,
                              float scale) {
    using X = typename Tiling::Element;
    using QueryTile = typename Tiling::QueryTile;
    using KeyTile = typename Tiling::KeyTile;
    constexpr int threads = Tiling::threads;
    constexpr int row_blocks = Tiling::warp_rows / 16, key_blocks = KeyTile::rows / 16,
                  column_blocks = Tiling::columns / 16;
    SharedAllocator shared;
    const QueryTile queries{shared.take<X>(QueryTile::elements)};
    const KeyTile keys{shared.take<X>(KeyTile::elements)}, values{shared.take<X>(KeyTile::elements)};

    const int h = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.y);
    const int first_query = static_cast<int>(gridDim.z - 1 - blockIdx.z) * QueryTile::rows;
    const int warp_row = own_warp() * Tiling::warp_rows;
    const int warp_query = first_query + warp_row;
    const int key_tiles = blocks_for(min(sizes.sequence, first_query + QueryTile::rows), KeyTile::rows);

    const int first_tile = sizes.first_key(first_query) / KeyTile::rows;
    const int key_head = sizes.key_head(h);

    // K_0, V_0, K_1, V_1 ... are copied in turn, each while the one before it is in use.
    const auto start_keys = [&](int tile) {
        load_tile<threads>(keys, qkv.k, sizes, b, key_head, tile * KeyTile::rows);
        copy_async_commit();
    };
    const auto start_values = [&](int tile) {
        load_tile<threads>(values, qkv.v, sizes, b, key_head, tile * KeyTile::rows);
        copy_async_commit();
    };
    load_tile<threads>(queries, head_of(qkv.q, sizes, b, h), first_query, sizes.sequence, sizes.head_size);
    start_keys(first_tile);

    Block sums[row_blocks][column_blocks] = {};  // sum_j p_j v_j
    detail::RunningSoftmax<row_blocks> softmax;
    for (int tile = first_tile; tile < key_tiles; ++tile) {
        const int first_key = tile * KeyTile::rows;
        // These are the same for a whole warp: whether some of its queries see some of these keys, and
        // whether some do not see all. Hidden keys come later, or have left the window.
        const bool seen = first_key < warp_query + Tiling::warp_rows &&
                          first_key + KeyTile::rows + sizes.window > warp_query + 1;
        const bool edge = first_key + KeyTile::rows - 1 > warp_query ||
                          first_key + sizes.window < warp_query + Tiling::warp_rows;

        // After the barrier, all threads' copies of the keys have arrived, and the previous values are no
        // longer needed.
        copy_async_wait<0>();
        __syncthreads();
        start_values(tile);
        Block scores[row_blocks][key_blocks] = {};
        if (seen) {
            detail::multiply_queries(scores, queries, warp_row, keys);
            if (edge) detail::hide_unseen(scores, warp_query, first_key, sizes.window);
            float factors[row_blocks][2];
            softmax.raise(factors, scores, scale);
            detail::scale_rows(sums, factors);
        }

        copy_async_wait<0>();
        __syncthreads();
        if (tile + 1 < key_tiles) start_keys(tile + 1);
        if (seen) detail::multiply_values(sums, softmax, scores, scale, values);
    }

    float reciprocals[row_blocks][2];
    softmax.finish(reciprocals);
    if (threadIdx.x % 4 == 0) {
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = warp_query + 16 * r + block_row(2 * half);
                if (query < sizes.sequence) {
                    lse[(std::int64_t{b} * sizes.heads + h) * sizes.sequence + query] =
                        softmax.greatest[r][half] * ln_2 + logf(softmax.sum[r][half]);
                }
            }
        }
    }
    detail::scale_rows(sums, reciprocals);
    // Writes by way of the tile of queries, so that whole rows are stored. A warp reads and writes only its
    // own rows of the tile. (All warps have read their queries before the last barrier.)
#pragma unroll
    for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
        for (int c = 0; c < column_blocks; ++c) {
            round_to_tile(queries, warp_row + 16 * r, 16 * c, sums[r][c]);
        }
    }
    __syncwarp();
    store_rows<Tiling::warp_rows>(head_of_out(out, sizes, b, h), first_query, sizes.sequence, sizes.head_size,
                                  queries, warp_row);
}

namespace detail {

template <class Tiling>
void launch_attention_forward(const LaunchContext& on, typename Tiling::Element* out, float* lse,
                              const QueryKeyValue<const typename Tiling::Element>& qkv,
                              const AttentionSizes& sizes) {
    const int tiles = blocks_for(sizes.sequence, Tiling::QueryTile::rows);
    check(tiles <= 65535 && sizes.batch <= 65535, "attention: at most 65535 tiles and 65535 sequences");
    check(sizes.batch * sizes.sequence < (std::int64_t{1} << 31), "attention: an int counts the rows");
    launch(on, attention_forward_kernel6<Tiling>,
           dim3(static_cast<unsigned>(sizes.heads), static_cast<unsigned>(sizes.batch),
                static_cast<unsigned>(tiles)),
           Tiling::threads, Tiling::shared_bytes, out, lse, qkv, sizes, attention_scale(sizes));
}

}  // namespace detail

// out X (B,T,H,D), lse fp32 (B,H,T), qkv: heads in rows of any tensors; D is a multiple of 8 up to 128. All
// heads begin at multiples of 16 bytes.
template <class X>
void attention_forward(const LaunchContext& on, X* out, float* lse, const QueryKeyValue<const X>& qkv,
                       const AttentionSizes& sizes) {
    check(sizes.head_size % 8 == 0 && sizes.head_size <= 128,
          "attention: the head size is a multiple of 8 up to 128");
    if constexpr (std::is_same_v<X, float>) {
        attention_forward_without_tensor_cores(on, out, lse, qkv, sizes);
    } else if (sizes.head_size <= 64) {
        detail::launch_attention_forward<AttentionForwardTiling<X, 64, 32, 3>>(on, out, lse, qkv, sizes);
    } else if (on.chip.shared_bytes_per_multiprocessor > (160 << 10)) {
        detail::launch_attention_forward<AttentionForwardTiling<X, 128, 32, 2>>(on, out, lse, qkv, sizes);
    } else {
        // With less shared memory, only one block would fit a multiprocessor.
        detail::launch_attention_forward<AttentionForwardTiling<X, 128, 16, 2>>(on, out, lse, qkv, sizes);
    }
}

}  // namespace llmc::cuda
