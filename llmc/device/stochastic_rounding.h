// Stochastic rounding to bf16, with the same bits on every device. A number is rounded up or down with
// probabilities that make the mean of the result the number itself. Updates smaller than half a bf16 ulp are
// then not all lost.
//
// The random numbers are counter-based: Philox4x32-10 of the library Random123 (Salmon et al., "Parallel
// random numbers: as easy as 1, 2, 3", 2011). An element's random bits are a pure function of the seed, the
// step and its index in the model as its tensor-parallel rank lays it out. They do not depend on the thread or the
// data-parallel rank that rounds it; at another --tensor-parallel they are others.
#pragma once

#include <Random123/philox.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "llmc/core/dtype.h"
#include "llmc/core/host_device.h"
#include "llmc/device/ops.h"

namespace llmc {

using RandomBits = r123::Philox4x32::ctr_type;  // 32 bits for each of four elements

// What is rounded: numbers of one element have different random bits.
enum class Rounded : std::uint32_t { weight, first_state, second_state, gradient };
// A tensor of an optimizer's state, by its number.
LLMC_HOST_DEVICE constexpr Rounded rounded_state(std::size_t number) {
    return number == 0 ? Rounded::first_state : Rounded::second_state;
}

// The random bits of elements `first` ... `first` + 3 of the buffer; `first` is a multiple of 4. `count` tells the
// roundings of an element apart: the step, below 2^62.
LLMC_HOST_DEVICE inline RandomBits rounding_bits(const StochasticRounding& rounding, std::uint64_t count,
                                                 std::int64_t first, Rounded what = Rounded::weight) {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
    const auto quad = static_cast<std::uint64_t>(rounding.first_element + first) / 4;
    const RandomBits counter = {
        {low(quad), high(quad), low(count), high(count) ^ static_cast<std::uint32_t>(what) << 30}};
    return r123::Philox4x32{}(counter, {{low(rounding.seed), high(rounding.seed)}});
}

// Rounds the bits of an fp32 to those of a bf16, its upper half. Adding 16 random bits to the lower half
// carries into the upper half with the right probability: the lower half as a fraction of an ulp. Sign and
// exponent need no special case: bits of floating-point numbers of one sign are ordered like integers.
// Infinities and NaNs stay what they are. A NaN loses the low bits of its payload, so one payload bit is set.
LLMC_HOST_DEVICE inline std::uint16_t round_stochastically(std::uint32_t bits, std::uint32_t random) {
    constexpr std::uint32_t infinity = 0x7f800000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= infinity) {
        return static_cast<std::uint16_t>((bits >> 16) | (magnitude > infinity ? 0x40u : 0u));
    }
    return static_cast<std::uint16_t>((bits + (random >> 16)) >> 16);
}

// Sets to[i] to the rounded from[i - begin] for begin <= i < end. Index 0 is the first element of the rounding's
// buffer.
inline void round_stochastically(bfloat16* to, const float* from, std::int64_t begin, std::int64_t end,
                                 const StochasticRounding& rounding, std::int64_t count,
                                 Rounded what = Rounded::weight) {
    for (std::int64_t quad = begin / 4 * 4; quad < end; quad += 4) {
        const RandomBits random = rounding_bits(rounding, static_cast<std::uint64_t>(count), quad, what);
        for (std::int64_t i = std::max(quad, begin); i < std::min(quad + 4, end); ++i) {
            to[i] = {round_stochastically(std::bit_cast<std::uint32_t>(from[i - begin]),
                                          random[static_cast<std::size_t>(i - quad)])};
        }
    }
}

}  // namespace llmc
