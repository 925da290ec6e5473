// GELU in double, and error bounds for fp32: for dev/gelu_forward.cu and dev/gelu_backward.cu.
//
// With w = 2 sqrt(2/pi) (x + 0.044715 x^3) and the logistic function s = 1/(1 + e^-w) = (1 + tanh(w/2))/2:
//   GELU(x) = x s,  GELU'(x) = s + x q dw/dx,  q = s (1 - s)
// The bounds hold for both ways to compute s. Let u be the unit roundoff of fp32:
// - w has at most 7 operations on terms of one sign, 7 u |w|. Since ds/dw = q, that makes 7 u q |w| of s.
// - With tanhf: its 2 ulp are 2 u, since |tanh| < 1. The error of s is half of that, u, whatever the size of
//   s. 1 + tanh and its factor add roundings of 3 u s.
// - With an exponential (2 ulp, 4 u), a sum (u) and a reciprocal (1 ulp, 2 u): 4 u q + 3 u s, and u s for a
//   product.
#pragma once

#include <cmath>

#include "dev/lab/comparison.h"
#include "dev/lab/memory.h"

namespace lab {

struct Gelu {
    double value, value_error;
    double derivative, derivative_error;
};

inline Gelu gelu_reference(double x) {
    constexpr double u = unit_roundoff<float>;
    const double root = std::sqrt(2 / std::acos(-1.0));
    const double w = 2 * root * (x + 0.044715 * x * x * x), slope = 2 * root * (1 + 3 * 0.044715 * x * x);
    const double s = 1 / (1 + std::exp(-w)), q = s * (1 / (1 + std::exp(w)));
    const double s_error = u * (7 * q * std::fabs(w) + 8 * s + 2);
    // q is (1 - tanh^2)/4. Its error is |tanh|/2 times the error of tanhf, 2 s_error, and u/2 for the two
    // roundings. With exponentials it is 12 u q more than the part that comes from w.
    const double q_error = u * (7 * q * std::fabs(w) + 12 * q + 2);
    const double derivative = s + x * q * slope;
    return {x * s, std::fabs(x) * s_error, derivative,
            s_error + std::fabs(x) * slope * (q_error + 7 * u * q) + u * std::fabs(derivative)};
}

// Normal numbers that reach both tails, and some special values.
template <class X>
void draw_gelu_inputs(Array<X>& in, Draw& draw) {
    draw.normal(in, 2);
    const float special[] = {0.0f, -0.0f, 1e-30f, -1e-30f, -6.0f, 6.0f, -50.0f, 50.0f};
    for (int i = 0; i < 8; ++i) in[i] = from_float<X>(special[i]);
}

}  // namespace lab
