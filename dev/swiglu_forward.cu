// SwiGLU forward, in three variants: out = a s(a) b, where s is the logistic function. a and b are the halves
// of each of N rows of 2 F elements (llmc/device/ops.h).
//
// There are 3 N F elements to move (a and b read, out written). In bf16 that is 6 bytes per result. In that
// time an A100 can do 42 instructions per result, and an H100 58 (dev/gelu_forward.cu).
//   1  A thread does an element. It needs its row and column, and a division of 64 bits takes 60
//      instructions or more: arithmetic is the limit.
//   2  16 bytes per thread: a division for eight results in bf16. expf and the division of 1 + e^-a take 20
//      instructions.
//   3  A block's threads are side by side in a row, and its place in the grid is that of its rows and
//      columns: no division. One ex2, one rcp. A thread has the loads of two rows in flight, four in all
//      (llmc/device/cuda/swiglu.cuh).
#include "llmc/device/cuda/swiglu.cuh"

#include "dev/lab/lab.h"
#include "dev/swiglu_reference.h"

namespace lab::swiglu_forward_variants {

using namespace llmc::cuda;

__device__ __forceinline__ float swiglu_by_division(float a, float b) { return a / (1 + expf(-a)) * b; }

template <class X>
__global__ void swiglu_forward_kernel1(X* out, const X* in, std::int64_t rows, std::int64_t width) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= rows * width) return;
    const X* const a = in + i / width * 2 * width + i % width;
    out[i] = from_float<X>(swiglu_by_division(to_float(a[0]), to_float(a[width])));
}

template <class X>
__global__ void swiglu_forward_kernel2(X* out, const X* in, std::int64_t rows, std::int64_t width) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
    if (i >= rows * width) return;
    const X* const from = in + i / width * 2 * width + i % width;
    Packed<X> a = load_streaming(from);
    const Packed<X> b = load_streaming(from + width);
    for (int k = 0; k < pack; ++k) {
        a[k] = from_float<X>(swiglu_by_division(to_float(a[k]), to_float(b[k])));
    }
    store(out + i, a);
}

template <class X>
class SwigluForward : public Problem {
  public:
    SwigluForward(const Shape& shape, Draw& draw)
        : rows_(shape[0]), width_(shape[1]), in_(rows_ * 2 * width_), out_(rows_ * width_) {
        draw_swiglu_inputs(in_, draw);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X* out = out_.data();
        const X* in = in_.data();
        const auto launch_elements = [&](auto kernel, int elements_a_thread) {
            launch(
                on, kernel,
                static_cast<unsigned>(blocks_for<std::int64_t>(out_.size(), block_size * elements_a_thread)),
                block_size, 0, out, in, rows_, width_);
        };
        switch (variant) {
            case 1:
                return launch_elements(swiglu_forward_kernel1<X>, 1);
            case 2:
                return launch_elements(swiglu_forward_kernel2<X>, Packed<X>::size);
            case 3:
                return llmc::cuda::swiglu_forward(on, out, in, rows_, static_cast<int>(width_), block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < out_.size(); ++i) {
            const X* const a = in_.data() + i / width_ * 2 * width_ + i % width_;
            const Swiglu y = swiglu_reference(to_float(a[0]), to_float(a[width_]), 0);
            comparison.see("out", i, to_float(out_[i]), y.value, rounded<X>(y.value, y.value_error));
        }
    }

    double bytes() const override { return static_cast<double>(in_.bytes() + out_.bytes()); }

  private:
    std::int64_t rows_, width_;
    Array<X> in_, out_;
};

const Registration registration({
    .name = "swiglu_forward",
    .sizes = {"rows", "width"},
    .variants = {{1, "one element a thread", {32, 128, 512}},
                 {2, "16-byte accesses", {32, 128, 512}},
                 {3, "no division, two rows in flight", {32, 128, 256, 512}}},
    .checked = {{1, 8}, {37, 8}, {5, 264}, {3, 5000}, {9, 1376}},
    .timed = {{8192, 8192}, {8192, 14336}},
    .takes = {},
    .make = make_problem<SwigluForward>,
    .checked_for_races = {{37, 80}},
});

}  // namespace lab::swiglu_forward_variants
