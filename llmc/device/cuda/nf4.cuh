// Numbers in NF4 (device/nf4.h), for products that read them in X.
//
// Limited by memory: 0.5625 bytes are read for each number, and X is written. A thread takes 8 numbers, the word with
// their indices and the magnitude of their block; a warp's words and magnitudes are 4 whole blocks side by side.
#pragma once

#include <cstdint>

#include "llmc/device/cuda/elementwise.cuh"
#include "llmc/device/nf4.h"

namespace llmc::cuda {

struct Nf4Levels {
    float levels[16];
};

// out X (words * 8), in (words / 8 blocks)
template <class X>
__global__ void __launch_bounds__(256)
    dequantise_nf4_kernel1(X* out, const std::uint32_t* in, std::int64_t words, Nf4Levels table) {
    constexpr int words_of_block = nf4_block / 8;
    SHARED(float, levels, [16]);
    if (threadIdx.x < 16) levels[threadIdx.x] = table.levels[threadIdx.x];
    __syncthreads();
    for (std::int64_t i = grid_thread(); i < words; i += grid_threads()) {
        const std::int64_t block = i / words_of_block, word = i % words_of_block;
        const std::uint32_t* const of_block = in + block * (nf4_block_bytes / 4);
        const std::uint32_t indices = of_block[word];
        const float most = __uint_as_float(of_block[words_of_block]);
        constexpr int pack = Packed<X>::size;
#pragma unroll
        for (int first = 0; first < 8; first += pack) {
            Packed<X> numbers;
#pragma unroll
            for (int e = 0; e < pack; ++e) {
                // The first number of a byte is in its high half.
                const int at = first + e, shift = 4 * (at % 2 == 0 ? at + 1 : at - 1);
                numbers[e] = from_float<X>(levels[indices >> shift & 15U] * most);
            }
            store(out + 8 * i + first, numbers);
        }
    }
}

template <class X>
void dequantise_nf4(const LaunchContext& on, X* out, const std::uint32_t* in, std::int64_t numbers) {
    constexpr int block_threads = 256;
    if (numbers == 0) return;
    const std::int64_t words = numbers / 8;
    Nf4Levels table;
    for (int i = 0; i < 16; ++i) table.levels[i] = nf4_levels[static_cast<std::size_t>(i)];
    launch(on, dequantise_nf4_kernel1<X>, streaming_blocks(on.chip, words, block_threads, 256 * 8),
           block_threads, 0, out, in, words, table);
}

}  // namespace llmc::cuda
