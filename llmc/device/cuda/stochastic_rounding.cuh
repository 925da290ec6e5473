// Stochastic rounding to bf16: up or down with probabilities that make the mean of the result the number
// itself, so that updates smaller than half a bf16 ulp are not all lost. The random numbers are counter-based
// (Philox4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011, in their library
// Random123): an element's are a pure function of the seed, the step and its place in the model, whichever
// thread or rank rounds it.
#pragma once

#include <Random123/philox.h>

#include "llmc/device/cuda/packed.cuh"

namespace llmc::cuda {

struct StochasticRounding {
    std::uint64_t seed;
    std::int64_t first_element;  // of the model: where the buffer begins; a multiple of 4
};

using RandomBits = r123::Philox4x32::ctr_type;  // 32 bits for each of four elements

// For elements `first` ... `first` + 3 of the buffer, `first` a multiple of 4.
__host__ __device__ __forceinline__ RandomBits rounding_bits(const StochasticRounding& rounding,
                                                             std::uint64_t step, std::int64_t first) {
    const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x); };
    const auto high = [](std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); };
    const auto quad = static_cast<std::uint64_t>(rounding.first_element + first) / 4;
    const RandomBits counter = {{low(quad), high(quad), low(step), high(step)}};
    return r123::Philox4x32{}(counter, {{low(rounding.seed), high(rounding.seed)}});
}

// A bf16 is the upper half of an fp32. Adding 16 random bits to the lower half carries into the upper one
// with just the probability that the lower half is of an ulp; the sign and the exponent need no care, since
// the bits of floating-point numbers of one sign are ordered as integers are. NaN and infinity stay what they
// are.
__device__ __forceinline__ bf16 round_stochastically(float x, std::uint32_t random) {
    constexpr std::uint32_t exponent = 0x7f800000u;
    const std::uint32_t bits = __float_as_uint(x);
    if ((bits & exponent) == exponent) return from_float<bf16>(x);
    return __ushort_as_bfloat16(static_cast<unsigned short>((bits + (random >> 16)) >> 16));
}

}  // namespace llmc::cuda
