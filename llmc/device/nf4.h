// Weights in NF4 (Dettmers et al., "QLoRA", arXiv 2305.14314), as bitsandbytes has them: each number of a block of 64
// is one of 16 levels times the block's greatest magnitude. In memory, a block is 32 bytes of the levels' indices, the
// first number in the high half of the first byte, and then that magnitude in fp32.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace llmc {

inline constexpr std::int64_t nf4_block = 64, nf4_block_bytes = nf4_block / 2 + 4;

// The bytes of so many numbers, which are whole blocks. (A size beyond 64 bits stays one.)
constexpr std::int64_t nf4_bytes(std::int64_t numbers) { return numbers / nf4_block * nf4_block_bytes; }

inline constexpr std::array<float, 16> nf4_levels = {-1.0F,
                                                     -0.6961928009986877F,
                                                     -0.5250730514526367F,
                                                     -0.39491748809814453F,
                                                     -0.28444138169288635F,
                                                     -0.18477343022823334F,
                                                     -0.09105003625154495F,
                                                     0.0F,
                                                     0.07958029955625534F,
                                                     0.16093020141124725F,
                                                     0.24611230194568634F,
                                                     0.33791524171829224F,
                                                     0.44070982933044434F,
                                                     0.5626170039176941F,
                                                     0.7229568362236023F,
                                                     1.0F};

// The index of the level that is nearest to x in [-1, 1]: the number of midpoints below it.
inline unsigned nf4_index(float x) {
    unsigned index = 0;
    for (std::size_t i = 0; i + 1 < nf4_levels.size(); ++i)
        index += x > (nf4_levels[i] + nf4_levels[i + 1]) * 0.5F ? 1 : 0;
    return index;
}

// Rounds the numbers of a block. A block of zeros has zeros.
inline void to_nf4(std::byte* block, std::span<const float, nf4_block> numbers) {
    float most = 0;
    for (const float x : numbers) most = std::max(most, std::abs(x));
    const float inverse = most > 0 ? 1 / most : 0;
    for (std::size_t i = 0; i < nf4_block / 2; ++i)
        block[i] = static_cast<std::byte>(nf4_index(numbers[2 * i] * inverse) << 4U |
                                          nf4_index(numbers[2 * i + 1] * inverse));
    std::memcpy(block + nf4_block / 2, &most, sizeof most);
}

inline void from_nf4(std::span<float, nf4_block> numbers, const std::byte* block) {
    float most = 0;
    std::memcpy(&most, block + nf4_block / 2, sizeof most);
    for (std::size_t i = 0; i < nf4_block / 2; ++i) {
        const auto pair = static_cast<unsigned>(block[i]);
        numbers[2 * i] = nf4_levels[pair >> 4U] * most;
        numbers[2 * i + 1] = nf4_levels[pair & 15U] * most;
    }
}

}  // namespace llmc
