// Token and position embeddings, forward and backward (ops.h: encoder_forward, encoder_backward). The
// backward pass reads rows in the order of their tokens (token_order.cuh); its development is in
// dev/encoder_backward.cu.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/token_order.cuh"
#include "llmc/device/cuda/workspace.h"

namespace llmc::cuda {

// ---- forward ----

// A thread computes the same 16 bytes of a position in `encoder_batch` sequences. It reads wpe once for all
// of them. Its reads of wte, at random rows, are in flight together.
inline constexpr int encoder_batch = 4;

template <class X>
__global__ void __launch_bounds__(512)
    encoder_forward_kernel3(X* out, const std::int32_t* tokens, const X* wte, const X* wpe, TableRows table,
                            int batch, std::int64_t sequence, int channels) {
    constexpr int pack = Packed<X>::size;
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    const auto pieces = static_cast<unsigned>(channels / pack);
    const unsigned t = i / pieces, c = i % pieces * pack;
    if (t >= sequence) return;
    const int first = static_cast<int>(blockIdx.y) * encoder_batch;
    std::int64_t row[encoder_batch];
    Packed<X> embedding[encoder_batch];
#pragma unroll
    for (int k = 0; k < encoder_batch; ++k) {
        row[k] = first + k < batch ? table.of(tokens[(first + k) * sequence + t]) : -1;
    }
#pragma unroll
    for (int k = 0; k < encoder_batch; ++k) {
        embedding[k] = row[k] >= 0 ? load(wte + row[k] * channels + c) : from_bits<X>({});
    }
    const Packed<X> position = wpe ? load(wpe + std::int64_t{t} * channels + c) : from_bits<X>({});
#pragma unroll
    for (int k = 0; k < encoder_batch; ++k) {
        if (first + k >= batch) return;
        float sum[pack];
#pragma unroll
        for (int j = 0; j < pack; ++j) sum[j] = to_float(embedding[k][j]) + to_float(position[j]);
        store_streaming(out + ((first + k) * sequence + t) * channels + c, packed_from<X>(sum));
    }
}

// out X (batch, sequence, channels), tokens int32 (batch, sequence), wte X (table.count, channels), wpe X (at
// least sequence, channels) or null
template <class X>
void encoder_forward(const LaunchContext& on, X* out, const std::int32_t* tokens, const X* wte, const X* wpe,
                     TableRows table, int batch, std::int64_t sequence, int channels,
                     int block_threads = 256) {
    constexpr int pack = Packed<X>::size;
    check(channels % pack == 0, "encoder: channels are a multiple of 16 bytes");
    check(block_threads <= 512, "encoder: a block has at most as many threads as its kernel's launch bounds");
    const std::int64_t pieces = sequence * (channels / pack);
    if (pieces == 0 || batch == 0) return;
    check(pieces < std::int64_t{1} << 31, "encoder: a sequence has less than 2^31 pieces of 16 bytes");
    const dim3 grid(static_cast<unsigned>(blocks_for<std::int64_t>(pieces, block_threads)),
                    static_cast<unsigned>(blocks_for(batch, encoder_batch)));
    launch(on, encoder_forward_kernel3<X>, grid, block_threads, 0, out, tokens, wte, wpe, table, batch,
           sequence, channels);
}

// ---- backward

inline constexpr int tile_rows = encoder_tile_rows;

__device__ __forceinline__ std::int64_t partial_row(std::int64_t tile, PartialSum which) {
    return tile * partial_sums + which;
}

// The token of the row at `place` of the order; -1 if there is no row or `place` is outside.
__device__ __forceinline__ int token_at(const std::int32_t* order, const std::int32_t* tokens,
                                        std::int64_t place, std::int64_t rows) {
    const int row = place >= 0 && place < rows ? order[place] : -1;
    return row >= 0 ? tokens[row] : -1;
}

// to[0 ... n-1] += sum
template <int n>
__device__ __forceinline__ void add_to(float* to, const float (&sum)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += Packed<float>::size) {
        Packed<float> piece = load(to + i);
#pragma unroll
        for (int j = 0; j < Packed<float>::size; ++j) piece[j] += sum[i + j];
        store(to + i, piece);
    }
}

// A warp sums the rows of a tile, run by run, 16 bytes per lane. If a run is entirely inside the tile, no
// other warp adds to its row of dwte.
template <class X>
__global__ void __launch_bounds__(256, 3)
    encoder_backward_tiles_kernel4(float* dwte, float* partials, const X* dout, const std::int32_t* tokens,
                                   const std::int32_t* order, std::int64_t first_token, std::int64_t rows,
                                   int channels) {
    constexpr int pack = Packed<X>::size, loads = 4;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const std::int64_t tile =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    const std::int64_t begin = tile * tile_rows;
    if (begin >= rows) return;
    const int c = static_cast<int>(blockIdx.y * warp_threads + lane) * pack;

    const int row = begin + lane < rows ? order[begin + lane] : -1;
    const int token = row >= 0 ? tokens[row] : -1;
    const int last = __popc(__ballot_sync(all_lanes, row >= 0)) - 1;
    if (last < 0) return;
    int token_before = __shfl_up_sync(all_lanes, token, 1);
    int token_after = __shfl_down_sync(all_lanes, token, 1);
    if (lane == 0) token_before = token_at(order, tokens, begin - 1, rows);
    if (lane == last) token_after = token_at(order, tokens, begin + tile_rows, rows);
    // Bit i of run_ends: row i is the last of its run or of the tile. begins_before: the first run began in
    // an earlier tile. goes_on: the last run continues in the next tile.
    const unsigned run_ends = __ballot_sync(all_lanes, token != token_after || lane == last);
    const bool begins_before = __ballot_sync(all_lanes, token == token_before) & 1u;
    const bool goes_on = __ballot_sync(all_lanes, token == token_after) >> last & 1u;

    float sum[pack] = {};
    bool first_run = true;
#pragma unroll 1
    for (int first = 0; first <= last; first += loads) {
        Packed<X> pieces[loads];
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            const std::int64_t r = __shfl_sync(all_lanes, row, first + k);
            if (first + k <= last && c < channels) pieces[k] = load_streaming(dout + r * channels + c);
        }
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            const int i = first + k;
            if (i > last) break;
            if (c < channels) {
#pragma unroll
                for (int j = 0; j < pack; ++j) sum[j] += to_float(pieces[k][j]);
            }
            if (!(run_ends >> i & 1u)) continue;
            const std::int64_t of_token = __shfl_sync(all_lanes, token, i);
            if (c < channels) {
                const bool to_before = first_run && begins_before;
                if (to_before || (i == last && goes_on)) {
                    const auto which = to_before ? of_run_before : of_run_after;
                    float* const to = partials + partial_row(tile, which) * channels + c;
#pragma unroll
                    for (int j = 0; j < pack; j += Packed<float>::size) {
                        store(to + j, Packed<float>{{sum[j], sum[j + 1], sum[j + 2], sum[j + 3]}});
                    }
                } else {
                    add_to(dwte + (of_token - first_token) * channels + c, sum);
                }
            }
#pragma unroll
            for (int j = 0; j < pack; ++j) sum[j] = 0;
            first_run = false;
        }
    }
}

// Block b sums the run that begins in tile b and continues in others: their partial sums, in order.
template <int tile_rows_>
__global__ void __launch_bounds__(256)
    encoder_backward_runs_kernel4(float* dwte, const float* partials, const std::int32_t* tokens,
                                  const std::int32_t* order, std::int64_t first_token, std::int64_t rows,
                                  int channels) {
    constexpr int pack = Packed<float>::size;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const std::int64_t tile = blockIdx.x, next = (tile + 1) * tile_rows_;
    const std::int64_t token = token_at(order, tokens, next - 1, rows);
    if (token < 0 || token_at(order, tokens, next, rows) != token) return;
    if (token_at(order, tokens, next - 1 - tile_rows_, rows) == token) return;  // begins before
    std::int64_t end = tile + 1;  // the end of the tiles whose first row has this token
    for (unsigned same = all_lanes; same == all_lanes;) {
        same = __ballot_sync(all_lanes, token_at(order, tokens, (end + lane) * tile_rows_, rows) == token);
        end += same == all_lanes ? warp_threads : __ffs(static_cast<int>(~same)) - 1;
    }
    for (int c = static_cast<int>(threadIdx.x) * pack; c < channels;
         c += static_cast<int>(blockDim.x) * pack) {
        Packed<float> piece = load(partials + partial_row(tile, of_run_after) * channels + c);
        float sum[pack] = {piece[0], piece[1], piece[2], piece[3]};
#pragma unroll 8
        for (std::int64_t other = tile + 1; other < end; ++other) {
            piece = load(partials + partial_row(other, of_run_before) * channels + c);
#pragma unroll
            for (int j = 0; j < pack; ++j) sum[j] += piece[j];
        }
        add_to(dwte + (token - first_token) * channels + c, sum);
    }
}

// A thread sums 16 bytes of a position over the batch.
template <class X>
__global__ void __launch_bounds__(512)
    encoder_backward_positions_kernel4(float* dwpe, const X* dout, int batch, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
    if (i >= elements) return;
    float sum[pack] = {};
#pragma unroll 4
    for (int b = 0; b < batch; ++b) {
        const Packed<X> piece = load(dout + b * elements + i);
#pragma unroll
        for (int j = 0; j < pack; ++j) sum[j] += to_float(piece[j]);
    }
    add_to(dwpe + i, sum);
}

// Scratch memory of encoder_backward: the sorted rows, and the partial sums of tokens' rows.
struct EncoderScratch {
    std::int32_t* order;  // (rows)
    float* partials;      // (encoder_partials), aligned to 16 bytes
};

// dwte fp32 (table.count, channels), dwpe fp32 (at least sequence, channels) or null,
// dout X (batch, sequence, channels), tokens int32 (batch, sequence)
template <class X>
void encoder_backward(const LaunchContext& on, float* dwte, float* dwpe, const X* dout,
                      const std::int32_t* tokens, TableRows table, int batch, std::int64_t sequence,
                      int channels, EncoderScratch scratch, int block_threads = 256) {
    constexpr int pack = Packed<X>::size;
    check(channels % pack == 0, "encoder: channels are a multiple of 16 bytes");
    check(block_threads <= 256, "encoder: a block has at most as many threads as its kernel's launch bounds");
    const std::int64_t rows = batch * sequence;
    check(rows < std::int64_t{1} << 31, "encoder: less than 2^31 tokens");
    if (rows == 0 || channels == 0) return;
    const auto blocks = [](std::int64_t n, int size) {
        return static_cast<unsigned>(blocks_for<std::int64_t>(n, size));
    };
    const auto [order, partials] = scratch;
    if (dwpe)
        launch(on, encoder_backward_positions_kernel4<X>, blocks(sequence * channels / pack, block_threads),
               block_threads, 0, dwpe, dout, batch, sequence * channels);

    order_rows(on, order, tokens, table, static_cast<int>(rows));
    const std::int64_t tiles = blocks_for<std::int64_t>(rows, tile_rows);
    launch(on, encoder_backward_tiles_kernel4<X>,
           dim3(blocks(tiles, block_threads / warp_threads), blocks(channels, warp_threads * pack)),
           block_threads, 0, dwte, partials, dout, tokens, order, table.first, rows, channels);
    if (tiles == 1) return;
    const int run_threads = std::min(256, blocks_for(channels, 4 * warp_threads) * warp_threads);
    launch(on, encoder_backward_runs_kernel4<tile_rows>, static_cast<unsigned>(tiles - 1), run_threads, 0,
           dwte, partials, tokens, order, table.first, rows, channels);
}

}  // namespace llmc::cuda
