// The squared ReLU, in three variants: out = max(x, 0)^2 for n elements (llmc/device/ops.h).
//
// An element moves 8 bytes in fp32 and 4 in bf16, for a comparison and a product. Memory is the limit.
//   1  A thread does an element.
//   2  16-byte accesses: a quarter (bf16: an eighth) of the instructions, and as many times more bytes in
//      flight per thread.
//   3  A persistent grid, with four loads per thread in flight (llmc/device/cuda/relu_squared.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/relu_squared.cuh"

namespace lab::relu_squared_forward_variants {

using namespace llmc::cuda;

__device__ __forceinline__ float relu_squared(float x) { return positive_part(x) * positive_part(x); }

template <class X>
__global__ void relu_squared_forward_kernel1(X* out, const X* in, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements) out[i] = from_float<X>(relu_squared(to_float(in[i])));
}

template <class X>
__global__ void relu_squared_forward_kernel2(X* out, const X* in, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t first = pack * grid_thread();
    if (first + pack <= elements) {
        Packed<X> x = load_streaming(in + first);
        for (int e = 0; e < pack; ++e) x[e] = from_float<X>(relu_squared(to_float(x[e])));
        store(out + first, x);
    } else {
        for (std::int64_t i = first; i < elements; ++i) out[i] = from_float<X>(relu_squared(to_float(in[i])));
    }
}

template <class X>
class ReluSquaredForward : public Problem {
  public:
    ReluSquaredForward(const Shape& shape, Draw& draw) : n_(shape[0]), in_(n_), out_(n_) {
        draw.normal(in_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        switch (variant) {
            case 1:
                return launch(on, relu_squared_forward_kernel1<X>, blocks(n_), block_size, 0, out_.data(),
                              in_.data(), n_);
            case 2:
                return launch(on, relu_squared_forward_kernel2<X>,
                              blocks(blocks_for<std::int64_t>(n_, Packed<X>::size)), block_size, 0,
                              out_.data(), in_.data(), n_);
            case 3:
                return llmc::cuda::relu_squared_forward(on, out_.data(), in_.data(), n_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }

    // One product in fp32, rounded once more: every device gives the same bits.
    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < n_; ++i) {
            const float r = std::fmax(to_float(in_[i]), 0.0f);
            comparison.see_equal("out", i, to_float(out_[i]), to_float(from_float<X>(r * r)));
        }
    }

    double bytes() const override { return 2.0 * static_cast<double>(out_.bytes()); }

  private:
    std::int64_t n_;
    Array<X> in_, out_;
};

const Registration registration({
    .name = "relu_squared_forward",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 256}},
                 {2, "16 bytes an access", {32, 256}},
                 {3, "a persistent grid, four loads in flight", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}},
    .timed = {{8192 * 8192}},
    .takes = {},
    .make = make_problem<ReluSquaredForward>,
    .checked_for_races = {{531}},
});

}  // namespace lab::relu_squared_forward_variants
