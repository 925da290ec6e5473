// GELU backward, in three variants: din = dout GELU'(x) for n elements, where GELU(x) = x/2 (1 + tanh(w/2))
// with w = 2 sqrt(2/pi) (x + 0.044715 x^3) (llmc/device/ops.h). din may be dout.
//
// There are 3 n elements to move (x and dout read, din written): 6 bytes per element in bf16. In that time an
// A100 can do 42 instructions per element, and an H100 58 (dev/gelu_forward.cu).
//   1  A thread does an element.
//   2  16 bytes per thread: as many requests as the memory can take, and 32 instructions, half of them of
//      tanhf.
//   3  With s = 1/(1 + e^-w), as in the forward pass: 15 instructions and four loads in flight
//      (llmc/device/cuda/gelu.cuh).
#include "dev/gelu_reference.h"
#include "dev/lab/lab.h"
#include "llmc/device/cuda/gelu.cuh"

namespace lab::gelu_backward_variants {

using namespace llmc::cuda;

__device__ __forceinline__ float gelu_derivative_by_tanh(float x) {
    constexpr auto root = static_cast<float>(0.79788456080286535588);  // sqrt(2/pi)
    const float tanh = tanhf(root * (x + 0.044715f * x * x * x));
    const float slope = root * (1 + 3 * 0.044715f * x * x);
    return 0.5f * (1 + tanh) + 0.5f * x * (1 - tanh * tanh) * slope;
}

template <class X>
__global__ void gelu_backward_kernel1(X* din, const X* dout, const X* in, std::int64_t n) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) din[i] = from_float<X>(to_float(dout[i]) * gelu_derivative_by_tanh(to_float(in[i])));
}

template <class X>
__global__ void gelu_backward_kernel2(X* din, const X* dout, const X* in, std::int64_t n) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
    if (i >= n) return;
    const Packed<X> x = load_streaming(in + i);
    Packed<X> d = load_streaming(dout + i);
    for (int k = 0; k < pack; ++k) {
        d[k] = from_float<X>(to_float(d[k]) * gelu_derivative_by_tanh(to_float(x[k])));
    }
    store(din + i, d);
}

template <class X>
class GeluBackward : public Problem {
  public:
    GeluBackward(const Shape& shape, Draw& draw) : in_(shape[0]), dout_(shape[0]), din_(shape[0]) {
        draw_gelu_inputs(in_, draw);
        draw.normal(dout_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const std::int64_t n = in_.size();
        X* din = din_.data();
        const X *dout = dout_.data(), *in = in_.data();
        const auto launch_elements = [&](auto kernel, int elements_a_thread) {
            launch(on, kernel,
                   static_cast<unsigned>(blocks_for<std::int64_t>(n, block_size * elements_a_thread)),
                   block_size, 0, din, dout, in, n);
        };
        switch (variant) {
            case 1:
                return launch_elements(gelu_backward_kernel1<X>, 1);
            case 2:
                return launch_elements(gelu_backward_kernel2<X>, Packed<X>::size);
            case 3:
                return llmc::cuda::gelu_backward(on, din, dout, in, n, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { din_.clear(); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < in_.size(); ++i) {
            const Gelu gelu = gelu_reference(to_float(in_[i]));
            const double d = to_float(dout_[i]), din = d * gelu.derivative;
            const double error = std::fabs(d) * gelu.derivative_error + unit_roundoff<float> * std::fabs(din);
            comparison.see("din", i, to_float(din_[i]), din, rounded<X>(din, error));
        }
    }

    double bytes() const override { return 3.0 * static_cast<double>(in_.bytes()); }

  private:
    Array<X> in_, dout_, din_;
};

const Registration registration({
    .name = "gelu_backward",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 128, 512}},
                 {2, "16-byte accesses", {32, 128, 512}},
                 {3, "the logistic function, four loads in flight", {32, 128, 256, 512}}},
    .checked = {{8}, {264}, {5000}, {1 << 14}},
    .timed = {{8192 * 3072}, {8192 * 6400}},
    .takes = {},
    .make = make_problem<GeluBackward>,
    .checked_for_races = {{2072}},
});

}  // namespace lab::gelu_backward_variants
