// The element types of tensors, and bfloat16 on the host.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

#include "llmc/core/error.h"
#include "llmc/core/text.h"

namespace llmc {

// fp64 is for sums over a whole step (loss, gradient norm), int32 for token ids.
enum class DType : std::uint8_t { fp32, bf16, fp64, int32 };

// The upper half of an IEEE fp32: 8 bits of exponent and 8 bits of significand (7 of them stored). Rounding
// to nearest has unit roundoff 2^-8.
struct bfloat16 {
    std::uint16_t bits;
};

inline float to_float(bfloat16 x) { return std::bit_cast<float>(std::uint32_t{x.bits} << 16); }
inline float to_float(float x) { return x; }

// Rounds to nearest, ties to even. A NaN stays a NaN. Without its low bits the payload could be all zero, so
// one bit is set.
inline bfloat16 to_bfloat16(float x) {
    const auto bits = std::bit_cast<std::uint32_t>(x);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t nan = (bits >> 16) | 0x40u;
    return {static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

template <class T>
T from_float(float x) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        return to_bfloat16(x);
    } else {
        return static_cast<T>(x);
    }
}

template <class T>
constexpr DType dtype_of() {
    if constexpr (std::is_same_v<T, float>) return DType::fp32;
    if constexpr (std::is_same_v<T, bfloat16>) return DType::bf16;
    if constexpr (std::is_same_v<T, double>) return DType::fp64;
    if constexpr (std::is_same_v<T, std::int32_t>) return DType::int32;
}

constexpr std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::fp32:
            return 4;
        case DType::bf16:
            return 2;
        case DType::fp64:
            return 8;
        case DType::int32:
            return 4;
    }
    return 0;
}

constexpr std::string_view name_of(DType dtype) { return name_among(dtype, "fp32", "bf16", "fp64", "int32"); }

// Calls `f` with a value of the C++ type of a compute dtype (fp32 or bf16): with_dtype(d, [&](auto t) {
// using T = decltype(t); ... }).
template <class F>
decltype(auto) with_dtype(DType dtype, F&& f) {
    check(dtype == DType::fp32 || dtype == DType::bf16, "with_dtype takes fp32 or bf16");
    return dtype == DType::bf16 ? f(bfloat16{}) : f(float{});
}

}  // namespace llmc
