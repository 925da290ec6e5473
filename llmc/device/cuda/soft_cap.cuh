// The cap of logits, y = cap tanh(x/cap): alone (ops.h: soft_cap), and as a part of the classifier.
#pragma once

#include "llmc/device/cuda/elementwise.cuh"
#include "llmc/device/cuda/ptx.cuh"

namespace llmc::cuda {

// y and dy/dx = 1 - (y/cap)^2
struct Capped {
    float value, slope;
};

// With t = e^(-2|x|/cap), |y| = cap (1 - t)/(1 + t) and dy/dx = 4 t/(1 + t)^2. The error of y is at most
// 18 u cap, whatever the size of y: it is the error of a softmax's argument. Let v = |x|/cap. The argument of the
// exponential has 3 roundings, and the exponential 2 ulp: an error of t (2 v 3 + 4) u <= 6 u of t, which moves
// tanh v by at most twice as much. The difference, the sum, the reciprocal of 1 ulp and 2 products add 6 u. (tanhf
// of a rounded quotient has less.) The slope keeps its relative precision. (tanh.approx would have a relative error
// of 2^-11.)
class SoftCap {
  public:
    static constexpr bool caps = true;

    explicit SoftCap(float cap) : cap_(cap), exponent_(static_cast<float>(-2 * double{log2_e}) / cap) {}

    __device__ __forceinline__ Capped operator()(float x) const {
        const float t = exp2_approximate(fabsf(x) * exponent_);
        const float r = reciprocal_approximate(1 + t), tr = t * r;
        return {copysignf(cap_ * ((1 - t) * r), x), 4 * tr * r};
    }

  private:
    float cap_, exponent_;
};

// No cap: y = x.
struct NoCap {
    static constexpr bool caps = false;

    __device__ __forceinline__ Capped operator()(float x) const { return {x, 1}; }
};

// out may be in: an element is read and written by one thread.
template <class X>
__global__ void __launch_bounds__(elementwise_most_threads, elementwise_resident_here)
    soft_cap_kernel3(X* out, const X* in, SoftCap cap, std::int64_t packs, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    for_grid<4>(
        packs, [=](std::int64_t i) { return load_streaming(in + pack * i); },
        [=](std::int64_t i, const Packed<X>& x) {
            Packed<X> y;
#pragma unroll
            for (int e = 0; e < pack; ++e) y[e] = from_float<X>(cap(to_float(x[e])).value);
            store(out + pack * i, y);
        });
    for (std::int64_t i = pack * packs + grid_thread(); i < elements; i += grid_threads()) {
        out[i] = from_float<X>(cap(to_float(in[i])).value);
    }
}

// out, in X (elements), any number at any address; out may be in
template <class X>
void soft_cap(const LaunchContext& on, X* out, const X* in, float cap, std::int64_t elements,
              int block_threads = 256) {
    const std::int64_t packs = detail::whole_packs(elements, Packed<X>::size, out, in);
    launch(on, soft_cap_kernel3<X>, detail::elementwise_blocks(on, packs, elements, block_threads),
           block_threads, 0, out, in, SoftCap(cap), packs, elements);
}

}  // namespace llmc::cuda
