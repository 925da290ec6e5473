// exp and GELU as branch-free arithmetic, so that loops over them are vectorized. The library's expf and
// tanhf are not, and are ten times slower. Each multiply-add is an explicit fma, so that the vector body and
// the scalar tail of a loop round alike.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "llmc/core/dtype.h"

namespace llmc::cpu {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

// condition ? a : b, without a branch (dtype.h)
inline float select(bool condition, float a, float b) {
    return std::bit_cast<float>(
        llmc::select(condition, std::bit_cast<std::uint32_t>(a), std::bit_cast<std::uint32_t>(b)));
}

// Returns e^x within 1.1 ulp. Results below 2^-125 are 0; those above the largest float are infinite; NaN
// stays NaN.
//   x = n ln 2 + r with |r| <= ln(2)/2,  e^x = 2^n e^r,  e^r = 1 + r + r^2 q(r)
// The polynomial q has degree 4 and minimizes the greatest relative error of e^r (3e-9).
inline float exponential(float x) {
    constexpr float lowest = -86.64339F;  // ln 2^-125
    constexpr float highest = 88.72283F;  // ln of the largest float
    constexpr float log2_e = std::numbers::log2e_v<float>;
    constexpr float ln2_high = std::numbers::ln2_v<float>;
    constexpr float ln2_low = static_cast<float>(std::numbers::ln2 - double{ln2_high});
    // Adding 1.5 * 2^23 leaves no bits below 1. The sum's last bits are n, which is x / ln 2 rounded to an
    // integer.
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

    // 2^n is computed as 2 * 2^(n-1), since a float cannot hold 2^n for n = 128. If x is NaN or outside the
    // bounds, n may be anything.
    constexpr std::uint32_t bias_less_one = 126;
    const float power = std::bit_cast<float>((std::bit_cast<std::uint32_t>(shifted) + bias_less_one) << 23);
    const float inside = (e_to_r + e_to_r) * power;
    return select(x > highest, infinity, select(x < lowest, 0.0F, inside));
}

// GPT-2's GELU: x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). (1 + tanh(u))/2 is s, the logistic
// function of 2u. Unlike 1 + tanh(u), s keeps its relative precision if u is far below 0.
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
    // z is 0 for |x| >= 20. For a huge x the slope would be infinite, and 0 times infinity is NaN.
    constexpr float far = 32.0F;
    const float magnitude = std::fabs(x);
    const float clamped_x = std::copysign(magnitude > far ? far : magnitude, x);
    const float slope = std::fma(3.0F * gelu_detail::cubic, clamped_x * clamped_x, gelu_detail::linear);
    return std::fma(clamped_x * slope, z * reciprocal * reciprocal, s);
}

// lane_sum() adds in a fixed order: element i to lane i % 32, then the lanes in a binary tree. With a single
// vector of sums each addition would wait for the one before; 32 lanes keep several vector additions in
// flight. Rounding errors grow with n / 32.

// sum of term(i) over i = 0 ... n-1
template <class Number, class Term>
Number lane_sum(std::int64_t n, const Term& term) {
    constexpr std::int64_t width = 32;
    Number lanes[width] = {};
    const std::int64_t whole = n / width * width;
    for (std::int64_t begin = 0; begin < whole; begin += width) {
#pragma omp simd
        for (std::int64_t j = 0; j < width; ++j) lanes[j] += term(begin + j);
    }
    Number rest[width] = {};
    for (std::int64_t i = whole; i < n; ++i) rest[i - whole] = term(i);
#pragma omp simd
    for (std::int64_t j = 0; j < width; ++j) lanes[j] += rest[j];
#pragma GCC unroll 5
    for (std::int64_t half = width / 2; half > 0; half /= 2) {
#pragma omp simd
        for (std::int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
    }
    return lanes[0];
}

// The functions below compile a loop twice, for AVX2 and for AVX-512, so that one binary serves every
// processor. The version is chosen at run time; all supported processors have AVX2.

// True if this processor has AVX-512. ONEDNN_MAX_CPU_ISA=AVX2 hides it from oneDNN and from this program.
bool has_avx512();

// Calls f(i) for i in begin ... end-1, compiled for AVX-512. `flatten` inlines all that f calls, so that it
// too is compiled for this instruction set.
template <class F>
#if defined(__x86_64__) && defined(__clang__)
[[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]]
#elif defined(__x86_64__)
[[gnu::flatten, gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]]
#endif
void loop_in_avx512(std::int64_t begin, std::int64_t end, const F& f) {
    for (std::int64_t i = begin; i < end; ++i) f(i);
}

// Calls f(i) for i in begin ... end-1 with the widest vectors that the processor has.
template <class F>
void in_wide_vectors(std::int64_t begin, std::int64_t end, const F& f) {
    if (has_avx512()) return loop_in_avx512(begin, end, f);
    for (std::int64_t i = begin; i < end; ++i) f(i);
}

}  // namespace llmc::cpu
