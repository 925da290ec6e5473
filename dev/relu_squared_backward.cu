// The squared ReLU's gradient, in three variants: din = 2 max(x, 0) dout for n elements (llmc/device/ops.h).
// din may be dout.
//
// An element moves 12 bytes in fp32 and 6 in bf16, for a comparison and two products. Memory is the limit.
//   1  A thread does an element.
//   2  16-byte accesses: a quarter (bf16: an eighth) of the instructions, and as many times more bytes in
//      flight per thread.
//   3  A persistent grid, with four loads per thread in flight (llmc/device/cuda/relu_squared.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/relu_squared.cuh"

namespace lab::relu_squared_backward_variants {

using namespace llmc::cuda;

__device__ __forceinline__ float gradient(float x, float d) { return 2 * positive_part(x) * d; }

template <class X>
__global__ void relu_squared_backward_kernel1(X* din, const X* dout, const X* in, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements) din[i] = from_float<X>(gradient(to_float(in[i]), to_float(dout[i])));
}

template <class X>
__global__ void relu_squared_backward_kernel2(X* din, const X* dout, const X* in, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t first = pack * grid_thread();
    if (first + pack <= elements) {
        const Packed<X> x = load_streaming(in + first);
        Packed<X> d = load_streaming(dout + first);
        for (int e = 0; e < pack; ++e) d[e] = from_float<X>(gradient(to_float(x[e]), to_float(d[e])));
        store(din + first, d);
    } else {
        for (std::int64_t i = first; i < elements; ++i) {
            din[i] = from_float<X>(gradient(to_float(in[i]), to_float(dout[i])));
        }
    }
}

template <class X>
class ReluSquaredBackward : public Problem {
  public:
    ReluSquaredBackward(const Shape& shape, Draw& draw) : n_(shape[0]), in_(n_), dout_(n_), din_(n_) {
        draw.normal(in_, 1);
        draw.normal(dout_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        switch (variant) {
            case 1:
                return launch(on, relu_squared_backward_kernel1<X>, blocks(n_), block_size, 0, din_.data(),
                              dout_.data(), in_.data(), n_);
            case 2:
                return launch(on, relu_squared_backward_kernel2<X>,
                              blocks(blocks_for<std::int64_t>(n_, Packed<X>::size)), block_size, 0,
                              din_.data(), dout_.data(), in_.data(), n_);
            case 3:
                return llmc::cuda::relu_squared_backward(on, din_.data(), dout_.data(), in_.data(), n_,
                                                         block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { din_.clear(); }

    // Twice a number is exact. One product in fp32, rounded once more: every device gives the same bits.
    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < n_; ++i) {
            const float twice = 2 * std::fmax(to_float(in_[i]), 0.0f);
            comparison.see_equal("din", i, to_float(din_[i]),
                                 to_float(from_float<X>(twice * to_float(dout_[i]))));
        }
    }

    double bytes() const override { return 3.0 * static_cast<double>(din_.bytes()); }

  private:
    std::int64_t n_;
    Array<X> in_, dout_, din_;
};

const Registration registration({
    .name = "relu_squared_backward",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 256}},
                 {2, "16 bytes an access", {32, 256}},
                 {3, "a persistent grid, four loads in flight", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}},
    .timed = {{8192 * 8192}},
    .takes = {},
    .make = make_problem<ReluSquaredBackward>,
    .checked_for_races = {{531}},
});

}  // namespace lab::relu_squared_backward_variants
