// Casts between fp32 and 16 bits, in three variants: fp32 to bf16 if the dtype is fp32, and from the dtype to fp32
// otherwise.
//
// Nothing is computed. An element moves 6 bytes, so N of them take at least 6 N / bandwidth. The variants:
//   1  A thread does an element. Accesses are coalesced, but a warp's load has 128 (or 64) bytes. A
//      multiprocessor cannot hold enough warps with one small load each to keep HBM busy.
//   2  Four elements per thread: 16 bytes of fp32 and 8 of bf16. For a warp each is one contiguous piece of
//      memory. With 16 bytes of bf16, a thread would read 32 of fp32 in two loads, each of which uses only
//      half of every sector.
//   3  A persistent grid, with four such loads in flight before the first is used
//      (llmc/device/cuda/elementwise.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/elementwise.cuh"

namespace lab::cast_variants {

using namespace llmc::cuda;

template <class To, class From>
__global__ void cast_kernel1(To* out, const From* in, std::int64_t elements) {
    const std::int64_t i = grid_thread();
    if (i < elements) out[i] = from_float<To>(to_float(in[i]));
}

template <class To, class From>
__global__ void cast_kernel2(To* out, const From* in, std::int64_t elements) {
    const std::int64_t first = 4 * grid_thread();
    if (first + 4 <= elements) {
        const Quad<From> x = load_quad_streaming(in + first);
        Quad<To> y;
        for (int e = 0; e < 4; ++e) y[e] = from_float<To>(to_float(x[e]));
        store_quad(out + first, y);
    } else {
        for (std::int64_t i = first; i < elements; ++i) out[i] = from_float<To>(to_float(in[i]));
    }
}

template <class From>
class Cast : public Problem {
    using To = std::conditional_t<std::is_same_v<From, float>, bf16, float>;

  public:
    Cast(const Shape& shape, Draw& draw) : n_(shape[0]), in_(n_), out_(n_) { draw.normal(in_, 1); }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto blocks = [&](std::int64_t threads) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(threads, block_size));
        };
        switch (variant) {
            case 1:
                return launch(on, cast_kernel1<To, From>, blocks(n_), block_size, 0, out_.data(), in_.data(),
                              n_);
            case 2:
                return launch(on, cast_kernel2<To, From>, blocks(blocks_for<std::int64_t>(n_, 4)), block_size,
                              0, out_.data(), in_.data(), n_);
            case 3:
                return llmc::cuda::cast(on, out_.data(), in_.data(), n_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { out_.clear(); }

    void compare(Comparison& comparison) override {
        for (std::int64_t i = 0; i < n_; ++i) {
            const double x = to_float(in_[i]);
            const double bound = std::is_same_v<To, float> ? 0x1p-1000 : rounded<To>(x, 0);
            comparison.see("out", i, to_float(out_[i]), x, bound);
        }
    }

    double bytes() const override { return static_cast<double>(in_.bytes() + out_.bytes()); }

  private:
    std::int64_t n_;
    Array<From> in_;
    Array<To> out_;
};

const Registration registration({
    .name = "cast",
    .sizes = {"elements"},
    .variants = {{1, "one element a thread", {32, 256}},
                 {2, "four elements a thread", {32, 256}},
                 {3, "a persistent grid, four loads in flight", {32, 256, 512}}},
    .checked = {{131}, {1}, {40003}},
    .timed = {{1 << 26}},
    .takes = {},
    .make = make_problem<Cast>,
    .checked_for_races = {{531}},
});

}  // namespace lab::cast_variants

// Another cast of llmc, for the compiler's report.
template __global__ void llmc::cuda::cast_kernel3<lab::fp16, float>(lab::fp16*, const float*, std::int64_t,
                                                                    std::int64_t);
