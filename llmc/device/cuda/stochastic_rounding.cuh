// Stochastic rounding in kernels, with the bits of llmc/device/stochastic_rounding.h.
#pragma once

#include "llmc/device/cuda/packed.cuh"
#include "llmc/device/stochastic_rounding.h"

namespace llmc::cuda {

__device__ __forceinline__ bf16 round_stochastically(float x, std::uint32_t random) {
    return __ushort_as_bfloat16(llmc::round_stochastically(__float_as_uint(x), random));
}

}  // namespace llmc::cuda
