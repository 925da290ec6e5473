// Compares a kernel's results with a reference, element by element, each within its own bound. The code that
// computes the reference derives the bounds from:
//   u(fp32) = 2^-24, u(bf16) = 2^-8, u(fp16) = 2^-11: the relative error of one rounding to nearest,
//   n u sum|terms|: the error of a sum of n terms in fp32, in any order (Higham, "Accuracy and Stability of
//   Numerical Algorithms", 4.2).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>

#include "llmc/device/cuda/packed.cuh"

namespace lab {

using llmc::cuda::fp16;

template <class X>
inline constexpr double unit_roundoff = std::is_same_v<X, float>  ? 0x1p-24
                                        : std::is_same_v<X, fp16> ? 0x1p-11
                                                                  : 0x1p-8;

// The error of a rounding: relative to the number, and absolute where it underflows. By default there is none.
struct Rounding {
    double relative = 0, absolute = 0;

    // That of a number with the error `before`
    double error(double value, double before = 0) const {
        return relative * (std::fabs(value) + before) + absolute;
    }
};
// Below its normal numbers, fp16 has multiples of 2^-24. fp32 and bf16 may be flushed below 2^-126.
template <class X>
inline constexpr Rounding rounding_to{unit_roundoff<X>, std::is_same_v<X, fp16> ? 0x1p-25 : 0x1p-126};

// The error bound of a value that is computed in fp32 with error `before`, and then rounded to X.
template <class X>
double rounded(double value, double before) {
    return before + rounding_to<X>.error(value, before);
}

// How attention rounds the probabilities, and their gradients, that it multiplies: on tensor cores to X.
template <class X>
inline constexpr Rounding rounding_of_weights = std::is_same_v<X, float> ? Rounding{} : rounding_to<X>;

class Comparison {
  public:
    // `bound` is the largest allowed difference.
    void see(const char* what, std::int64_t index, double got, double wanted, double bound) {
        const double error = std::fabs(got - wanted) / bound;
        if (got == wanted || error <= worst_) return;
        worst_ = std::isnan(error) ? HUGE_VAL : error;
        if (worst_ <= 1) return;
        if (failures_++ == 0) {
            char text[160];
            std::snprintf(text, sizeof(text), "[%lld] is %.9g, should be %.9g within %.3g",
                          static_cast<long long>(index), got, wanted, bound);
            first_ = std::string(what) + text;
        }
    }
    // For values that must be equal.
    void see_equal(const char* what, std::int64_t index, double got, double wanted) {
        see(what, index, got, wanted, 0x1p-1000);
    }

    bool good() const { return failures_ == 0; }
    double worst() const { return worst_; }  // the largest error divided by its bound
    const std::string& first_failure() const { return first_; }

  private:
    double worst_ = 0;
    int failures_ = 0;
    std::string first_;
};

}  // namespace lab
