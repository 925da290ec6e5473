// The logistic function, SwiGLU and the cap of logits as branch-free arithmetic, so that loops over them are
// vectorized (vector_math.h).
#pragma once

#include <cmath>

#include "llmc/device/cpu/vector_math.h"

namespace llmc::cpu {

// s(x) = 1/(1 + e^-x) and 1 - s(x). Both keep their relative precision far from 0; results below 2^-125 are
// 0.
struct Logistic {
    float value;
    float rest;  // 1 - value
};

inline Logistic logistic(float x) {
    const float z = exponential(-std::fabs(x));  // never overflows
    const float reciprocal = 1.0F / (1.0F + z);
    const float small = z * reciprocal;
    return {select(x < 0.0F, small, reciprocal), select(x < 0.0F, reciprocal, small)};
}

// a s(a) b
inline float swiglu(float a, float b) { return a * logistic(a).value * b; }

// The derivatives of a s(a) b, times dout.
struct SwigluGradient {
    float da;  // dout b s (1 + a (1 - s))
    float db;  // dout a s
};

inline SwigluGradient swiglu_gradient(float dout, float a, float b) {
    const Logistic s = logistic(a);
    const float ds = dout * s.value;
    return {ds * b * std::fma(a, s.rest, 1.0F), ds * a};
}

// max(x, 0); NaN stays NaN.
inline float positive_part(float x) { return select(x < 0.0F, 0.0F, x); }

// y = cap tanh(x/cap), and dy/dx = 1 - (y/cap)^2. With t = e^(-2|x|/cap):
//   |y| = cap (1 - t)/(1 + t),  dy/dx = 4 t/(1 + t)^2
// The error of y is a few ulp of the cap, whatever the size of y: it is the error of a softmax's argument.
// The slope keeps its relative precision.
struct Capped {
    float value;
    float slope;
};

class SoftCap {
  public:
    explicit SoftCap(float cap) : cap_(cap), exponent_(-2.0F / cap) {}

    Capped operator()(float x) const {
        const float t = exponential(std::fabs(x) * exponent_);
        const float reciprocal = 1.0F / (1.0F + t);
        const float tr = t * reciprocal;
        return {std::copysign(cap_ * ((1.0F - t) * reciprocal), x), 4.0F * tr * reciprocal};
    }

  private:
    float cap_;
    float exponent_;
};

// No cap: y = x.
struct NoCap {
    Capped operator()(float x) const { return {x, 1.0F}; }
};

}  // namespace llmc::cpu
