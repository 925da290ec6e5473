// The instructions of llmc/device/cuda/ptx.cuh for the executor. The lanes' fragments are gathered into whole
// matrices and scattered again, as the PTX manual draws them.
#pragma once

#include <cstdint>

#include "simt/cuda_on_cpu.h"

// A separate namespace. In simt, argument-dependent lookup would find these functions for calls of the
// wrappers of the same names, because such calls pass a simt::Site.
namespace simt::ptx {

struct MmaArgument {
    float* d;
    const std::uint32_t* a;
    const std::uint32_t* b;
};

struct LdmatrixArgument {
    uint4 row;
    std::uint32_t* fragments;
};

// Computed by a warp together, when all its lanes have come. X: bf16 or fp16.
template <class X>
void mma_together(Lanes lanes, const Site& site);
extern template void mma_together<__nv_bfloat16>(Lanes, const Site&);
extern template void mma_together<__half>(Lanes, const Site&);
void ldmatrix_together(Lanes lanes, const Site& site);
void ldmatrix_transposed_together(Lanes lanes, const Site& site);

template <class X>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2], const Site& site) {
    MmaArgument argument{d, a, b};
    meet_warp(~0u, mma_together<X>, &argument, site);
}

inline void check_shared_16(const void* memory, const Site& site) {
    if (!is_shared(memory, 16)) fail(site, "not 16 bytes of shared memory");
    aligned(static_cast<const uint4*>(memory), site);
}

inline void ldmatrix_x4(std::uint32_t (&fragments)[4], const void* row, bool transposed, const Site& site) {
    check_shared_16(row, site);
    LdmatrixArgument argument{*static_cast<const uint4*>(row), fragments};
    meet_warp(~0u, transposed ? ldmatrix_transposed_together : ldmatrix_together, &argument, site);
}

// Reads 16 bytes and discards them.
inline void touch_16(const void* memory) {
    for (int i = 0; i < 2; ++i) (void)static_cast<const volatile std::uint64_t*>(memory)[i];
}

// On a GPU, the source is read at any time from here to the wait. The sanitizers see a read here, which finds
// wrong addresses and races with earlier writes. They see another at the wait, which finds races with later
// writes.
inline void copy_async_16(void* to, const void* from, bool valid, const Site& site) {
    check_shared_16(to, site);
    aligned(static_cast<const uint4*>(from), site);
    *static_cast<uint4*>(to) = {~0u, ~0u, ~0u, ~0u};  // NaN until the copy is waited for
    if (valid) touch_16(from);
    add_copy({to, valid ? from : nullptr, line_of_kernel(site)});
}

inline void finish_copies(int groups_left) {
    for (AsyncCopy copy{}; next_copy(groups_left, &copy);) {
        *static_cast<uint4*>(copy.to) = copy.from ? *static_cast<const uint4*>(copy.from) : uint4{};
    }
}

}  // namespace simt::ptx
