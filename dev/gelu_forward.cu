// GELU forward, in three variants: out = x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) for n elements
// (llmc/device/ops.h).
//
// There are 2 n elements to move (x read, out written). In bf16 that is 4 bytes per element. In that time an
// A100 (1.4 TB/s, 108 multiprocessors of 64 fp32 lanes at 1.4 GHz) can do 28 instructions per element, and an
// H100 39. Arithmetic is close enough to the limit to matter.
//   1  A thread does an element. In bf16 a warp requests 64 bytes at a time: too few in flight, and an
//      address and a comparison for every element.
//   2  16 bytes per thread. Now arithmetic is the limit: tanhf computes both of its branches, 16
//      instructions, 23 in all.
//   3  1/2 (1 + tanh(w/2)) is the logistic function 1/(1 + e^-w): one ex2, one rcp, 7 instructions in all. A
//      thread has two loads in flight (llmc/device/cuda/gelu.cuh).
// The hardware's tanh (tanh.approx, with a relative error of 2^-11) would save one more instruction. But 1 +
// tanh cancels for negative x: at x = -3 the error could be a fifth of the result. Variant 3 is as precise in
// its tails as around 0.
#include "dev/gelu_reference.h"
#include "dev/lab/lab.h"
#include "llmc/device/cuda/gelu.cuh"

namespace lab::gelu_forward_variants {

using namespace llmc::cuda;

__device__ __forceinline__ float gelu_by_tanh(float x) {
    constexpr auto root = static_cast<float>(0.79788456080286535588);  // sqrt(2/pi)
    return 0.5f * x * (1 + tanhf(root * (x + 0.044715f * x * x * x)));
}

template <class X>
__global__ void gelu_forward_kernel1(X* out, const X* in, std::int64_t n) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) out[i] = from_float<X>(gelu_by_tanh(to_float(in[i])));
}

template <class X>
__global__ void gelu_forward_kernel2(X* out, const X* in, std::int64_t n) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
    if (i >= n) return;
    Packed<X> x = load_streaming(in + i);
    for (int k = 0; k < pack; ++k) x[k] = from_float<X>(gelu_by_tanh(to_float(x[k])));
    store(out + i, x);
}

template <class X>
class GeluForward : public Problem {
  public:
    GeluForward(const Shape& shape, Draw& draw) : in_(shape[0]), out_(shape[0]) {
        draw_gelu_inputs(in_, draw);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const std::int64_t n = in_.size();
        X* out = out_.data();
        const X* in = in_.data();
        const auto launch_elements = [&](auto kernel, int elements_a_thread) {
            launch(on, kernel,
                   static_cast<unsigned>(blocks_for<std::int64_t>(n, block_size * elements_a_thread)),
                   block_size, 0, out, in, n);
        };
        switch (variant) {
            case 1:
                return launch_elements(gelu_forward_kernel1<X>, 1);
            case 2:
                return launch_elements(gelu_forward_kernel2<X>, Packed<X>::size);
            case 3:
                return llmc::cuda::gelu_forward(on, out, in, n, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < in_.size(); ++i) {
            const Gelu gelu = gelu_reference(to_float(in_[i]));
            comparison.see("out", i, to_float(out_[i]), gelu.value, rounded<X>(gelu.value, gelu.value_error));
        }
    }

    double bytes() const override { return 2.0 * static_cast<double>(in_.bytes()); }

  private:
    Array<X> in_, out_;
};

const Registration registration({
    .name = "gelu_forward",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 128, 512}},
                 {2, "16-byte accesses", {32, 128, 512}},
                 {3, "the logistic function, two loads in flight", {32, 128, 256, 512}}},
    .checked = {{8}, {264}, {5000}, {1 << 14}},
    .timed = {{8192 * 3072}, {8192 * 6400}},
    .takes = {},
    .make = make_problem<GeluForward>,
    .checked_for_races = {{2072}},
});

}  // namespace lab::gelu_forward_variants
