// Grids of kernels that stream through memory. They have no more blocks than run at once, and each block goes
// over many pieces (a grid-stride loop). A block's setup then costs almost nothing, and there is no last wave
// of blocks that leaves half the chip idle.
#pragma once

#include <algorithm>

#include "llmc/device/cuda/kernel.cuh"

namespace llmc::cuda {

// The number of blocks for `pieces` of work, one per thread at a time. `threads_at_a_time` is how many
// threads of the kernel a multiprocessor runs; the kernel's __launch_bounds__ must allow it.
inline unsigned streaming_blocks(const Chip& chip, std::int64_t pieces, int block_threads,
                                 int threads_at_a_time) {
    const int threads = std::min(threads_at_a_time, chip.threads_per_multiprocessor);
    const std::int64_t resident = std::int64_t{chip.multiprocessors} * std::max(1, threads / block_threads);
    return static_cast<unsigned>(
        std::clamp<std::int64_t>(blocks_for<std::int64_t>(pieces, block_threads), 1, resident));
}

// The number of blocks for `pieces` of work, one per block at a time. The kernel's __launch_bounds__ must
// allow blocks of 1024 threads. The check is needed because a grid of 0 blocks would silently do nothing.
inline unsigned persistent_blocks(const Chip& chip, std::int64_t pieces, int block_threads,
                                  std::size_t shared_bytes) {
    constexpr int registers = Chip::registers_per_multiprocessor / Chip::threads_per_block;
    const int at_a_time = blocks_at_a_time(chip, block_threads, registers, shared_bytes);
    check(at_a_time > 0, fmt::format("a block of {} threads and {} bytes of shared memory does not fit sm_{}",
                                     block_threads, shared_bytes, chip.architecture));
    return static_cast<unsigned>(std::min(pieces, std::int64_t{chip.multiprocessors} * at_a_time));
}

// The thread's index in the grid, and the number of threads.
__device__ __forceinline__ std::int64_t grid_thread() {
    return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::int64_t grid_threads() {
    return static_cast<std::int64_t>(gridDim.x) * blockDim.x;
}

// Calls use(i, load(i)) for all i < n, distributed over the threads of the grid. `in_flight` loads start
// before the first is used.
template <int in_flight, class Load, class Use>
__device__ __forceinline__ void for_grid(std::int64_t n, Load load, Use use) {
    const std::int64_t step = grid_threads();
    std::int64_t i = grid_thread();
    for (; i + (in_flight - 1) * step < n; i += in_flight * step) {
        decltype(load(i)) loaded[in_flight];
#pragma unroll
        for (int u = 0; u < in_flight; ++u) loaded[u] = load(i + u * step);
#pragma unroll
        for (int u = 0; u < in_flight; ++u) use(i + u * step, loaded[u]);
    }
    for (; i < n; i += step) use(i, load(i));
}

}  // namespace llmc::cuda
