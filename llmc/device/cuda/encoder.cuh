// Token and position embeddings, forward and backward (ops.h: encoder_forward, encoder_backward). The
// development of these kernels is in dev/encoder_forward.cu and dev/encoder_backward.cu.
//
// A table may be part of a larger one, with its rows from first_row on. Tokens outside it have no row; they
// cost only the read of the token.
#pragma once

#include <algorithm>
#include <bit>

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

struct TableRows {
    std::int64_t first;
    int count;

    // The row of a token, or -1 if it has none here.
    __device__ __forceinline__ int of(std::int32_t token) const {
        const std::int64_t row = token - first;
        return row >= 0 && row < count ? static_cast<int>(row) : -1;
    }
};

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

// ---- backward: the order of the rows ----

// Rows are sorted by token; rows of the same token keep their order. To share the work, tokens are divided
// into classes by their lowest bits, and the classes come one after the other. Consecutive tokens have
// similar frequencies, so classes by the lowest bits are about equally large. There are 128 classes, or fewer
// for a small vocabulary, so that each has about 16 tokens.
constexpr int token_class_bits(int vocabulary) {
    return std::clamp(static_cast<int>(std::bit_width(static_cast<unsigned>(vocabulary))) - 5, 0, 7);
}
__device__ __forceinline__ int class_of(int token, int class_bits) { return token & ((1 << class_bits) - 1); }
__device__ __forceinline__ int key_in_class(int token, int class_bits) { return token >> class_bits; }

// The sum of x over lanes 0 to this one.
__device__ __forceinline__ int warp_sum_up_to(int x, int lane LLMC_SITE) {
#pragma unroll
    for (int distance = 1; distance < warp_threads; distance *= 2) {
        const int other = __shfl_up_sync(all_lanes, x, distance, warp_threads LLMC_PASS_SITE);
        if (lane >= distance) x += other;
    }
    return x;
}

// The sum of x over the threads before this one. `total` gets the sum over the block, which consists of whole
// warps.
__device__ __forceinline__ int block_sum_before(int x, int* total LLMC_SITE) {
    SHARED(int, sums, [warp_threads]);
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int up_to = warp_sum_up_to(x, lane LLMC_PASS_SITE);
    if (lane == warp_threads - 1) sums[warp] = up_to;
    __syncthreads(LLMC_PASS_ONLY_SITE);
    const int warps_up_to = warp_sum_up_to(lane < warps ? sums[lane] : 0, lane LLMC_PASS_SITE);
    *total = __shfl_sync(all_lanes, warps_up_to, warp_threads - 1, warp_threads LLMC_PASS_SITE);
    const int warps_before =
        __shfl_sync(all_lanes, warps_up_to, warp == 0 ? 0 : warp - 1, warp_threads LLMC_PASS_SITE);
    __syncthreads(LLMC_PASS_ONLY_SITE);
    return (warp == 0 ? 0 : warps_before) + up_to - x;
}

// Calls f(token, row) for a warp's rows, 32 at a time, with four loads in flight. All lanes call it together;
// `token` is -1 if there is no row. Tokens are relative to the table's first row; those outside the table are
// -1 too.
template <class F>
__device__ __forceinline__ void for_rows(const std::int32_t* tokens, TableRows table, int begin, int end,
                                         F f) {
    constexpr int loads = 4;
    for (int first = begin; first < end; first += loads * warp_threads) {
        const int row = first + static_cast<int>(threadIdx.x) % warp_threads;
        int token[loads];
#pragma unroll
        for (int k = 0; k < loads; ++k) {
            token[k] = row + k * warp_threads < end ? table.of(tokens[row + k * warp_threads]) : -1;
        }
#pragma unroll
        for (int k = 0; k < loads; ++k) f(token[k], row + k * warp_threads);
    }
}

// A stable counting sort. Block b reads all tokens and places the rows of class b.
//
// First it counts, per warp, the rows of each token of its class, and the rows of earlier classes. Then it
// knows where each warp's rows of a token begin. Each warp puts its rows there, in their order. Rows whose
// token is not in the table get no place; the unused places at the end hold -1.
//   `keys`: the tokens in a class
template <class Token>
__global__ void __launch_bounds__(512)
    order_rows_kernel4(std::int32_t* order, const Token* tokens, TableRows table, int rows, int keys,
                       int class_bits) {
    SharedAllocator shared;
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int warp = thread / warp_threads, lane = thread % warp_threads, warps = threads / warp_threads;
    int* const places = shared.take<int>(static_cast<std::size_t>(warps) * keys);
    int* const place = places + warp * keys;
    const int own_class = static_cast<int>(blockIdx.x);
    const int share = blocks_for(rows, warps * warp_threads) * warp_threads;
    const int begin = min(rows, warp * share), end = min(rows, begin + share);

    for (int key = lane; key < keys; key += warp_threads) place[key] = 0;
    __syncwarp();
    int before = 0;
    for_rows(tokens, table, begin, end, [&](int token, int) {
        if (token < 0) return;
        before += class_of(token, class_bits) < own_class ? 1 : 0;
        if (class_of(token, class_bits) == own_class) atomicAdd(&place[key_in_class(token, class_bits)], 1);
    });
    int next = 0;
    block_sum_before(before, &next);
    for (int first = 0; first < keys; first += threads) {
        const int key = first + thread;
        int count = 0;
        if (key < keys) {
            for (int w = 0; w < warps; ++w) count += places[w * keys + key];
        }
        int total = 0;
        int start = next + block_sum_before(count, &total);
        next += total;
        if (key < keys) {
            for (int w = 0; w < warps; ++w) {
                const int of_warp = places[w * keys + key];
                places[w * keys + key] = start;
                start += of_warp;
            }
        }
    }
    __syncthreads();
    // The block of the last class marks the unused places.
    if (blockIdx.x + 1 == gridDim.x) {
        for (int left = next + thread; left < rows; left += threads) order[left] = -1;
    }

    for_rows(tokens, table, begin, end, [&](int token, int row) {
        const bool mine = token >= 0 && class_of(token, class_bits) == own_class;
        const unsigned matching = __ballot_sync(all_lanes, mine);
        if (mine) {
            const int key = key_in_class(token, class_bits);
            const unsigned same = __match_any_sync(matching, key);
            const int start = place[key];
            const int place_among_same = __popc(same & ((1u << lane) - 1));
            order[start + place_among_same] = row;
            __syncwarp(matching);
            if (place_among_same == 0) place[key] = start + __popc(same);
        }
        __syncwarp();  // other lanes read it next
    });
}

// Uses as many warps as shared memory allows, since each warp has its own counts.
inline void order_rows(const LaunchContext& on, std::int32_t* order, const std::int32_t* tokens,
                       TableRows table, int rows) {
    const int class_bits = token_class_bits(table.count);
    const int classes = 1 << class_bits, keys = blocks_for(table.count, classes);
    const auto shared_bytes = [keys](int warps) {
        return SharedAllocator::bytes<int>(static_cast<std::size_t>(warps) * static_cast<std::size_t>(keys));
    };
    constexpr std::size_t static_bytes = 1024;
    // Few rows do not need many warps.
    int warps = std::min(16, blocks_for(rows, 4 * warp_threads));
    while (warps > 1 && shared_bytes(warps) + static_bytes > on.chip.shared_bytes_per_block) --warps;
    check(shared_bytes(warps) + static_bytes <= on.chip.shared_bytes_per_block,
          "encoder: the counts of a token class fit into shared memory");
    launch(on, order_rows_kernel4<std::int32_t>, classes, warps * warp_threads, shared_bytes(warps), order,
           tokens, table, rows, keys, class_bits);
}

// ---- backward: the sums ----

// Sorted rows are cut into tiles of 32. A run is all rows of one token; it may begin or end in another tile.
inline constexpr int tile_rows = warp_threads;

// If a run extends into another tile, its sum over this tile goes to one of the tile's two partial sums.
enum PartialSum { of_run_before, of_run_after, partial_sums };

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

constexpr std::int64_t encoder_partials(std::int64_t rows, int channels) {
    return blocks_for<std::int64_t>(rows, tile_rows) * partial_sums * channels;
}

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
