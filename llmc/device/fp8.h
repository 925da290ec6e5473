// FP8 (Micikevicius et al. 2022, "FP8 formats for deep learning"): how numbers are scaled and rounded to 8 bits for
// matrix products.
//
//   e4m3  4 bits of exponent, 3 of significand: up to 448, normal from 2^-6, multiples of 2^-9 below
//   e5m2  5 and 2: up to 57344, normal from 2^-14, multiples of 2^-16 below
//
// A tensor is multiplied by a scale, a power of two, and rounded. The scale puts the tensor's greatest number into the
// format's greatest binade. Every number of 8 bits divided by its scale is a bf16, so products of 8-bit numbers are
// products of such bf16 numbers, bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "llmc/core/dtype.h"
#include "llmc/core/host_device.h"

namespace llmc {

enum class Fp8 : std::uint8_t { e4m3, e5m2 };

struct Fp8Format {
    int significand_bits, least_exponent;  // stored bits; the exponent of the smallest normal number
    float largest;
};
constexpr Fp8Format format_of(Fp8 format) {
    return format == Fp8::e4m3 ? Fp8Format{3, -6, 448} : Fp8Format{2, -14, 57344};
}

// The bits of the largest number as fp32
template <Fp8 format>
inline constexpr std::uint32_t largest_of = std::bit_cast<std::uint32_t>(format_of(format).largest);

// The scale of a tensor whose greatest magnitude is an fp32 with the bits `amax`, as a power of two:
// floor(log2(largest / amax)), between -100 and 100; 0 if amax is 0, infinite or NaN.
template <Fp8 format>
LLMC_HOST_DEVICE constexpr int fp8_exponent(std::uint32_t amax) {
    constexpr std::uint32_t fraction = (1U << 23) - 1, infinity = 255U << 23;
    if (amax == 0 || amax >= infinity) return 0;
    const int power = static_cast<int>(largest_of<format> >> 23) - static_cast<int>(amax >> 23) -
                      ((amax & fraction) > (largest_of<format> & fraction) ? 1 : 0);
    return power > 100 ? 100 : power < -100 ? -100 : power;
}
// 2^exponent, for -126 to 127
LLMC_HOST_DEVICE constexpr std::uint32_t bits_of_power(int exponent) {
    return static_cast<std::uint32_t>(127 + exponent) << 23;
}
inline float fp8_scale(Fp8 format, float amax) {
    const auto bits = std::bit_cast<std::uint32_t>(amax);
    return std::bit_cast<float>(
        bits_of_power(format == Fp8::e4m3 ? fp8_exponent<Fp8::e4m3>(bits) : fp8_exponent<Fp8::e5m2>(bits)));
}

// The nearest number of the format, ties to even, as fp32; x beyond the largest gives the largest, and NaN gives
// a number. Loops over it are vectorized.
template <Fp8 format>
float rounded_to_fp8(float x) {
    constexpr Fp8Format of = format_of(format);
    constexpr int cut = 23 - of.significand_bits;
    constexpr std::uint32_t last_bit = 1U << cut;
    // One is lifted into a binade whose numbers are multiples of the format's smallest.
    constexpr float lift = std::bit_cast<float>(bits_of_power(of.least_exponent - of.significand_bits + 23));
    constexpr std::uint32_t least = bits_of_power(of.least_exponent);

    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = bits & 0x80000000U, magnitude = bits & 0x7fffffffU;
    const std::uint32_t nearest =
        (magnitude + (last_bit / 2 - 1) + (magnitude >> cut & 1U)) & ~(last_bit - 1);
    const auto subnormal = std::bit_cast<std::uint32_t>((std::bit_cast<float>(magnitude) + lift) - lift);
    return std::bit_cast<float>(select(magnitude < least, subnormal, std::min(nearest, largest_of<format>)) |
                                sign);
}

// x as a product in 8 bits reads it: rounded with the scale `scale`, whose inverse is `inverse`. Infinities and NaN are
// NaN, so that they reach the gradient's norm.
template <Fp8 format>
bfloat16 quantised(bfloat16 x, float scale, float inverse) {
    const float number = rounded_to_fp8<format>(to_float(x) * scale) * inverse;
    const bool is_finite = (x.bits & 0x7f80U) != 0x7f80U;
    // Exact: it has at most four significant bits.
    const std::uint32_t upper = std::bit_cast<std::uint32_t>(number) >> 16;
    return {static_cast<std::uint16_t>(select(is_finite, upper, 0x7fc0U))};
}

}  // namespace llmc
