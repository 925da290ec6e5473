// Compares what a kernel computed with a reference, element by element, each within a bound of its own. The bound
// is derived where the reference is computed, from
//   u(fp32) = 2^-24, u(bf16) = 2^-8: the relative error of one rounding to nearest,
//   n u sum|terms|: the error of a sum of n terms in fp32, in whatever order (Higham, "Accuracy and Stability of
//   Numerical Algorithms", 4.2).
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>

#include "llmc/device/cuda/packed.cuh"

namespace lab {

template <class X>
inline constexpr double unit_roundoff = std::is_same_v<X, float> ? 0x1p-24 : 0x1p-8;

// Of a value that was computed in fp32 with error `before`, and then rounded to X. The smallest normal number
// stands for what is lost below it.
template <class X>
double rounded(double value, double before) {
    return before + unit_roundoff<X> * (std::fabs(value) + before) + 0x1p-126;
}

class Comparison {
  public:
    // `bound`: the most that the two may differ.
    void see(const char* what, std::int64_t index, double got, double wanted, double bound) {
        const double error = std::fabs(got - wanted) / bound;
        if (got == wanted || error <= worst_) return;
        worst_ = std::isnan(error) ? HUGE_VAL : error;
        if (worst_ <= 1) return;
        if (failures_++ == 0) {
            first_ = std::string(what) + "[" + std::to_string(index) + "] is " + std::to_string(got) +
                     ", should be " + std::to_string(wanted) + " within " + std::to_string(bound);
        }
    }
    // For what must be the same.
    void see_equal(const char* what, std::int64_t index, double got, double wanted) {
        see(what, index, got, wanted, 0x1p-1000);
    }

    bool good() const { return failures_ == 0; }
    double worst() const { return worst_; }  // error over its bound
    const std::string& first_failure() const { return first_; }

  private:
    double worst_ = 0;
    int failures_ = 0;
    std::string first_;
};

}  // namespace lab
