// SwiGLU backward, in three variants (llmc/device/ops.h), where s is the logistic function of a:
//   db = dout a s,  da = dout b s (1 + a (1 - s))
// The pairs a, b and da, db are the halves of N rows of 2 F elements. din may be in.
//
// There are 5 N F elements to move (a, b and dout read, da and db written). In bf16 that is 10 bytes per
// element of dout. In that time an A100 can do 70 instructions, and an H100 97 (dev/gelu_forward.cu).
//   1  A thread does an element. A division of 64 bits for its row and column takes 60 instructions or more.
//   2  16 bytes per thread: a division for eight elements in bf16.
//   3  No division; one ex2 and one rcp give s and 1 - s without cancellation. A thread has the loads of two
//      rows in flight, six in all (llmc/device/cuda/swiglu.cuh).
#include "dev/lab/lab.h"
#include "dev/swiglu_reference.h"
#include "llmc/device/cuda/swiglu.cuh"

namespace lab::swiglu_backward_variants {

using namespace llmc::cuda;

struct Gradient {
    float da, db;
};
__device__ __forceinline__ Gradient gradient_by_division(float d, float a, float b) {
    const float s = 1 / (1 + expf(-a));
    return {d * b * s * (1 + a * (1 - s)), d * a * s};
}

template <class X>
__global__ void swiglu_backward_kernel1(X* din, const X* dout, const X* in, std::int64_t rows,
                                        std::int64_t width) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= rows * width) return;
    const std::int64_t at = i / width * 2 * width + i % width;
    const Gradient g = gradient_by_division(to_float(dout[i]), to_float(in[at]), to_float(in[at + width]));
    din[at] = from_float<X>(g.da);
    din[at + width] = from_float<X>(g.db);
}

template <class X>
__global__ void swiglu_backward_kernel2(X* din, const X* dout, const X* in, std::int64_t rows,
                                        std::int64_t width) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
    if (i >= rows * width) return;
    const std::int64_t at = i / width * 2 * width + i % width;
    const Packed<X> d = load_streaming(dout + i);
    Packed<X> a = load_streaming(in + at), b = load_streaming(in + at + width);
    for (int k = 0; k < pack; ++k) {
        const Gradient g = gradient_by_division(to_float(d[k]), to_float(a[k]), to_float(b[k]));
        a[k] = from_float<X>(g.da);
        b[k] = from_float<X>(g.db);
    }
    store(din + at, a);
    store(din + at + width, b);
}

template <class X>
class SwigluBackward : public Problem {
  public:
    SwigluBackward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          width_(shape[1]),
          in_(rows_ * 2 * width_),
          din_(rows_ * 2 * width_),
          dout_(rows_ * width_) {
        draw_swiglu_inputs(in_, draw);
        draw.normal(dout_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X* din = din_.data();
        const X *dout = dout_.data(), *in = in_.data();
        const auto launch_elements = [&](auto kernel, int elements_a_thread) {
            launch(
                on, kernel,
                static_cast<unsigned>(blocks_for<std::int64_t>(dout_.size(), block_size * elements_a_thread)),
                block_size, 0, din, dout, in, rows_, width_);
        };
        switch (variant) {
            case 1:
                return launch_elements(swiglu_backward_kernel1<X>, 1);
            case 2:
                return launch_elements(swiglu_backward_kernel2<X>, Packed<X>::size);
            case 3:
                return llmc::cuda::swiglu_backward(on, din, dout, in, rows_, static_cast<int>(width_),
                                                   block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { din_.clear(); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < dout_.size(); ++i) {
            const std::int64_t a = i / width_ * 2 * width_ + i % width_, b = a + width_;
            const Swiglu y = swiglu_reference(to_float(in_[a]), to_float(in_[b]), to_float(dout_[i]));
            comparison.see("da", a, to_float(din_[a]), y.da, rounded<X>(y.da, y.da_error));
            comparison.see("db", b, to_float(din_[b]), y.db, rounded<X>(y.db, y.db_error));
        }
    }

    double bytes() const override { return static_cast<double>(in_.bytes() + din_.bytes() + dout_.bytes()); }

  private:
    std::int64_t rows_, width_;
    Array<X> in_, din_, dout_;
};

const Registration registration({
    .name = "swiglu_backward",
    .sizes = {"rows", "width"},
    .variants = {{1, "one element a thread", {32, 128, 512}},
                 {2, "16-byte accesses", {32, 128, 512}},
                 {3, "no division, two rows in flight", {32, 128, 256, 512}}},
    .checked = {{1, 8}, {37, 8}, {5, 264}, {3, 5000}, {9, 1376}},
    .timed = {{8192, 8192}, {8192, 14336}},
    .takes = {},
    .make = make_problem<SwigluBackward>,
    .checked_for_races = {{37, 80}},
});

}  // namespace lab::swiglu_backward_variants
