// Rounds quads to the format in which they are stored: to nearest, or to bf16 at random (stochastic_rounding.h).
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/stochastic_rounding.h"

namespace llmc::cuda {

__device__ __forceinline__ bf16 round_stochastically(float x, std::uint32_t random) {
    return __ushort_as_bfloat16(llmc::round_stochastically(__float_as_uint(x), random));
}

template <class X>
__device__ __forceinline__ void widen(float (&to)[4], const Quad<X>& from) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[e] = to_float(from[e]);
}

// Four numbers as they are stored: as they are in fp32, rounded to nearest, or rounded at random with the bits of
// these elements.
template <class X, bool stochastic>
__device__ __forceinline__ Quad<X> rounded(const float (&x)[4], const StochasticRounding& rounding,
                                           std::uint64_t count, std::int64_t at, Rounded what) {
    Quad<X> to;
    if constexpr (stochastic) {
        const RandomBits random = rounding_bits(rounding, count, at, what);
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = round_stochastically(x[e], random[e]);
    } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) to[e] = from_float<X>(x[e]);
    }
    return to;
}

}  // namespace llmc::cuda
