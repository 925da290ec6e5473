// SwiGLU in double, and error bounds for fp32: for dev/swiglu_forward.cu and dev/swiglu_backward.cu.
//
// With the logistic function s = 1/(1 + e^-a) and q = 1 - s: y = a s b, db = d a s, da = d b s (1 + a q). The
// bounds hold for all ways to compute s. Let u be the unit roundoff of fp32:
// - The argument of the exponential has 2 operations, and the exponential 2 ulp: a relative error of
//   (2 |a| + 4) u. It moves s by s q times as much. The sum has u, and the reciprocal 1 ulp, 2 u.
// - q has the same error from the exponential. By subtraction from 1 it also has that of s, 3 u s, and u q.
//   As z/(1 + z) it has 4 u q.
// - An exponential or a reciprocal below 2^-125 may be 0.
#pragma once

#include <cmath>

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"

namespace lab {

struct Swiglu {
    double value, value_error;
    double da, da_error;
    double db, db_error;
};

inline Swiglu swiglu_reference(double a, double b, double d) {
    constexpr double u = unit_roundoff<float>, flushed = 0x1p-125;
    const double s = 1 / (1 + std::exp(-a)), q = 1 / (1 + std::exp(a));
    const double by_exponential = s * q * (2 * std::fabs(a) + 4) * u;
    const double s_error = by_exponential + 3 * u * s + flushed;
    const double q_error = by_exponential + u * (3 * s + q + 3 * q) + flushed;
    const double slope = 1 + a * q;
    const double slope_error = std::fabs(a) * (q_error + u * q) + u * std::fabs(slope);
    const double value = a * s * b, da = d * b * s * slope, db = d * a * s;
    const auto times = [](double x, double y) { return std::fabs(x * y); };
    return {value,
            times(a, b) * s_error + 2.01 * u * std::fabs(value),
            da,
            times(d, b) * (s_error * (std::fabs(slope) + slope_error) + s * slope_error) +
                3.01 * u * std::fabs(da),
            db,
            times(d, a) * s_error + 2.01 * u * std::fabs(db)};
}

// Normal numbers that reach both tails of the logistic function, and some special values of a in the first
// row.
template <class X>
void draw_swiglu_inputs(Array<X>& in, Draw& draw) {
    draw.normal(in, 3);
    const float special[] = {0.0f, -0.0f, 1e-30f, -1e-30f, -20.0f, 20.0f, -100.0f, 100.0f};
    for (int i = 0; i < 8; ++i) in[i] = llmc::cuda::from_float<X>(special[i]);
}

}  // namespace lab
