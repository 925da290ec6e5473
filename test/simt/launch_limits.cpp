#include "simt/launch_limits.h"

#include <fmt/format.h>

#include <cstdint>

#include "llmc/core/error.h"
#include "llmc/device/cuda/launch.h"

namespace simt {

using llmc::cuda::Chip;

namespace {

std::string why_wrong_shape(const Grid& grid) {
    const std::uint64_t threads = std::uint64_t{grid.threads.x} * grid.threads.y * grid.threads.z;
    if (threads < 1 || threads > Chip::threads_per_block) {
        return fmt::format("{} threads in a block; 1 to {} are possible", threads, Chip::threads_per_block);
    }
    if (grid.threads.z > 64) {
        return fmt::format("{} threads of a block in its third dimension; at most 64", grid.threads.z);
    }
    const dim3 blocks = grid.blocks;
    if (blocks.x == 0 || blocks.y == 0 || blocks.z == 0 || blocks.x > 0x7fffffff || blocks.y > 65535 ||
        blocks.z > 65535) {
        return fmt::format("a grid of ({}, {}, {}) blocks; at least 1 and at most (2^31-1, 65535, 65535)",
                           blocks.x, blocks.y, blocks.z);
    }
    return {};
}

// Checks the limits by the compiler's figures.
std::string why_too_much(const Chip& chip, const Grid& grid, const KernelFigures& figures) {
    const auto static_bytes = static_cast<std::size_t>(figures.static_shared_bytes);
    if (std::string why = why_no_room_in_shared(chip, grid.dynamic_shared, static_bytes); !why.empty())
        return why;
    const int threads = static_cast<int>(grid.threads.x * grid.threads.y * grid.threads.z);
    // CUDA reports this as "invalid configuration".
    if (threads > figures.most_threads) {
        return fmt::format("{} threads in a block; the kernel's __launch_bounds__ grants {}", threads,
                           figures.most_threads);
    }
    if (llmc::cuda::block_registers(threads, figures.registers) > Chip::registers_per_multiprocessor) {
        return fmt::format("{} threads with {} registers each; a block has {}", threads, figures.registers,
                           Chip::registers_per_multiprocessor);
    }
    return {};
}

}  // namespace

std::string why_no_room_in_shared(const Chip& chip, const DynamicShared& dynamic, std::size_t static_bytes) {
    const std::size_t bytes = static_bytes + dynamic.bytes;
    const auto has = [&](std::size_t limit, const std::string& where) {
        return fmt::format("{} bytes of shared memory ({} of them the kernel's own arrays); a block has {}{}",
                           bytes, static_bytes, limit, where);
    };
    if (bytes > chip.shared_bytes_per_block)
        return has(chip.shared_bytes_per_block, fmt::format(" on sm_{}", chip.architecture));
    if (bytes > dynamic.limit) return has(dynamic.limit, " unless more are asked for");
    return {};
}

std::string why_refused(const Chip& chip, const Grid& grid, const KernelReport& report,
                        const std::string& symbol) {
    if (std::string why = why_wrong_shape(grid); !why.empty()) return why;
    if (std::string why = why_no_room_in_shared(chip, grid.dynamic_shared, 0); !why.empty()) return why;
    const auto* of_chip = figures_on(report, chip.architecture);
    if (!of_chip) return {};  // nothing was compiled for this chip (GPU_ARCH)
    const auto figures = of_chip->find(symbol);
    if (figures == of_chip->end()) {
        // The kernel has not run yet, so this is reported to the user like any wrong input.
        llmc::user_error(
            "the compiler's report on sm_{} lacks {}; build the program again, or use the report "
            "of the same build",
            chip.architecture, symbol.empty() ? "a local function" : llmc::cuda::kernel_name(symbol));
    }
    return why_too_much(chip, grid, figures->second);
}

}  // namespace simt
