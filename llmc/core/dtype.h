// The element types of tensors, and the 16-bit ones on the host.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

// fp64 is for sums over a whole step (loss, gradient norm), int32 for token ids, uint8 for moments in 8 bits
// (device/eight_bit_moments.h). The others are compute dtypes.
enum class DType : std::uint8_t { fp32, bf16, fp16, fp64, int32, uint8 };

// The upper half of an IEEE fp32: 8 bits of exponent and 8 bits of significand (7 of them stored). Rounding
// to nearest has unit roundoff 2^-8.
struct bfloat16 {
    std::uint16_t bits;
};

// IEEE binary16: 5 bits of exponent and 11 bits of significand (10 of them stored), up to 65504; normal from 2^-14,
// multiples of 2^-24 below. Rounding to nearest has unit roundoff 2^-11.
struct float16 {
    std::uint16_t bits;
};

inline float to_float(bfloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline float to_float(float x) { return x; }

// condition ? a : b. Of a plain choice the compiler may make a branch, and then does not vectorize the loop around it.
inline std::uint32_t select(bool condition, std::uint32_t a, std::uint32_t b) {
    const std::uint32_t mask = condition ? ~0U : 0U;
    return (a & mask) | (b & ~mask);
}

// Exact. Loops over it are vectorized, and no fp32 number is subnormal, which would be slow.
inline float to_float(float16 x) {
    constexpr std::uint32_t bias = 112U << 23;  // that of fp32 less that of fp16
    const std::uint32_t magnitude = x.bits & 0x7fffU, sign = (x.bits & 0x8000U) << 16;
    const std::uint32_t normal = (magnitude << 13) + bias + select(magnitude < 0x7c00U, 0, bias);
    const auto subnormal =
        std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24F);
    return std::bit_cast<float>(select(magnitude < 0x400U, subnormal, normal) | sign);
}

// Rounds to nearest, ties to even. A NaN stays a NaN. Without its low bits the payload could be all zero, so
// one bit is set.
inline bfloat16 to_bfloat16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x40u;
    return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// Rounds to nearest, ties to even; from 65520 on to infinity. A NaN stays a NaN. Loops over it are vectorized.
inline float16 to_float16(float x) {
    constexpr std::uint32_t smallest_normal = 0x38800000U /* 2^-14 */, infinity = 0x7f800000U,
                            infinity_fp16 = 0x7c00U, half = 0x3f000000U;
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t sign = bits >> 16 & 0x8000U, magnitude = bits & 0x7fffffffU;
    const std::uint32_t rounded =
        (magnitude + 0xfffU + (magnitude >> 13 & 1U) - (smallest_normal - (1U << 23))) >> 13;
    const std::uint32_t normal = std::min(rounded, infinity_fp16);
    // The last bit of a number from 1/2 to 1 is 2^-24: the sum rounds x to a multiple of it.
    const std::uint32_t subnormal =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - half;
    const std::uint32_t quiet_nan = (infinity - magnitude) >> 31 << 9;  // of the magnitudes above infinity
    return {static_cast<std::uint16_t>(select(magnitude < smallest_normal, subnormal, normal) | quiet_nan |
                                       sign)};
}

template <class T>
T from_float(float x) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        return to_bfloat16(x);
    } else if constexpr (std::is_same_v<T, float16>) {
        return to_float16(x);
    } else {
        return static_cast<T>(x);
    }
}

template <class T>
constexpr DType dtype_of() {
    if constexpr (std::is_same_v<T, float>) return DType::fp32;
    if constexpr (std::is_same_v<T, bfloat16>) return DType::bf16;
    if constexpr (std::is_same_v<T, float16>) return DType::fp16;
    if constexpr (std::is_same_v<T, double>) return DType::fp64;
    if constexpr (std::is_same_v<T, std::int32_t>) return DType::int32;
    if constexpr (std::is_same_v<T, std::uint8_t>) return DType::uint8;
}

struct DTypeTraits {
    std::string_view name, file_name;  // of safetensors
    std::size_t bytes;
    bool is_compute;  // activations and weights may have it
};
// In the order of DType.
inline constexpr std::array dtype_traits = {
    DTypeTraits{"fp32", "F32", 4, true},   DTypeTraits{"bf16", "BF16", 2, true},
    DTypeTraits{"fp16", "F16", 2, true},   DTypeTraits{"fp64", "F64", 8, false},
    DTypeTraits{"int32", "I32", 4, false}, DTypeTraits{"uint8", "U8", 1, false},
};
constexpr const DTypeTraits& traits_of(DType dtype) { return dtype_traits[static_cast<std::size_t>(dtype)]; }
constexpr std::size_t size_of(DType dtype) { return traits_of(dtype).bytes; }
constexpr std::string_view name_of(DType dtype) { return traits_of(dtype).name; }
constexpr bool is_compute_dtype(DType dtype) { return traits_of(dtype).is_compute; }

// The dtype of this name, which must be one
constexpr DType dtype_named(std::string_view name) {
    for (std::size_t i = 0; i < dtype_traits.size(); ++i)
        if (dtype_traits[i].name == name) return static_cast<DType>(i);
    programming_error("a dtype has a name of the table");
}

// The type in which elements are added.
template <class T>
using SumType = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls `f` with a value of the C++ type of a compute dtype: with_dtype(d, [&](auto t) { using T = decltype(t); ... }).
template <class F>
decltype(auto) with_dtype(DType dtype, F&& f) {
    check(is_compute_dtype(dtype), "with_dtype takes a compute dtype");
    switch (dtype) {
        case DType::bf16:
            return f(bfloat16{});
        case DType::fp16:
            return f(float16{});
        default:
            return f(float{});
    }
}

}  // namespace llmc
