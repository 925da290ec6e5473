// Shared by attention's forward and backward kernels: a head's place in its rows, tiles of it in shared
// memory, and the tensor cores' operands from such tiles. The head size may be less than a tile's columns.
// Columns past the head and rows past the sequence are read as 0 and never written.
#pragma once

#include <cmath>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/ptx.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

// Heads of B T rows (device/heads.h): head h of row n begins at first + n stride + h head_size.
template <class X>
struct RowHeads {
    X* first;
    int stride;  // elements from row to row
};
template <class X>
struct QueryKeyValue {
    RowHeads<X> q, k, v;
};

// There are `heads` query heads. group() neighbors share a key head and its values. Row t sees key j if
// t - window < j <= t. out and dout (B,T,H,D), lse (B,H,T); the number of a query head is b H + h.
struct AttentionSizes {
    std::int64_t batch;
    int sequence, heads, head_size;
    int key_heads = heads;
    int window = sequence;  // hides nothing
    float keys_per_head = static_cast<float>(key_heads) / static_cast<float>(heads);

    // The key head that query head h reads: h K / H, rounded down. The product is at least half of K/H away
    // from whole numbers, and exact to h K/H 2^-22, so this is right for any h below 2^21.
    __host__ __device__ int key_head(int h) const {
        return static_cast<int>((static_cast<float>(h) + 0.5f) * keys_per_head);
    }
    __host__ __device__ std::int64_t all_heads() const { return batch * heads; }
    __host__ __device__ int group() const { return heads / key_heads; }
    // The first key that query t and later ones see.
    __host__ __device__ int first_key(int t) const { return t < window ? 0 : t - window + 1; }
};

// exp(x / sqrt(D)) = 2^(x attention_scale)
inline float attention_scale(const AttentionSizes& s) {
    return log2_e / std::sqrt(static_cast<float>(s.head_size));
}

// q, k and v one after the other in rows of (H + 2 K) D elements.
template <class X>
QueryKeyValue<X> packed_heads(X* rows, int heads, int key_heads, int head_size) {
    const int stride = (heads + 2 * key_heads) * head_size;
    return {
        {rows, stride}, {rows + heads * head_size, stride}, {rows + (heads + key_heads) * head_size, stride}};
}
template <class X>
QueryKeyValue<X> packed_heads(X* rows, const AttentionSizes& s) {
    return packed_heads(rows, s.heads, s.key_heads, s.head_size);
}

// The rows of one head, t = 0 ... T-1, `stride` elements apart.
template <class X>
struct HeadRows {
    X* first;
    int stride;

    __device__ __forceinline__ X* row(int t) const { return first + std::int64_t{t} * stride; }
};

// Head h of sequence b
template <class X>
__device__ __forceinline__ HeadRows<X> head_of(const RowHeads<X>& heads, const AttentionSizes& s, int b,
                                               int h) {
    return {heads.first + std::int64_t{b} * s.sequence * heads.stride + h * s.head_size, heads.stride};
}
// The same for a tensor (B,T,H,D)
template <class X>
__device__ __forceinline__ HeadRows<X> head_of_out(X* out, const AttentionSizes& s, int b, int h) {
    return head_of(RowHeads<X>{out, s.heads * s.head_size}, s, b, h);
}

// Whether a query sees a key. Both comparisons in one: a later key gives a negative number, which is enormous
// without a sign.
__device__ __forceinline__ bool sees(int query, int key, int window) {
    return static_cast<unsigned>(query - key) < static_cast<unsigned>(window);
}

// The maximum of no scores. A window may hide all keys of a tile from a row. The maximum is therefore finite:
// differences between two of infinity would be NaN.
inline constexpr float no_score = -3.402823466e38f;

// The thread's warp. The shuffle tells the compiler that it is the same for all lanes.
__device__ __forceinline__ int own_warp(LLMC_ONLY_SITE) {
    return __shfl_sync(all_lanes, static_cast<int>(threadIdx.x / warp_threads), 0,
                       warp_threads LLMC_PASS_SITE);
}
// The thread's lane. If registers are short, use lane_id().
__device__ __forceinline__ int own_lane() { return static_cast<int>(threadIdx.x % warp_threads); }

// Returns x, hiding its value from the compiler. Values derived from it after a loop are then computed there,
// instead of being kept in registers during the loop.
__device__ __forceinline__ int hidden_from_compiler(unsigned x) {
#ifdef __CUDACC__
    asm volatile("" : "+r"(x));
#endif
    return static_cast<int>(x);
}

// ---- tiles of 16-bit elements in shared memory ----

// A tile in swizzled order: chunk c (8 elements, 16 bytes) of row r is stored at place c ^ (r & 7) of its
// row. Thus the chunks that ldmatrix reads at a time, one of each of 8 rows, are in different banks. So are
// the chunks of a row, which cp.async writes.
template <class X, int rows_, int columns_>
struct Tile {
    using Element = X;
    static constexpr int rows = rows_, columns = columns_, chunks = columns / 8;
    static constexpr std::size_t elements = std::size_t{rows} * columns;
    static_assert(rows % 16 == 0 && columns % 64 == 0);

    X* data;

    __device__ __forceinline__ X* chunk(int row, int c) const {
        return data + row * columns + (c ^ (row & 7)) * 8;
    }
    __device__ __forceinline__ X* at(int row, int column) const {
        return chunk(row, column / 8) + column % 8;
    }
};

// A thread's share of each tile that the `threads` of a block copy together: one chunk of some rows.
template <class X, int threads_, int columns>
struct TileCopy {
    static constexpr int threads = threads_, chunks = columns / 8, rows_at_a_time = threads / chunks;
    static_assert(threads % chunks == 0 && rows_at_a_time % 8 == 0);

    const X* source;  // this thread's chunk of its first row
    int stride;
    int rows_left;  // rows of the sequence from there on; 0 past the head's columns

    // Starts at row `first` of the head.
    __device__ __forceinline__ TileCopy(HeadRows<const X> from, int first, int sequence, int head_size)
        : source(from.row(first + own_row()) + own_chunk() * 8),
          stride(from.stride),
          rows_left(own_chunk() * 8 < head_size ? sequence - first - own_row() : 0) {}

    // Starts copying. The caller commits the group, waits for it, and then needs a barrier.
    template <int rows>
    __device__ __forceinline__ void start(Tile<X, rows, columns> to LLMC_SITE) const {
#pragma unroll
        for (int i = 0; i < rows; i += rows_at_a_time) {
            copy_async_16(to.chunk(own_row() + i, own_chunk()), source + std::int64_t{i} * stride,
                          i < rows_left LLMC_PASS_SITE);
        }
    }
    // Moves on by this many rows.
    __device__ __forceinline__ void advance(int rows) {
        source += std::int64_t{rows} * stride;
        rows_left -= rows;
    }

    __device__ static __forceinline__ int own_row() { return static_cast<int>(threadIdx.x / chunks); }
    __device__ static __forceinline__ int own_chunk() { return static_cast<int>(threadIdx.x % chunks); }
};

// Starts copying rows first ... of head h of sequence b into a tile, all indices computed anew. A loop that
// copies from two tensors needs fewer registers than with two addresses that move along. With 64 columns,
// where three blocks share the registers, the thread's place is computed anew too.
template <int threads, class X, int rows, int columns>
__device__ __forceinline__ void load_tile(Tile<X, rows, columns> to, const RowHeads<const X>& from,
                                          const AttentionSizes& s, int b, int h, int first LLMC_SITE) {
    using Copy = TileCopy<X, threads, columns>;
    const int thread = columns == 64 ? hidden_from_compiler(threadIdx.x) : static_cast<int>(threadIdx.x);
    const int row = first + thread / Copy::chunks, column = thread % Copy::chunks * 8;
    const int rows_left = column < s.head_size ? s.sequence - row : 0;
    const X* const source =
        from.first + std::int64_t{b * s.sequence + row} * from.stride + h * s.head_size + column;
#pragma unroll
    for (int i = 0; i < rows; i += Copy::rows_at_a_time) {
        copy_async_16(to.chunk(Copy::own_row() + i, Copy::own_chunk()),
                      source + std::int64_t{i} * from.stride, i < rows_left LLMC_PASS_SITE);
    }
}

// Starts copying rows first ... of a head into a tile.
template <int threads, class X, int rows, int columns>
__device__ __forceinline__ void load_tile(Tile<X, rows, columns> to, HeadRows<const X> from, int first,
                                          int sequence, int head_size LLMC_SITE) {
    TileCopy<X, threads, columns>(from, first, sequence, head_size).start(to LLMC_PASS_SITE);
}

// One warp writes rows [row, row + count) of a tile to rows first + row ... of a head. `count` is a multiple
// of 4.
template <int count, class X, int rows, int columns>
__device__ __forceinline__ void store_rows(HeadRows<X> to, int first, int sequence, int head_size,
                                           Tile<X, rows, columns> from, int row) {
    constexpr int chunks = columns / 8, rows_at_a_time = warp_threads / chunks;
    static_assert(count % rows_at_a_time == 0);
    const int lane = lane_id(), chunk = lane % chunks;
#pragma unroll
    for (int i = 0; i < count / rows_at_a_time; ++i) {
        const int r = row + lane / chunks + i * rows_at_a_time;
        if (chunk * 8 < head_size && first + r < sequence) {
            // The compiler would split a plain copy into four stores of four bytes.
            __stcg(reinterpret_cast<uint4*>(to.row(first + r) + chunk * 8),
                   to_bits(load(from.chunk(r, chunk))));
        }
    }
}

// ---- operands of the tensor cores ----
//
// A warp computes products in 16x16 blocks, d += a b. Lane 4 g + t holds, in block[n][i], the element of d in
//   row g + 8 (i / 2), column 8 n + 2 t + i % 2.
// Each lane has four registers of a and four of b (ptx.cuh). Rows and columns of tiles given below are
// multiples of 16.

using Operand = std::uint32_t[4];
using Block = float[2][4];

// The row and the column of an element of a block that the lane holds.
__device__ __forceinline__ int block_row(int i) { return own_lane() / 4 + 8 * (i / 2); }
__device__ __forceinline__ int block_column(int n, int i) {
    return 8 * n + 2 * (static_cast<int>(threadIdx.x % 4)) + i % 2;
}

template <class X>
__device__ __forceinline__ void multiply_add(Block& d, const Operand& a, const Operand& b LLMC_SITE) {
    mma_m16n8k16<X>(d[0], a, {b[0], b[1]} LLMC_PASS_SITE);
    mma_m16n8k16<X>(d[1], a, {b[2], b[3]} LLMC_PASS_SITE);
}

// The address that lane l passes to ldmatrix. multiply_add() needs the two registers of one half of an
// operand next to each other. The first and the second operand therefore load their four 8x8 matrices in
// different orders: down, then right; or right, then down.
template <class AnyTile>
__device__ __forceinline__ const typename AnyTile::Element* row_downwards(AnyTile tile, int row, int column,
                                                                          int lane) {
    return tile.chunk(row + lane % 16, column / 8 + lane / 16);
}
template <class AnyTile>
__device__ __forceinline__ const typename AnyTile::Element* row_rightwards(AnyTile tile, int row, int column,
                                                                           int lane) {
    return tile.chunk(row + lane / 16 * 8 + lane % 8, column / 8 + lane / 8 % 2);
}

// Loads the first operand from a tile: a[i][k] = tile[row + i][column + k]
template <class AnyTile>
__device__ __forceinline__ void load_a(Operand& a, AnyTile tile, int row, int column,
                                       int lane = own_lane() LLMC_SITE) {
    ldmatrix_x4(a, row_downwards(tile, row, column, lane) LLMC_PASS_SITE);
}
// The same from the transposed tile: a[i][k] = tile[row + k][column + i]
template <class AnyTile>
__device__ __forceinline__ void load_a_transposed(Operand& a, AnyTile tile, int row, int column,
                                                  int lane = own_lane() LLMC_SITE) {
    ldmatrix_x4_transposed(a, row_rightwards(tile, row, column, lane) LLMC_PASS_SITE);
}
// Loads the second operand from a tile: b[k][j] = tile[row + k][column + j]
template <class AnyTile>
__device__ __forceinline__ void load_b(Operand& b, AnyTile tile, int row, int column,
                                       int lane = own_lane() LLMC_SITE) {
    ldmatrix_x4_transposed(b, row_downwards(tile, row, column, lane) LLMC_PASS_SITE);
}
// The same from the transposed tile: b[k][j] = tile[row + j][column + k]
template <class AnyTile>
__device__ __forceinline__ void load_b_transposed(Operand& b, AnyTile tile, int row, int column,
                                                  int lane = own_lane() LLMC_SITE) {
    ldmatrix_x4(b, row_rightwards(tile, row, column, lane) LLMC_PASS_SITE);
}
// Rounds a computed block to X, as a first operand.
template <class X>
__device__ __forceinline__ void round_to_a(Operand& a, const Block& block) {
    a[0] = pack_pair<X>(block[0][0], block[0][1]);
    a[1] = pack_pair<X>(block[0][2], block[0][3]);
    a[2] = pack_pair<X>(block[1][0], block[1][1]);
    a[3] = pack_pair<X>(block[1][2], block[1][3]);
}
// Rounds a computed block into a tile. Other lanes may read it after a barrier.
template <class AnyTile>
__device__ __forceinline__ void round_to_tile(AnyTile tile, int row, int column, const Block& block) {
    using X = typename AnyTile::Element;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            X* const to = tile.at(row + block_row(i), column + block_column(n, i));
            *reinterpret_cast<std::uint32_t*>(to) = pack_pair<X>(block[n][i], block[n][i + 1]);
        }
    }
}

// Reduces over the four lanes that hold a row of a block.
template <class Operation>
__device__ __forceinline__ float row_reduce(float x, Operation operation LLMC_SITE) {
    x = operation(x, __shfl_xor_sync(all_lanes, x, 1, warp_threads LLMC_PASS_SITE));
    return operation(x, __shfl_xor_sync(all_lanes, x, 2, warp_threads LLMC_PASS_SITE));
}

}  // namespace llmc::cuda
