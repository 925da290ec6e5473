// Is any element NaN or infinite? Three times: every byte is read once, and one number comes out.
//   1  a thread looks at an element, and whoever finds something says so with an atomic: coalesced, but small
//      loads; and a buffer full of NaN is as many atomics on one address as it has elements.
//   2  16 bytes a load; bits are compared, not numbers: NaN and infinity are what has an exponent of ones.
//   3  a grid that stays, four loads under way, and one atomic a warp at most
//      (llmc/device/cuda/elementwise.cuh).
// Atomics on an integer that all set to the same value: the result does not depend on their order.
#include "dev/lab/lab.h"
#include "llmc/device/cuda/elementwise.cuh"

namespace lab::all_finite_variants {

using namespace llmc::cuda;

template <class X>
__global__ void all_finite_kernel1(std::int32_t* flag, const X* x, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements && !std::isfinite(to_float(x[i]))) atomicExch(flag, 0);
}

template <class X>
__global__ void all_finite_kernel2(std::int32_t* flag, const X* x, std::int64_t elements) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t first = pack * grid_thread();
    bool found = false;
    if (first + pack <= elements) {
        const uint4 bits = to_bits(load_streaming(x + first));
        found = has_nonfinite<X>(bits.x) || has_nonfinite<X>(bits.y) || has_nonfinite<X>(bits.z) ||
                has_nonfinite<X>(bits.w);
    } else {
        for (std::int64_t i = first; i < elements; ++i) found |= !std::isfinite(to_float(x[i]));
    }
    if (found) atomicExch(flag, 0);
}

template <class X>
class AllFinite : public Problem {
  public:
    // Every second problem has one element that is not finite, somewhere.
    AllFinite(const Shape& shape, Draw& draw) : n_(shape[0]), x_(n_), flag_(1), finite_(draw.below(2) == 0) {
        draw.normal(x_, 1);
        if (!finite_) x_[draw.below(n_)] = from_float<X>(draw.below(2) == 0 ? INFINITY : NAN);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        if (variant != 3) llmc::cuda::fill(on, flag_.data(), std::int32_t{1}, 1, warp_threads);
        switch (variant) {
            case 1:
                return launch(on, all_finite_kernel1<X>, blocks(n_), block_size, 0, flag_.data(), x_.data(),
                              n_);
            case 2:
                return launch(on, all_finite_kernel2<X>,
                              blocks(blocks_for<std::int64_t>(n_, Packed<X>::size)), block_size, 0,
                              flag_.data(), x_.data(), n_);
            case 3:
                return llmc::cuda::all_finite(on, flag_.data(), x_.data(), n_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { flag_.clear(); }
    void compare(Comparison& comparison) override {
        comparison.see_equal("flag", 0, flag_[0], finite_ ? 1 : 0);
    }
    double bytes() const override { return static_cast<double>(x_.bytes()); }

  private:
    std::int64_t n_;
    Array<X> x_;
    Array<std::int32_t> flag_;
    bool finite_;
};

const Registration registration({
    .name = "all_finite",
    .sizes = {"elements"},
    .variants = {{1, "a thread an element", {32, 256}},
                 {2, "16 bytes a load", {32, 256}},
                 {3, "a grid that stays, an atomic a warp", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}, {263}, {40000}},
    .timed = {{1 << 26}},
    .dtypes = {llmc::DType::bf16, llmc::DType::fp32},
    .takes = {},
    .make = make_problem<AllFinite>,
    .checked_for_races = {{531}},
});

}  // namespace lab::all_finite_variants
