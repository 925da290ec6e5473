// Adds fp32 numbers to a sum in fp32 or bf16, in three variants. An element moves 12 bytes in fp32 and 8 in
// bf16, for one addition. Memory is the limit.
//   1  A thread does an element.
//   2  Four elements per thread: 16 bytes of fp32 and 8 of bf16. For a warp each is one contiguous piece of
//      memory.
//   3  A persistent grid, with four loads per thread in flight (llmc/device/cuda/elementwise.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/elementwise.cuh"

namespace lab::accumulate_variants {

using namespace llmc::cuda;

template <class X>
__global__ void accumulate_kernel1(X* out, const float* in, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements) out[i] = from_float<X>(to_float(out[i]) + in[i]);
}

template <class X>
__global__ void accumulate_kernel2(X* out, const float* in, std::int64_t elements) {
    const std::int64_t first = 4 * grid_thread();
    if (first + 4 <= elements) {
        const Quad<X> before = load_quad_streaming(out + first);
        const Quad<float> more = load_quad_streaming(in + first);
        Quad<X> sum;
        for (int e = 0; e < 4; ++e) sum[e] = from_float<X>(to_float(before[e]) + more[e]);
        store_quad(out + first, sum);
    } else {
        for (std::int64_t i = first; i < elements; ++i) out[i] = from_float<X>(to_float(out[i]) + in[i]);
    }
}

template <class X>
class Accumulate : public Problem {
  public:
    Accumulate(const Shape& shape, Draw& draw) : n_(shape[0]), before_(n_), out_(n_), in_(n_) {
        draw.normal(before_, 1);
        draw.normal(in_, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        switch (variant) {
            case 1:
                return launch(on, accumulate_kernel1<X>, blocks(n_), block_size, 0, out_.data(), in_.data(),
                              n_);
            case 2:
                return launch(on, accumulate_kernel2<X>, blocks(blocks_for<std::int64_t>(n_, 4)), block_size,
                              0, out_.data(), in_.data(), n_);
            case 3:
                return llmc::cuda::accumulate(on, out_.data(), in_.data(), n_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.copy_from(before_); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < n_; ++i) {
            const double sum = double{to_float(before_[i])} + in_[i];
            const double in_float = std::is_same_v<X, float> ? 0 : unit_roundoff<float> * std::fabs(sum);
            comparison.see("out", i, to_float(out_[i]), sum, rounded<X>(sum, in_float));
        }
    }

    double bytes() const override { return static_cast<double>(2 * out_.bytes() + in_.bytes()); }

  private:
    std::int64_t n_;
    Array<X> before_, out_;
    Array<float> in_;
};

const Registration registration({
    .name = "accumulate",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 256}},
                 {2, "four elements a thread", {32, 256}},
                 {3, "a persistent grid, four loads in flight", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}},
    .timed = {{1 << 26}},
    .dtypes = {llmc::DType::bf16, llmc::DType::fp32},
    .takes = {},
    .make = make_problem<Accumulate, bf16, float>,
    .checked_for_races = {{531}},
});

}  // namespace lab::accumulate_variants
