// Stochastic rounding to bf16, the same bits on every device: up or down with probabilities that make the mean of
// the result the number itself, so that updates smaller than half a bf16 ulp are not all lost. The random numbers are
// counter-based (Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, in their library
// Random123): an element's are a pure function of the seed, the step and its place in the model, whichever thread or
// rank rounds it.
#pragma once

#include <Random123/philox.h>

#include <algorithm>
#include <bit>
#include <cstdint>

#include "llmc/core/dtype.h"
#include "llmc/device/ops.h"

// Both functions below run in kernels too.
#ifdef __CUDACC__
#define LLMC_HOST_DEVICE __host__ __device__
#else
#define LLMC_HOST_DEVICE
#endif

namespace llmc {

using RandomBits = r123::Philox4x32::ctr_type;  // 32 bits for each of four elements

// For elements `first` ... `first` + 3 of the buffer, `first` a multiple of 4.
LLMC_HOST_DEVICE inline RandomBits rounding_bits(const StochasticRounding& rounding, std::uint64_t step,
                                                 std::int64_t first) {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
    const auto quad = static_cast<std::uint64_t>(rounding.first_element + first) / 4;
    const RandomBits counter = {{low(quad), high(quad), low(step), high(step)}};
    return r123::Philox4x32{}(counter, {{low(rounding.seed), high(rounding.seed)}});
}

// From the bits of an fp32 to those of a bf16, its upper half. Adding 16 random bits to the lower half carries into
// the upper one with just the probability that the lower half is of an ulp; the sign and the exponent need no care,
// since the bits of floating-point numbers of one sign are ordered as integers are. An infinity stays what it is, and
// so does a NaN (its payload's low bits are dropped, so one bit is set).
LLMC_HOST_DEVICE inline std::uint16_t round_stochastically(std::uint32_t bits, std::uint32_t random) {
    constexpr std::uint32_t infinity = 0x7f800000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude >= infinity) {
        return static_cast<std::uint16_t>((bits >> 16) | (magnitude > infinity ? 0x40u : 0u));
    }
    return static_cast<std::uint16_t>((bits + (random >> 16)) >> 16);
}

// to[i] = from[i], rounded, for begin <= i < end; both begin where the rounding's buffer does.
inline void round_stochastically(bfloat16* to, const float* from, std::int64_t begin, std::int64_t end,
                                 const StochasticRounding& rounding, std::int64_t step) {
    for (std::int64_t quad = begin / 4 * 4; quad < end; quad += 4) {
        const RandomBits random = rounding_bits(rounding, static_cast<std::uint64_t>(step), quad);
        for (std::int64_t i = std::max(quad, begin); i < std::min(quad + 4, end); ++i) {
            to[i] = {round_stochastically(std::bit_cast<std::uint32_t>(from[i]),
                                          random[static_cast<std::size_t>(i - quad)])};
        }
    }
}

}  // namespace llmc

#undef LLMC_HOST_DEVICE
