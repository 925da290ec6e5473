// Compares a kernel's results with a reference, element by element, each within its own bound. The code that
// computes the reference derives the bounds from:
//   u(fp32) = 2^-24, u(bf16) = 2^-8: the relative error of one rounding to nearest,
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

template <class X>
inline constexpr double unit_roundoff = std::is_same_v<X, float> ? 0x1p-24 : 0x1p-8;

// The error bound of a value that is computed in fp32 with error `before`, and then rounded to X. The
// smallest normal number covers underflow.
template <class X>
double rounded(double value, double before) {
    return before + unit_roundoff<X> * (std::fabs(value) + before) + 0x1p-126;
}

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
