// What the instructions of llmc/device/cuda/ptx.cuh do, for the executor. The lanes' fragments are gathered into
// whole matrices and scattered again, as the PTX manual draws them.
#pragma once

#include <cstdint>

#include "simt/cuda_on_cpu.h"

// Not in simt itself, where calls of the wrappers, which hand on a simt::Site, would find these too.
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

inline float bf16_half(std::uint32_t pair, int half) {
    return std::bit_cast<float>(half == 0 ? pair << 16 : pair & 0xffff0000u);
}

inline void check_all_lanes(Lanes lanes, const Site& site) {
    for (int i = 0; i < 32; ++i) {
        if (!lanes[i]) fail(site, "this instruction needs all lanes of the warp");
    }
}

inline void mma_together(Lanes lanes, const Site& site) {
    check_all_lanes(lanes, site);
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& x = *static_cast<MmaArgument*>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = bf16_half(x.a[i], half);
            for (int i = 0; i < 2; ++i) b[2 * t + i * 8 + half][g] = bf16_half(x.b[i], half);
        }
        for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][2 * t + i % 2] = x.d[i];
    }
    for (int m = 0; m < 16; ++m) {
        for (int k = 0; k < 16; ++k) {
            for (int n = 0; n < 8; ++n) d[m][n] += a[m][k] * b[k][n];
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        auto& x = *static_cast<MmaArgument*>(lanes[lane]);
        for (int i = 0; i < 4; ++i) x.d[i] = d[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    }
}

inline void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                         const Site& site) {
    MmaArgument argument{d, a, b};
    meet_warp(~0u, mma_together, &argument, site);
}

template <bool transposed>
void ldmatrix_together(Lanes lanes, const Site& site) {
    check_all_lanes(lanes, site);
    const auto element = [&](int matrix, int row, int column) {
        std::uint16_t values[8];
        std::memcpy(values, &static_cast<LdmatrixArgument*>(lanes[matrix * 8 + row])->row, sizeof values);
        return std::uint32_t{values[column]};
    };
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, t = lane % 4;
        for (int m = 0; m < 4; ++m) {
            static_cast<LdmatrixArgument*>(lanes[lane])->fragments[m] =
                transposed ? element(m, 2 * t, g) | element(m, 2 * t + 1, g) << 16
                           : element(m, g, 2 * t) | element(m, g, 2 * t + 1) << 16;
        }
    }
}

inline void check_shared_16(const void* memory, const Site& site) {
    if (!is_shared(memory, 16)) fail(site, "not 16 bytes of shared memory");
    aligned(static_cast<const uint4*>(memory), site);
}

inline void ldmatrix_x4(std::uint32_t (&fragments)[4], const void* row, bool transposed, const Site& site) {
    check_shared_16(row, site);
    LdmatrixArgument argument{*static_cast<const uint4*>(row), fragments};
    meet_warp(~0u, transposed ? ldmatrix_together<true> : ldmatrix_together<false>, &argument, site);
}

// Reads 16 bytes and forgets them.
inline void touch_16(const void* memory) {
    for (int i = 0; i < 2; ++i) (void)static_cast<const volatile std::uint64_t*>(memory)[i];
}

// The source is read at any time from here to the wait: by the sanitizers here, where an address may be wrong or a
// write before may race, and once more at the wait, which a write after may race with.
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
