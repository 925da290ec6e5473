// The limits of a GPU chip (CUDA C++ Programming Guide, "Compute Capabilities"). Plain C++ without CUDA's headers:
// kernels, tests and the kernel lab use it, and the planner for GPUs that this machine does not have.
#pragma once

#include <algorithm>
#include <cstddef>

namespace llmc::cuda {

inline constexpr int warp_threads = 32;

struct Chip {
    int architecture;  // 80 for sm_80
    int multiprocessors;
    int threads_per_multiprocessor;
    int blocks_per_multiprocessor;
    std::size_t shared_bytes_per_multiprocessor;
    std::size_t shared_bytes_per_block;  // static and dynamic together

    static constexpr int threads_per_block = 1024;
    static constexpr int registers_per_multiprocessor = 65536;  // and per block
    static constexpr int registers_per_thread = 255;
    // The limit for a kernel's own `__shared__` arrays plus its dynamic shared memory, unless launch() raises
    // it.
    static constexpr std::size_t default_shared_bytes = 48 << 10;
    // For more dynamic shared memory than this, launch() raises the limit. It does not know the size of the
    // kernel's own arrays; below this, they may take up to 16 KB.
    static constexpr std::size_t unasked_dynamic_bytes = 32 << 10;
};

inline constexpr Chip sm_80{80, 108, 2048, 32, 164 << 10, 163 << 10};  // A100
inline constexpr Chip sm_86{86, 84, 1536, 16, 100 << 10, 99 << 10};    // A40, RTX 3090 Ti
inline constexpr Chip sm_89{89, 128, 1536, 24, 100 << 10, 99 << 10};   // RTX 4090, L40S
inline constexpr Chip sm_90{90, 132, 2048, 32, 228 << 10, 227 << 10};  // H100, H200

// The registers of a block. Warps get them in units of 256.
constexpr int block_registers(int threads, int registers_per_thread) {
    const int warps = (threads + warp_threads - 1) / warp_threads;
    return warps * ((registers_per_thread * warp_threads + 255) / 256 * 256);
}

// Blocks that a multiprocessor runs at once; 0 if none fits. `shared_bytes` is static plus dynamic.
constexpr int blocks_at_a_time(const Chip& chip, int threads, int registers_per_thread,
                               std::size_t shared_bytes) {
    if (threads > Chip::threads_per_block || shared_bytes > chip.shared_bytes_per_block) return 0;
    constexpr std::size_t reserved = 1 << 10;  // by the driver, per block
    const int by_shared = static_cast<int>(chip.shared_bytes_per_multiprocessor / (shared_bytes + reserved));
    const int by_registers =
        Chip::registers_per_multiprocessor / std::max(1, block_registers(threads, registers_per_thread));
    return std::min(
        {chip.blocks_per_multiprocessor, chip.threads_per_multiprocessor / threads, by_shared, by_registers});
}

}  // namespace llmc::cuda
