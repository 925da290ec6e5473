// Loops over OpenMP threads with the processor's widest vectors, and sums over rows that do not depend on the
// number of threads.
#pragma once

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

inline constexpr std::int64_t divide_up(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }
inline constexpr std::int64_t round_up(std::int64_t n, std::int64_t to) { return divide_up(n, to) * to; }

// Calls f(i) for i in 0 ... n-1; each thread takes consecutive ones. f must not throw. ([[maybe_unused]]:
// clang-tidy does not see uses in a pragma.)
template <class F>
void parallel_for([[maybe_unused]] int threads, std::int64_t n, const F& f) {
#pragma omp parallel num_threads(threads) if (n > 1)
    {
        const std::int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
        in_wide_vectors(n * thread / team, n * (thread + 1) / team, f);
    }
}

// The same for tasks of unequal size: a free thread takes the next task. Calls f(i, thread).
template <class F>
void parallel_tasks([[maybe_unused]] int threads, std::int64_t n, const F& f) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (n > 1)
    for (std::int64_t i = 0; i < n; ++i) {
        in_wide_vectors(i, i + 1,
                        [&f, thread = omp_get_thread_num()](std::int64_t task) { f(task, thread); });
    }
}

// The threads to use for this many elements. For few elements, waking threads costs more than they save.
inline int threads_for(std::int64_t elements, int threads) { return elements < 16384 ? 1 : threads; }

// Calls f(begin, end) for consecutive pieces of 0 ... n-1. A piece fits a core's cache and is large enough to
// be worth a call.
template <class F>
void parallel_pieces(int threads, std::int64_t n, const F& f) {
    constexpr std::int64_t piece = 4096;
    parallel_for(threads, divide_up(n, piece),
                 [&](std::int64_t i) { f(i * piece, std::min((i + 1) * piece, n)); });
}

// Divides rows into blocks whose number depends only on the number of rows. The partial sums of the blocks,
// added in order, are then the same for any number of threads.
struct RowBlocks {
    static constexpr std::int64_t most = 64;
    static constexpr std::int64_t least_rows = 16;

    explicit RowBlocks(std::int64_t all_rows)
        : rows(all_rows),
          rows_per_block(std::max(least_rows, divide_up(all_rows, most))),
          count(divide_up(all_rows, rows_per_block)) {}

    std::int64_t begin(std::int64_t block) const { return block * rows_per_block; }
    std::int64_t end(std::int64_t block) const { return std::min(rows, begin(block + 1)); }
    // The most blocks that this number of rows, or any smaller number, is divided into.
    static std::int64_t count_up_to(std::int64_t rows) { return std::min(most, divide_up(rows, least_rows)); }

    std::int64_t rows;
    std::int64_t rows_per_block;
    std::int64_t count;
};

// to_j += sum over blocks of partials_j, in the order of the blocks; partials (blocks, stride), j < columns
inline void add_partials(int threads, float* to, const float* partials, std::int64_t blocks,
                         std::int64_t stride, std::int64_t columns) {
    constexpr std::int64_t width = 64;
    parallel_for(threads, divide_up(columns, width), [=](std::int64_t strip) {
        const std::int64_t begin = strip * width;
        const std::int64_t count = std::min(width, columns - begin);
        float sum[width] = {};
        for (std::int64_t block = 0; block < blocks; ++block) {
            const float* partial = partials + block * stride + begin;
#pragma omp simd
            for (std::int64_t j = 0; j < count; ++j) sum[j] += partial[j];
        }
        for (std::int64_t j = 0; j < count; ++j) to[begin + j] += sum[j];
    });
}

}  // namespace llmc::cpu
