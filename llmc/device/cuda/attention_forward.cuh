// Causal attention forward (ops.h: attention_forward), for each block of queries over blocks of keys with the
// softmax kept up to date, so that no (T,T) matrix exists (Dao, "FlashAttention-2", 2023). In bf16 on tensor
// cores; the probabilities are rounded to bf16 for their product with the values, all else is fp32. In fp32:
// attention_forward_fp32.cuh. How the kernel came about: dev/attention_forward.cu.
#pragma once

#include <type_traits>

#include "llmc/device/cuda/attention_forward_fp32.cuh"
#include "llmc/device/cuda/attention_tiles.cuh"

namespace llmc::cuda {

namespace detail {

// The softmax of the rows of a warp's blocks over the keys seen so far, for scores s that are to be multiplied by
// `scale`: sum = sum_j 2^((s_j - greatest) scale), with log2(e) in the scale. A lane holds two rows of each block
// of 16, and of their sums only its own columns.
template <int row_blocks>
struct RunningSoftmax {
    float greatest[row_blocks][2];
    float sum[row_blocks][2];

    __device__ __forceinline__ RunningSoftmax() {
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
            greatest[r][0] = greatest[r][1] = -INFINITY;
            sum[r][0] = sum[r][1] = 0;
        }
    }

    // Takes the greatest of further scores. What was summed before must be multiplied by `factors`.
    template <int key_blocks>
    __device__ __forceinline__ void raise(float (&factors)[row_blocks][2],
                                          const Block (&scores)[row_blocks][key_blocks], float scale) {
#pragma unroll
        for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float larger = greatest[r][half];
#pragma unroll
                for (int k = 0; k < key_blocks; ++k) {
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        larger = fmaxf(larger, fmaxf(scores[r][k][n][2 * half], scores[r][k][n][2 * half + 1]));
                    }
                }
                larger = row_reduce(larger, Maximum{});
                factors[r][half] = exp2_approximate((greatest[r][half] - larger) * scale);
                greatest[r][half] = larger;
                sum[r][half] *= factors[r][half];
            }
        }
    }

    // The block's scores become probabilities, not yet divided by their sum.
    __device__ __forceinline__ void exponentiate(Block& scores, int r, float scale) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float shift = greatest[r][half] * scale;
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    scores[n][i] = exp2_approximate(fmaf(scores[n][i], scale, -shift));
                    sum[r][half] += scores[n][i];
                }
            }
        }
    }
};

// Scores of keys behind their query become -infinity: element (i, j) of the block belongs to query `query` + i
// and key `key` + j.
__device__ __forceinline__ void hide_unseen(Block& scores, int query, int key) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (key + block_column(n, i) > query + block_row(i)) scores[n][i] = -INFINITY;
        }
    }
}

}  // namespace detail

// How attention_forward_kernel6 divides its work: heads of up to `columns`; four warps, each with `warp_rows`
// queries; tiles of 64 keys or values, of which `places` are in shared memory; registers for `blocks` blocks a
// multiprocessor. 32 queries a warp use each key that it reads from shared memory twice, and tensor cores wait
// less for shared memory.
template <int columns_, int warp_rows_, int places_, int blocks_>
struct AttentionForwardTiling {
    static constexpr int columns = columns_, warp_rows = warp_rows_, places = places_, blocks = blocks_;
    static constexpr int threads = 4 * warp_threads;
    using QueryTile = Tile<4 * warp_rows, columns>;
    using KeyTile = Tile<64, columns>;
    static constexpr std::size_t shared_bytes = SharedAllocator::bytes<bf16>(QueryTile::elements) +
                                                SharedAllocator::bytes<bf16>(places * KeyTile::elements);
};

// A block does a tile of queries of a head; block (x, y) head x, the tiles in decreasing order, since the last has
// the most keys and should not begin last. `scale`: log2(e) / sqrt(HS).
template <class Tiling>
__global__ void __launch_bounds__(Tiling::threads, Tiling::blocks)
    attention_forward_kernel6(bf16* out, float* lse, const bf16* qkv, AttentionSizes sizes, float scale) {
    using QueryTile = typename Tiling::QueryTile;
    using KeyTile = typename Tiling::KeyTile;
    constexpr int threads = Tiling::threads, places = Tiling::places;
    constexpr int row_blocks = Tiling::warp_rows / 16, key_blocks = KeyTile::rows / 16,
                  column_blocks = Tiling::columns / 16;
    SharedAllocator shared;
    const QueryTile queries{shared.take<bf16>(QueryTile::elements)};
    bf16* const key_places = shared.take<bf16>(places * KeyTile::elements);

    const std::int64_t head = blockIdx.x;
    const int first_query = static_cast<int>(gridDim.y - 1 - blockIdx.y) * QueryTile::rows;
    const int warp_row = static_cast<int>(threadIdx.x) / warp_threads * Tiling::warp_rows;
    const int warp_query = first_query + warp_row;
    const HeadRows<const bf16> k = head_of_qkv(qkv, sizes, 1, head), v = head_of_qkv(qkv, sizes, 2, head);
    const int key_tiles = blocks_for(min(sizes.sequence, first_query + QueryTile::rows), KeyTile::rows);

    // Keys and values take turns: K_0, V_0, K_1, V_1 ... Tile i is copied to place i % places, while the tiles
    // before it are worked on.
    const auto place = [&](int i) { return KeyTile{key_places + i % places * KeyTile::elements}; };
    const auto start = [&](int i) {
        if (i < 2 * key_tiles) {
            load_tile<threads>(place(i), i % 2 == 0 ? k : v, i / 2 * KeyTile::rows, sizes.sequence,
                               sizes.head_size);
        }
        copy_async_commit();
    };
    // After the barrier all threads' copies of tile i are there, and tile i - 1 is not needed any more.
    const auto next = [&](int i) {
        copy_async_wait<places - 2>();
        __syncthreads();
        start(i + places - 1);
        return place(i);
    };
    load_tile<threads>(queries, head_of_qkv(qkv, sizes, 0, head), first_query, sizes.sequence,
                       sizes.head_size);
#pragma unroll
    for (int i = 0; i < places - 1; ++i) start(i);

    Block sums[row_blocks][column_blocks] = {};  // sum_j p_j v_j
    detail::RunningSoftmax<row_blocks> softmax;
    for (int tile = 0; tile < key_tiles; ++tile) {
        const int first_key = tile * KeyTile::rows;
        // The same for a whole warp: whether it has queries that see these keys, and some that do not see all.
        const bool seen = first_key < warp_query + Tiling::warp_rows;
        const bool diagonal = first_key + KeyTile::rows - 1 > warp_query;

        const KeyTile keys = next(2 * tile);
        Block scores[row_blocks][key_blocks] = {};
        if (seen) {
#pragma unroll
            for (int c = 0; c < column_blocks; ++c) {
                Operand q[row_blocks];
#pragma unroll
                for (int r = 0; r < row_blocks; ++r) load_a(q[r], queries, warp_row + 16 * r, 16 * c);
#pragma unroll
                for (int j = 0; j < key_blocks; ++j) {
                    Operand key;
                    load_b_transposed(key, keys, 16 * j, 16 * c);
#pragma unroll
                    for (int r = 0; r < row_blocks; ++r) multiply_add(scores[r][j], q[r], key);
                }
            }
            if (diagonal) {
#pragma unroll
                for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
                    for (int j = 0; j < key_blocks; ++j) {
                        detail::hide_unseen(scores[r][j], warp_query + 16 * r, first_key + 16 * j);
                    }
                }
            }
            float factors[row_blocks][2];
            softmax.raise(factors, scores, scale);
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

        const KeyTile values = next(2 * tile + 1);
        if (seen) {
#pragma unroll
            for (int j = 0; j < key_blocks; ++j) {
                Operand p[row_blocks];
#pragma unroll
                for (int r = 0; r < row_blocks; ++r) {
                    softmax.exponentiate(scores[r][j], r, scale);
                    round_to_a(p[r], scores[r][j]);
                }
#pragma unroll
                for (int c = 0; c < column_blocks; ++c) {
                    Operand value;
                    load_b(value, values, 16 * j, 16 * c);
#pragma unroll
                    for (int r = 0; r < row_blocks; ++r) multiply_add(sums[r][c], p[r], value);
                }
            }
        }
    }

    // Through the tile of queries, of which a warp reads and writes its own rows only, so that whole rows go out.
    __syncwarp();
#pragma unroll
    for (int r = 0; r < row_blocks; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float sum = row_reduce(softmax.sum[r][half], Sum{});
            const float reciprocal = 1 / sum;
#pragma unroll
            for (int c = 0; c < column_blocks; ++c) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    sums[r][c][n][2 * half] *= reciprocal;
                    sums[r][c][n][2 * half + 1] *= reciprocal;
                }
            }
            const int query = warp_query + 16 * r + block_row(2 * half);
            if (threadIdx.x % 4 == 0 && query < sizes.sequence) {
                lse[head * sizes.sequence + query] =
                    softmax.greatest[r][half] * scale * ln_2 + logf(sum);
            }
        }
#pragma unroll
        for (int c = 0; c < column_blocks; ++c) {
            round_to_tile(queries, warp_row + 16 * r, 16 * c, sums[r][c]);
        }
    }
    __syncwarp();
    store_rows<Tiling::warp_rows>(head_of_out(out, sizes, head), first_query, sizes.sequence, sizes.head_size,
                                  queries, warp_row);
}

namespace detail {

template <class Tiling>
void launch_attention_forward(const LaunchContext& on, bf16* out, float* lse, const bf16* qkv,
                              const AttentionSizes& sizes) {
    const int tiles = blocks_for(sizes.sequence, Tiling::QueryTile::rows);
    check(tiles <= 65535, "attention: the sequence is too long");
    launch(on, attention_forward_kernel6<Tiling>,
           dim3(static_cast<unsigned>(sizes.all_heads()), static_cast<unsigned>(tiles)), Tiling::threads,
           Tiling::shared_bytes, out, lse, qkv, sizes, attention_scale(sizes));
}

}  // namespace detail

// out X (B,T,NH,HS), lse fp32 (B,NH,T), qkv X (B,T,3,NH,HS); HS a multiple of 8 up to 128
template <class X>
void attention_forward(const LaunchContext& on, X* out, float* lse, const X* qkv, const AttentionSizes& sizes) {
    check(sizes.head_size % 8 == 0 && sizes.head_size <= 128,
          "attention: the head size is not a multiple of 8 up to 128");
    if constexpr (std::is_same_v<X, float>) {
        attention_forward_without_tensor_cores(on, out, lse, qkv, sizes);
    } else if (sizes.head_size <= 64) {
        detail::launch_attention_forward<AttentionForwardTiling<64, 32, 4, 3>>(on, out, lse, qkv, sizes);
    } else if (on.chip.shared_bytes_per_multiprocessor > (160 << 10)) {
        detail::launch_attention_forward<AttentionForwardTiling<128, 32, 3, 2>>(on, out, lse, qkv, sizes);
    } else {
        // Where less shared memory would leave room for one block a multiprocessor.
        detail::launch_attention_forward<AttentionForwardTiling<128, 16, 2, 2>>(on, out, lse, qkv, sizes);
    }
}

}  // namespace llmc::cuda
