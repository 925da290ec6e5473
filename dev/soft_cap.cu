// The cap of logits alone, in three variants: out = cap tanh(x/cap) for n elements, in fp32 and rounded once
// (llmc/device/ops.h). out may be in.
//
// There are 2 n elements to move (x read, out written). In bf16 that is 4 bytes per element. In that time an
// A100 can do 28 instructions per element, and an H100 39 (dev/gelu_forward.cu).
//   1  A thread does an element, with tanhf.
//   2  16-byte accesses. Arithmetic is the limit: tanhf computes both of its branches, 16 instructions, and
//      the division takes 8 more.
//   3  tanh by one ex2 and one rcp, with the error of a few ulp of the cap that a softmax has anyway; 8
//      instructions. A persistent grid, with four loads per thread in flight
//      (llmc/device/cuda/soft_cap.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/soft_cap.cuh"

namespace lab::soft_cap_variants {

using namespace llmc::cuda;

template <class X>
__global__ void soft_cap_kernel1(X* out, const X* in, float cap, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements) out[i] = from_float<X>(cap * tanhf(to_float(in[i]) / cap));
}

template <class X>
__global__ void soft_cap_kernel2(X* out, const X* in, float cap, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t first = pack * grid_thread();
    if (first + pack <= elements) {
        Packed<X> x = load_streaming(in + first);
        for (int e = 0; e < pack; ++e) x[e] = from_float<X>(cap * tanhf(to_float(x[e]) / cap));
        store(out + first, x);
    } else {
        for (std::int64_t i = first; i < elements; ++i) {
            out[i] = from_float<X>(cap * tanhf(to_float(in[i]) / cap));
        }
    }
}

template <class X>
class SoftCapProblem : public Problem {
  public:
    SoftCapProblem(const Shape& shape, Draw& draw) : n_(shape[0]), in_(n_), out_(n_) { draw.normal(in_, 20); }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        switch (variant) {
            case 1:
                return launch(on, soft_cap_kernel1<X>, blocks(n_), block_size, 0, out_.data(), in_.data(),
                              cap, n_);
            case 2:
                return launch(on, soft_cap_kernel2<X>, blocks(blocks_for<std::int64_t>(n_, Packed<X>::size)),
                              block_size, 0, out_.data(), in_.data(), cap, n_);
            case 3:
                return soft_cap(on, out_.data(), in_.data(), cap, n_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }

    // With v = |x|/cap and t = e^-2v, tanh v = (1 - t)/(1 + t). The argument has 3 roundings and the
    // exponential 2 ulp: an error of t (2 v 3 + 4) u <= 6 u of t, which moves tanh by at most twice as much.
    // The difference, the sum, the reciprocal of 1 ulp and 2 products add 6 u: 18 u in all. tanhf with 2 ulp,
    // of a rounded quotient, has less.
    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < n_; ++i) {
            const double y = cap * std::tanh(to_float(in_[i]) / double{cap});
            comparison.see("out", i, to_float(out_[i]), y, rounded<X>(y, 18 * unit_roundoff<float> * cap));
        }
    }

    double bytes() const override { return 2.0 * static_cast<double>(out_.bytes()); }

  private:
    static constexpr float cap = 15;
    std::int64_t n_;
    Array<X> in_, out_;
};

const Registration registration({
    .name = "soft_cap",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 256}},
                 {2, "16 bytes an access", {32, 256}},
                 {3, "tanh by an exponential, four loads in flight", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}},
    .timed = {{1024 * 50304}},
    .takes = {},
    .make = make_problem<SoftCapProblem>,
    .checked_for_races = {{531}},
});

}  // namespace lab::soft_cap_variants
