// The sum of two tensors, in three variants. An element moves 12 bytes in fp32 and 6 in bf16, for one
// addition. Memory is the limit.
//   1  A thread does an element.
//   2  16-byte accesses: a quarter (bf16: an eighth) of the instructions, and as many times more bytes in
//      flight per thread.
//   3  A persistent grid, with four loads per thread in flight (llmc/device/cuda/elementwise.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/elementwise.cuh"

namespace lab::add_variants {

using namespace llmc::cuda;

template <class X>
__global__ void add_kernel1(X* out, const X* a, const X* b, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements) out[i] = from_float<X>(to_float(a[i]) + to_float(b[i]));
}

template <class X>
__global__ void add_kernel2(X* out, const X* a, const X* b, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t first = pack * grid_thread();
    if (first + pack <= elements) {
        const Packed<X> x = load_streaming(a + first), y = load_streaming(b + first);
        Packed<X> sum;
        for (int e = 0; e < pack; ++e) sum[e] = from_float<X>(to_float(x[e]) + to_float(y[e]));
        store(out + first, sum);
    } else {
        for (std::int64_t i = first; i < elements; ++i)
            out[i] = from_float<X>(to_float(a[i]) + to_float(b[i]));
    }
}

template <class X>
class Add : public Problem {
  public:
    Add(const Shape& shape, Draw& draw) : n_(shape[0]), a_(n_), b_(n_), out_(n_) {
        draw.normal(a_, 1);
        draw.normal(b_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        switch (variant) {
            case 1:
                return launch(on, add_kernel1<X>, blocks(n_), block_size, 0, out_.data(), a_.data(),
                              b_.data(), n_);
            case 2:
                return launch(on, add_kernel2<X>, blocks(blocks_for<std::int64_t>(n_, Packed<X>::size)),
                              block_size, 0, out_.data(), a_.data(), b_.data(), n_);
            case 3:
                return llmc::cuda::add(on, out_.data(), a_.data(), b_.data(), n_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < n_; ++i) {
            const double sum = double{to_float(a_[i])} + to_float(b_[i]);
            const double in_float = std::is_same_v<X, float> ? 0 : unit_roundoff<float> * std::fabs(sum);
            comparison.see("out", i, to_float(out_[i]), sum, rounded<X>(sum, in_float));
        }
    }

    double bytes() const override { return 3.0 * static_cast<double>(out_.bytes()); }

  private:
    std::int64_t n_;
    Array<X> a_, b_, out_;
};

const Registration registration({
    .name = "add",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 256}},
                 {2, "16 bytes an access", {32, 256}},
                 {3, "a persistent grid, four loads in flight", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}},
    .timed = {{1 << 26}},
    .takes = {},
    .make = make_problem<Add>,
    .checked_for_races = {{531}},
});

}  // namespace lab::add_variants
