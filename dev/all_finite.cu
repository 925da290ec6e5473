// Is any element NaN or infinite? There are three variants. Every byte is read once, and one number is the
// result.
//   1  A thread tests an element, and reports a finding with an atomic. Accesses are coalesced, but loads are
//      small. A buffer full of NaN causes as many atomics on one address as it has elements.
//   2  16-byte loads. Bits are compared, not numbers: the exponent bits of NaN and infinity are all ones.
//   3  A persistent grid, four loads in flight, and at most one atomic per warp
//      (llmc/device/cuda/elementwise.cuh).
// All atomics set an integer to the same value, so the result does not depend on their order.
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
    // Every second problem, on average, has one element that is not finite, at a random place.
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
    .variants = {{1, "one element a thread", {32, 256}},
                 {2, "16 bytes a load", {32, 256}},
                 {3, "a persistent grid, one atomic per warp", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}, {263}, {40000}},
    .timed = {{1 << 26}},
    .takes = {},
    .make = make_problem<AllFinite>,
    .checked_for_races = {{531}},
});

}  // namespace lab::all_finite_variants
