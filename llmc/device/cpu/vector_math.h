// exp and GELU as branch-free arithmetic, so that a loop over them becomes vector instructions (the library's
// expf and tanhf do not, and are ten times slower). Every product that is added to is an explicit fma: the
// vector body and the scalar tail of a loop then round alike.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace llmc::cpu {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

// condition ? a : b on bits. From a plain choice between two floats the compiler makes a branch again, around
// the arithmetic of one of them, and then no vector instructions.
inline float select(bool condition, float a, float b) {
    const std::uint32_t mask = condition ? ~0U : 0U;
    return std::bit_cast<float>((std::bit_cast<std::uint32_t>(a) & mask) |
                                (std::bit_cast<std::uint32_t>(b) & ~mask));
}

// e^x within 1.1 ulp; results below 2^-125 are 0, above the largest float infinite; NaN stays NaN.
// x = n ln 2 + r with |r| <= ln(2)/2, e^x = 2^n e^r, e^r = 1 + r + r^2 q(r), where q is the polynomial of
// degree 4 with the least greatest relative error of e^r (3e-9).
inline float exponential(float x) {
    constexpr float lowest = -86.64339F;  // ln 2^-125
    constexpr float highest = 88.72283F;  // ln of the largest float
    constexpr float log2_e = std::numbers::log2e_v<float>;
    constexpr float ln2_high = std::numbers::ln2_v<float>;
    constexpr float ln2_low = static_cast<float>(std::numbers::ln2 - double{ln2_high});
    // Adding 1.5 * 2^23 leaves no bits below 1: the sum's last bits are n, x / ln 2 rounded to an integer.
    constexpr float rounder = 0x1.8p23F;

    const float shifted = std::fma(x, log2_e, rounder);
    const float n = shifted - rounder;
    const float r = std::fma(n, -ln2_low, std::fma(n, -ln2_high, x));
    float q = 0x1.6a21acp-10F;
    q = std::fma(q, r, 0x1.123b6ap-7F);
    q = std::fma(q, r, 0x1.5558fap-5F);
    q = std::fma(q, r, 0x1.555490p-3F);
    q = std::fma(q, r, 0x1.fffffcp-2F);
    const float e_to_r = std::fma(r * r, q, r) + 1.0F;

    // 2 * 2^(n-1), as 2^n is no float at n = 128. n may be anything here if x is outside the bounds or NaN.
    constexpr std::uint32_t bias_less_one = 126;
    const float power = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + bias_less_one) << 23);
    const float inside = (e_to_r + e_to_r) * power;
    return select(x > highest, infinity, select(x < lowest, 0.0F, inside));
}

// GPT-2's GELU: x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). Here (1 + tanh(u))/2 is the logistic
// function s of 2u, which, unlike 1 + tanh(u), keeps its relative precision where u is far below 0.
namespace gelu_detail {

inline constexpr double root_2_over_pi = 0.79788456080286535588;
inline constexpr float linear = static_cast<float>(2.0 * root_2_over_pi);
inline constexpr float cubic = static_cast<float>(2.0 * root_2_over_pi * 0.044715);

inline float two_u(float x) { return x * std::fma(cubic, x * x, linear); }

}  // namespace gelu_detail

inline float gelu(float x) {
    const float two_u = gelu_detail::two_u(x);
    const float z = exponential(-std::fabs(two_u));  // never overflows
    return x * (select(two_u < 0.0F, z, 1.0F) / (1.0F + z));
}

// s + x s (1 - s) (2u)', where s (1 - s) = z / (1 + z)^2
inline float gelu_derivative(float x) {
    const float two_u = gelu_detail::two_u(x);
    const float z = exponential(-std::fabs(two_u));
    const float reciprocal = 1.0F / (1.0F + z);
    const float s = select(two_u < 0.0F, z, 1.0F) * reciprocal;
    // z is 0 from |x| = 20 on; a larger x would multiply that 0 by infinity.
    constexpr float far = 32.0F;
    const float size = std::fabs(x);
    const float near = std::copysign(size > far ? far : size, x);
    const float slope = std::fma(3.0F * gelu_detail::cubic, near * near, gelu_detail::linear);
    return std::fma(near * slope, z * reciprocal * reciprocal, s);
}

}  // namespace llmc::cpu
