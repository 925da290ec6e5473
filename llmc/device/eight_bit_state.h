// Numbers in 8 bits by blocks (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"): 256 neighbors are
// divided by their greatest magnitude, and each is stored as the number of the nearest entry of a table. The entries
// are dense near 0, where most numbers of an optimizer's state lie.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>

namespace llmc {

inline constexpr std::int64_t eight_bit_block = 256;
// The state of tensors with fewer elements stays in fp32: their statistics are too few, and they take little memory.
inline constexpr std::int64_t least_in_8_bits = 4096;

using EightBitTable = std::array<float, 256>;

// For each of seven decades up to 1, the middles of 2^i equal parts of its upper 9/10 (i = 0 ... 6, more for greater
// numbers), with both signs; and 0 and 1. Without a sign, 2^(i+1) parts. The most negative entry is -1 in place of the
// last middle: otherwise a block whose greatest number is negative would shrink each time that it is stored.
inline EightBitTable eight_bit_table(bool has_sign) {
    EightBitTable table{};
    std::size_t count = 0;
    for (int i = 0; i < 7; ++i) {
        const int parts = (has_sign ? 1 : 2) << i;
        for (int part = 0; part < parts; ++part) {
            const double middle = std::pow(10.0, i - 6) * (0.1 + 0.9 * (part + 0.5) / parts);
            table[count++] = static_cast<float>(middle);
            if (has_sign) table[count++] = static_cast<float>(-middle);
        }
    }
    table[count++] = 0;
    table[count] = 1;
    std::ranges::sort(table);
    if (has_sign) table.front() = -1;
    return table;
}
inline const EightBitTable& table_in_8_bits(bool has_sign) {
    static const EightBitTable with_sign = eight_bit_table(true), without = eight_bit_table(false);
    return has_sign ? with_sign : without;
}

// The numbers of the entries nearest to each x, from -1 to 1; of two, the smaller entry's. At most a block.
inline void nearest_entries(std::uint8_t* entries, std::span<const float> x, const EightBitTable& table) {
    // A binary search for all at once, whose loops are vectorized.
    std::array<std::int32_t, eight_bit_block> above;  // no entry in [1, above) is above x
    above.fill(1);
    for (std::int32_t step = 128; step > 0; step /= 2) {
#pragma omp simd
        for (std::size_t i = 0; i < x.size(); ++i) {
            const std::int32_t next = std::min(above[i] + step, 255);
            above[i] = table[static_cast<std::size_t>(next - 1)] <= x[i] ? next : above[i];
        }
    }
#pragma omp simd
    for (std::size_t i = 0; i < x.size(); ++i) {
        const float low = table[static_cast<std::size_t>(above[i] - 1)],
                    high = table[static_cast<std::size_t>(above[i])];
        entries[i] = static_cast<std::uint8_t>(above[i] - (x[i] - low <= high - x[i] ? 1 : 0));
    }
}

// The numbers of a block, from its entries and its greatest magnitude.
inline void from_8_bits(std::span<float> to, const std::uint8_t* entries, float amax,
                        const EightBitTable& table) {
    for (std::size_t i = 0; i < to.size(); ++i) to[i] = table[entries[i]] * amax;
}
// Returns the greatest magnitude. The table without signs gives no positive number the entry 0: AdamW divides by the
// root of the second moment, so that a first moment beside 0 would count 1/eps times.
inline float to_8_bits(std::uint8_t* entries, std::span<const float> from, const EightBitTable& table) {
    float amax = 0;
    for (const float x : from) amax = std::max(amax, std::fabs(x));
    std::array<float, eight_bit_block> shares;
    for (std::size_t i = 0; i < from.size(); ++i) shares[i] = amax > 0 ? from[i] / amax : 0.0F;
    nearest_entries(entries, std::span(shares).first(from.size()), table);
    const bool has_sign = table.front() < 0;
    for (std::size_t i = 0; i < from.size(); ++i)
        entries[i] = std::max<std::uint8_t>(entries[i], !has_sign && from[i] > 0 ? 1 : 0);
    return amax;
}

}  // namespace llmc
