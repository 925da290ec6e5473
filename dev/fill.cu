// Fills memory with a number, in two variants. There are only writes, so the time is the bytes over the write
// bandwidth.
//   1  A thread does an element: a warp writes 64 or 128 bytes at a time, and computes 32 addresses for them.
//   2  16-byte stores, in a persistent grid (llmc/device/cuda/elementwise.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/elementwise.cuh"

namespace lab::fill_variants {

using namespace llmc::cuda;

template <class X>
__global__ void fill_kernel1(X* out, X value, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements) out[i] = value;
}

template <class X>
class Fill : public Problem {
  public:
    Fill(const Shape& shape, Draw&) : n_(shape[0]), out_(n_) {}

    void run(int variant, int block_size, const LaunchContext& on) override {
        const X value = from_float<X>(2.5f);
        switch (variant) {
            case 1:
                return launch(on, fill_kernel1<X>,
                              static_cast<unsigned>(blocks_for<std::int64_t>(n_, block_size)), block_size, 0,
                              out_.data(), value, n_);
            case 2:
                return llmc::cuda::fill(on, out_.data(), value, n_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }
    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < n_; ++i) comparison.see_equal("out", i, to_float(out_[i]), 2.5);
    }
    double bytes() const override { return static_cast<double>(out_.bytes()); }

  private:
    std::int64_t n_;
    Array<X> out_;
};

const Registration registration({
    .name = "fill",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 256}}, {2, "16 bytes a store", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}},
    .timed = {{1 << 26}},
    .takes = {},
    .make = make_problem<Fill>,
    .checked_for_races = {{531}},
});

}  // namespace lab::fill_variants

// Instantiates the other types that llmc fills, for the compiler's report.
template __global__ void llmc::cuda::fill_kernel2<double>(double*, double, std::int64_t, std::int64_t);
template __global__ void llmc::cuda::fill_kernel2<std::int32_t>(std::int32_t*, std::int32_t, std::int64_t,
                                                                std::int64_t);
