// The residual sum and the RMS norm after it, in five variants: residual = in1 + in2, rounded, then RMS norm
// forward of that (llmc/device/ops.h, fused_residual_rmsnorm_forward), for N rows of C channels.
//
// Memory is the limit: 4 N C elements to move (in1 and in2 read, residual and out written). The sum is one
// addition per element. A kernel of its own for it costs the additional memory traffic:
//   1  Two kernels: a thread adds an element, then a warp normalizes a row. The residual is written and read
//      again: 5 N C elements, at best four fifths of the roofline.
//   2  The same two kernels with 16-byte accesses and the fastest RMS norm. This nearly reaches that bound,
//      and cannot exceed it.
//   3  One kernel: a warp adds a row and normalizes it. It reads the row back once, from the cache.
//   4  16-byte accesses.
//   5  Shared memory holds the sum until its mean square is known. A lane loads two pieces of both inputs
//      before it stores the first, since a load cannot be moved before a store that it may depend on.
//      (The kernel and its number are in llmc/device/cuda/rmsnorm_forward.cuh.)
#include "dev/lab/lab.h"
#include "dev/rmsnorm_reference.h"
#include "llmc/device/cuda/rmsnorm_forward.cuh"

namespace lab::fused_residual_rmsnorm_variants {

using namespace llmc::cuda;

template <class X>
__global__ void residual_sum_kernel1(X* residual, const X* in1, const X* in2, std::int64_t n) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) residual[i] = from_float<X>(to_float(in1[i]) + to_float(in2[i]));
}

template <class X>
__global__ void residual_sum_kernel2(X* residual, const X* in1, const X* in2, std::int64_t n) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t i = (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * pack;
    if (i >= n) return;
    Packed<X> a = load_streaming(in1 + i);
    const Packed<X> b = load_streaming(in2 + i);
    for (int k = 0; k < pack; ++k) a[k] = from_float<X>(to_float(a[k]) + to_float(b[k]));
    store(residual + i, a);
}

// A warp does a row. With `add` it first adds the inputs; otherwise the sum is already there.
template <class X, bool add>
__device__ __forceinline__ void normalize_row(X* residual, X* out, float* rstd, const X* in1, const X* in2,
                                              const X* weight, std::int64_t rows, int channels) {
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    X* x = residual + row * channels;
    float squares = 0;
    for (int c = lane; c < channels; c += warp_threads) {
        if constexpr (add) {
            x[c] = from_float<X>(to_float(in1[row * channels + c]) + to_float(in2[row * channels + c]));
        }
        squares += to_float(x[c]) * to_float(x[c]);
    }
    const float r = rsqrtf(warp_sum(squares) / static_cast<float>(channels) + rmsnorm_epsilon);
    for (int c = lane; c < channels; c += warp_threads) {
        out[row * channels + c] = from_float<X>(to_float(x[c]) * r * to_float(weight[c]));
    }
    if (lane == 0) rstd[row] = r;
}

template <class X>
__global__ void rmsnorm_of_residual_kernel1(X* residual, X* out, float* rstd, const X* in1, const X* in2,
                                            const X* weight, std::int64_t rows, int channels) {
    normalize_row<X, false>(residual, out, rstd, in1, in2, weight, rows, channels);
}

template <class X>
__global__ void fused_residual_rmsnorm_kernel3(X* residual, X* out, float* rstd, const X* in1, const X* in2,
                                               const X* weight, std::int64_t rows, int channels) {
    normalize_row<X, true>(residual, out, rstd, in1, in2, weight, rows, channels);
}

template <class X>
__global__ void fused_residual_rmsnorm_kernel4(X* residual, X* out, float* rstd, const X* in1, const X* in2,
                                               const X* weight, std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int first = static_cast<int>(threadIdx.x) % warp_threads * pack;
    X* x = residual + row * channels;
    float squares = 0;
    for (int c = first; c < channels; c += warp_threads * pack) {
        Packed<X> v = load(in1 + row * channels + c);
        const Packed<X> w = load(in2 + row * channels + c);
        for (int i = 0; i < pack; ++i) {
            v[i] = from_float<X>(to_float(v[i]) + to_float(w[i]));
            squares += to_float(v[i]) * to_float(v[i]);
        }
        store(x + c, v);
    }
    const float r = rsqrtf(warp_sum(squares) / static_cast<float>(channels) + rmsnorm_epsilon);
    for (int c = first; c < channels; c += warp_threads * pack) {
        Packed<X> v = load(x + c);
        const Packed<X> w = load(weight + c);
        for (int i = 0; i < pack; ++i) v[i] = from_float<X>(to_float(v[i]) * r * to_float(w[i]));
        store(out + row * channels + c, v);
    }
    if (first == 0) rstd[row] = r;
}

template <class X>
class FusedResidualRmsNorm : public Problem {
  public:
    FusedResidualRmsNorm(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          channels_(static_cast<int>(shape[1])),
          in1_(rows_ * channels_),
          in2_(rows_ * channels_),
          weight_(channels_),
          residual_(rows_ * channels_),
          out_(rows_ * channels_),
          rstd_(rows_) {
        draw.normal(in1_, 1, 0.5);
        draw.normal(in2_, 0.5);
        draw.normal(weight_, 0.5, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X *residual = residual_.data(), *out = out_.data();
        float* rstd = rstd_.data();
        const X *in1 = in1_.data(), *in2 = in2_.data(), *weight = weight_.data();
        const std::int64_t n = rows_ * channels_;
        const auto blocks = [](std::int64_t of, int size) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(of, size));
        };
        const auto launch_rows = [&](auto kernel) {
            launch(on, kernel, blocks(rows_, block_size / warp_threads), block_size, 0, residual, out, rstd,
                   in1, in2, weight, rows_, channels_);
        };
        switch (variant) {
            case 1:
                launch(on, residual_sum_kernel1<X>, blocks(n, block_size), block_size, 0, residual, in1, in2,
                       n);
                return launch_rows(rmsnorm_of_residual_kernel1<X>);
            case 2:
                launch(on, residual_sum_kernel2<X>, blocks(n, block_size * Packed<X>::size), block_size, 0,
                       residual, in1, in2, n);
                return rmsnorm_forward(on, out, rstd, static_cast<const X*>(residual), weight,
                                       rmsnorm_epsilon, rows_, channels_, block_size);
            case 3:
                return launch_rows(fused_residual_rmsnorm_kernel3<X>);
            case 4:
                return launch_rows(fused_residual_rmsnorm_kernel4<X>);
            case 5:
                return fused_residual_rmsnorm_forward(on, residual, out, rstd, in1, in2, weight,
                                                      rmsnorm_epsilon, rows_, channels_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        residual_.clear();
        out_.clear();
        rstd_.clear();
    }

    void compare(Comparison& comparison) override {
        // One addition in fp32, rounded once more: every device gives the same bits.
        for (std::int64_t i = 0; i < residual_.size(); ++i) {
            comparison.see_equal("residual", i, to_float(residual_[i]),
                                 to_float(from_float<X>(to_float(in1_[i]) + to_float(in2_[i]))));
        }
        compare_rmsnorm(comparison, out_, rstd_, residual_, weight_);
    }

    double bytes() const override { return 4.0 * static_cast<double>(in1_.bytes()); }

  private:
    std::int64_t rows_;
    int channels_;
    Array<X> in1_, in2_, weight_, residual_, out_;
    Array<float> rstd_;
};

const Registration registration({
    .name = "fused_residual_rmsnorm_forward",
    .sizes = {"rows", "channels"},
    .variants = {{1, "two kernels", {32, 128, 512}},
                 {2, "two kernels, 16-byte accesses", {32, 128, 256}},
                 {3, "one kernel, a warp does a row", {32, 128, 512}},
                 {4, "one kernel, 16-byte accesses", {32, 128, 512}},
                 {5, "the sum kept in shared memory", {32, 128, 256}}},
    .checked = {{3, 8}, {5, 264}, {33, 384}, {2, 2048}},
    .timed = {{8192, 2048}, {8192, 4096}},
    .takes = {},
    .make = make_problem<FusedResidualRmsNorm>,
    .checked_for_races = {{3, 96}},
});

}  // namespace lab::fused_residual_rmsnorm_variants
