// The workspace of each kernel that needs some, and what it depends on: how many blocks write partial sums. Plain
// C++ without CUDA's headers: the kernels use it, and gpu_sizes.h for plans.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "llmc/device/cuda/chip.h"

namespace llmc::cuda {

namespace detail {

constexpr std::int64_t count_of_tiles(std::int64_t n, std::int64_t tile) { return (n + tile - 1) / tile; }

inline constexpr int norm_backward_blocks_per_multiprocessor = 2;
inline constexpr int head_norm_blocks_per_multiprocessor = 2;

}  // namespace detail

// ---- matrix products: the most workspace that cuBLASLt's algorithms may use

inline constexpr std::size_t product_workspace_bytes = 32 << 20;

// ---- embedding: the rows in the order of their tokens, and the partial sums of tokens' rows

// Sorted rows are cut into tiles of 32. A run is all rows of one token; it may begin or end in another tile.
inline constexpr int encoder_tile_rows = warp_threads;
// If a run extends into another tile, its sum over this tile goes to one of the tile's two partial sums.
enum PartialSum { of_run_before, of_run_after, partial_sums };

// int32 (rows), padded so that the partial sums are aligned.
constexpr std::size_t encoder_order_bytes(std::int64_t rows) {
    constexpr std::size_t alignment = 128;
    return (static_cast<std::size_t>(rows) * sizeof(std::int32_t) + alignment - 1) / alignment * alignment;
}
// fp32
constexpr std::int64_t encoder_partials(std::int64_t rows, int channels) {
    return detail::count_of_tiles(rows, encoder_tile_rows) * partial_sums * channels;
}
constexpr std::size_t encoder_backward_workspace_bytes(std::int64_t rows, int channels) {
    return encoder_order_bytes(rows) +
           sizeof(float) * static_cast<std::size_t>(encoder_partials(rows, channels));
}

// ---- norms: each block's contribution to the gradients of the weights, for any number of rows

// Layernorm has two gradients a channel; RMS norm has one, and needs half.
constexpr std::size_t norm_backward_workspace_bytes(const Chip& chip, int channels) {
    return sizeof(float) * 2 * static_cast<std::size_t>(channels) *
           static_cast<std::size_t>(detail::norm_backward_blocks_per_multiprocessor * chip.multiprocessors);
}
constexpr std::size_t head_norm_backward_workspace_bytes(const Chip& chip, int size) {
    return sizeof(float) * static_cast<std::size_t>(size) *
           static_cast<std::size_t>(detail::head_norm_blocks_per_multiprocessor * chip.multiprocessors);
}

// ---- bias gradients: the sums of slices of rows

// Eight lanes read 128 bytes of a row, which is a cache line. A warp reads four rows.
inline constexpr int bias_gradient_lanes = 8;
inline constexpr int bias_gradient_threads = 256;  // per block
// Blocks that a multiprocessor runs at once: 1536 threads, the most of sm_86.
inline constexpr int bias_gradient_resident = 1536 / bias_gradient_threads;
// The columns of a block: 16 bytes a lane.
template <class X>
inline constexpr int bias_gradient_columns = bias_gradient_lanes*(16 / static_cast<int>(sizeof(X)));

// The number of slices of rows: enough to fill the chip, if each thread still has some rows to add.
template <class X>
constexpr int bias_gradient_slices(const Chip& chip, std::int64_t rows, int columns) {
    constexpr std::int64_t least_rows = 4 * bias_gradient_threads / bias_gradient_lanes;
    const int blocks = chip.multiprocessors * bias_gradient_resident;
    const std::int64_t fill =
        std::max<std::int64_t>(1, blocks / detail::count_of_tiles(columns, bias_gradient_columns<X>));
    return static_cast<int>(std::min(fill, detail::count_of_tiles(rows, least_rows)));
}

template <class X>
constexpr std::size_t bias_gradient_workspace_bytes(const Chip& chip, std::int64_t rows, int columns) {
    return sizeof(float) * static_cast<std::size_t>(bias_gradient_slices<X>(chip, rows, columns)) *
           static_cast<std::size_t>(columns);
}

// Workspace that is enough for any number of columns up to this one. The number of slices is limited by what
// fills the chip and by the number of rows.
template <class X>
constexpr std::size_t bias_gradient_workspace_bytes_up_to(const Chip& chip, std::int64_t rows, int columns) {
    constexpr int tile = bias_gradient_columns<X>;
    const std::int64_t tiles = detail::count_of_tiles(columns, tile);
    const std::int64_t slices_of_rows = bias_gradient_slices<X>(chip, rows, 1);
    const std::int64_t filling = std::int64_t{chip.multiprocessors} * bias_gradient_resident;
    return sizeof(float) * tile *
           static_cast<std::size_t>(std::min(std::max(tiles, filling), slices_of_rows * tiles));
}

// ---- attention: two numbers per query; queries are rounded up to whole tiles

inline constexpr int attention_backward_tile = 128;  // the most rows that a block owns

constexpr std::size_t attention_backward_workspace_bytes(std::int64_t all_heads, std::int64_t sequence) {
    const std::int64_t queries =
        all_heads * detail::count_of_tiles(sequence, attention_backward_tile) * attention_backward_tile;
    return static_cast<std::size_t>(queries) * 2 * sizeof(float);
}

}  // namespace llmc::cuda
