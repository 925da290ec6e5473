// ptx_on_cpu.h. Compiled without sanitizers: this code reads only the lanes' registers, not other memory.
#include "simt/ptx_on_cpu.h"

namespace simt::ptx {
namespace {

template <class X>
float half_of(std::uint32_t pair, int half) {
    const auto bits = static_cast<std::uint16_t>(half == 0 ? pair : pair >> 16);
    X x;
    std::memcpy(static_cast<void*>(&x), &bits, sizeof x);
    return static_cast<float>(x);
}

void check_all_lanes(Lanes lanes, const Site& site) {
    for (int i = 0; i < 32; ++i) {
        if (!lanes[i]) fail(site, "this instruction needs all lanes of the warp");
    }
}

template <bool transposed>
void load_matrices(Lanes lanes, const Site& site) {
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

}  // namespace

template <class X>
void mma_together(Lanes lanes, const Site& site) {
    check_all_lanes(lanes, site);
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto& x = *static_cast<MmaArgument*>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < 4; ++i) a[g + i % 2 * 8][2 * t + i / 2 * 8 + half] = half_of<X>(x.a[i], half);
            for (int i = 0; i < 2; ++i) b[2 * t + i * 8 + half][g] = half_of<X>(x.b[i], half);
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

template void mma_together<__nv_bfloat16>(Lanes, const Site&);
template void mma_together<__half>(Lanes, const Site&);

void ldmatrix_together(Lanes lanes, const Site& site) { load_matrices<false>(lanes, site); }
void ldmatrix_transposed_together(Lanes lanes, const Site& site) { load_matrices<true>(lanes, site); }

}  // namespace simt::ptx
