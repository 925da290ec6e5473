// The residual sum and the layernorm after it, in five variants: residual = in1 + in2, rounded, then
// layernorm forward of that (llmc/device/ops.h, fused_residual_layernorm_forward), for N rows of C channels.
//
// Memory is the limit: 4 N C elements to move (in1 and in2 read, residual and out written). The sum is one
// addition per element. A kernel of its own for it costs the additional memory traffic:
//   1  Two kernels: a thread adds an element, then a warp normalizes a row. The residual is written and read
//      again: 5 N C elements, at best four fifths of the roofline.
//   2  The same two kernels with 16-byte accesses and the fastest layernorm. This nearly reaches that bound,
//      and cannot exceed it.
//   3  One kernel: a warp adds a row and normalizes it. It reads the row back twice, from the cache.
//   4  16-byte accesses.
//   5  Shared memory holds the sum until its mean and deviation are known. A lane loads two pieces of both
//      inputs before it stores the first, since a load cannot be moved before a store that it may depend on.
//      (The kernel and its number are in llmc/device/cuda/layernorm_forward.cuh.)
#include "dev/lab/lab.h"
#include "dev/layernorm_reference.h"
#include "llmc/device/cuda/layernorm_forward.cuh"

namespace lab::fused_residual_forward_variants {

using namespace llmc::cuda;

template <class X>
__global__ void residual_forward_kernel1(X* residual, const X* in1, const X* in2, std::int64_t n) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) residual[i] = from_float<X>(to_float(in1[i]) + to_float(in2[i]));
}

template <class X>
__global__ void residual_forward_kernel2(X* residual, const X* in1, const X* in2, std::int64_t n) {
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
__device__ __forceinline__ void normalize_row(X* residual, X* out, float* mean, float* rstd, const X* in1,
                                              const X* in2, const X* gamma, const X* beta, std::int64_t rows,
                                              int channels) {
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    X* x = residual + row * channels;
    float sum = 0;
    for (int c = lane; c < channels; c += warp_threads) {
        if constexpr (add) {
            x[c] = from_float<X>(to_float(in1[row * channels + c]) + to_float(in2[row * channels + c]));
        }
        sum += to_float(x[c]);
    }
    const float m = warp_sum(sum) / static_cast<float>(channels);
    float squares = 0;
    for (int c = lane; c < channels; c += warp_threads)
        squares += (to_float(x[c]) - m) * (to_float(x[c]) - m);
    const float r = rsqrtf(warp_sum(squares) / static_cast<float>(channels) + layernorm_epsilon);
    for (int c = lane; c < channels; c += warp_threads) {
        const float normalized = (to_float(x[c]) - m) * r;
        out[row * channels + c] = from_float<X>(normalized * to_float(gamma[c]) + to_float(beta[c]));
    }
    if (lane == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

template <class X>
__global__ void layernorm_of_residual_kernel1(X* residual, X* out, float* mean, float* rstd, const X* in1,
                                              const X* in2, const X* gamma, const X* beta, std::int64_t rows,
                                              int channels) {
    normalize_row<X, false>(residual, out, mean, rstd, in1, in2, gamma, beta, rows, channels);
}

template <class X>
__global__ void fused_residual_forward_kernel3(X* residual, X* out, float* mean, float* rstd, const X* in1,
                                               const X* in2, const X* gamma, const X* beta, std::int64_t rows,
                                               int channels) {
    normalize_row<X, true>(residual, out, mean, rstd, in1, in2, gamma, beta, rows, channels);
}

template <class X>
__global__ void fused_residual_forward_kernel4(X* residual, X* out, float* mean, float* rstd, const X* in1,
                                               const X* in2, const X* gamma, const X* beta, std::int64_t rows,
                                               int channels) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int first = static_cast<int>(threadIdx.x) % warp_threads * pack;
    X* x = residual + row * channels;
    float sum = 0;
    for (int c = first; c < channels; c += warp_threads * pack) {
        Packed<X> v = load(in1 + row * channels + c);
        const Packed<X> w = load(in2 + row * channels + c);
        for (int i = 0; i < pack; ++i) {
            v[i] = from_float<X>(to_float(v[i]) + to_float(w[i]));
            sum += to_float(v[i]);
        }
        store(x + c, v);
    }
    const float m = warp_sum(sum) / static_cast<float>(channels);
    float squares = 0;
    for (int c = first; c < channels; c += warp_threads * pack) {
        const Packed<X> v = load(x + c);
        for (int i = 0; i < pack; ++i) squares += (to_float(v[i]) - m) * (to_float(v[i]) - m);
    }
    const float r = rsqrtf(warp_sum(squares) / static_cast<float>(channels) + layernorm_epsilon);
    for (int c = first; c < channels; c += warp_threads * pack) {
        Packed<X> v = load(x + c);
        const Packed<X> g = load(gamma + c), b = load(beta + c);
        for (int i = 0; i < pack; ++i) {
            v[i] = from_float<X>((to_float(v[i]) - m) * r * to_float(g[i]) + to_float(b[i]));
        }
        store(out + row * channels + c, v);
    }
    if (first == 0) {
        mean[row] = m;
        rstd[row] = r;
    }
}

template <class X>
class FusedResidualForward : public Problem {
  public:
    FusedResidualForward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          channels_(static_cast<int>(shape[1])),
          in1_(rows_ * channels_),
          in2_(rows_ * channels_),
          gamma_(channels_),
          beta_(channels_),
          residual_(rows_ * channels_),
          out_(rows_ * channels_),
          mean_(rows_),
          rstd_(rows_) {
        draw.normal(in1_, 1, 0.5);
        draw.normal(in2_, 0.5);
        draw.normal(gamma_, 0.5, 1);
        draw.normal(beta_, 0.5);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X *residual = residual_.data(), *out = out_.data();
        float *mean = mean_.data(), *rstd = rstd_.data();
        const X *in1 = in1_.data(), *in2 = in2_.data(), *gamma = gamma_.data(), *beta = beta_.data();
        const std::int64_t n = rows_ * channels_;
        const auto blocks = [](std::int64_t of, int size) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(of, size));
        };
        const auto launch_rows = [&](auto kernel) {
            launch(on, kernel, blocks(rows_, block_size / warp_threads), block_size, 0, residual, out, mean,
                   rstd, in1, in2, gamma, beta, rows_, channels_);
        };
        switch (variant) {
            case 1:
                launch(on, residual_forward_kernel1<X>, blocks(n, block_size), block_size, 0, residual, in1,
                       in2, n);
                return launch_rows(layernorm_of_residual_kernel1<X>);
            case 2:
                launch(on, residual_forward_kernel2<X>, blocks(n, block_size * Packed<X>::size), block_size,
                       0, residual, in1, in2, n);
                return layernorm_forward(on, out, mean, rstd, static_cast<const X*>(residual), gamma, beta,
                                         rows_, channels_, block_size);
            case 3:
                return launch_rows(fused_residual_forward_kernel3<X>);
            case 4:
                return launch_rows(fused_residual_forward_kernel4<X>);
            case 5:
                return fused_residual_layernorm_forward(on, residual, out, mean, rstd, in1, in2, gamma, beta,
                                                        rows_, channels_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        residual_.clear();
        out_.clear();
        mean_.clear();
        rstd_.clear();
    }

    void compare(Comparison& comparison) override {
        // One addition in fp32, rounded once more: every device gives the same bits.
        for (std::int64_t i = 0; i < residual_.size(); ++i) {
            comparison.see_equal("residual", i, to_float(residual_[i]),
                                 to_float(from_float<X>(to_float(in1_[i]) + to_float(in2_[i]))));
        }
        compare_layernorm(comparison, out_, mean_, rstd_, residual_, gamma_, beta_);
    }

    double bytes() const override { return 4.0 * static_cast<double>(in1_.bytes()); }

  private:
    std::int64_t rows_;
    int channels_;
    Array<X> in1_, in2_, gamma_, beta_, residual_, out_;
    Array<float> mean_, rstd_;
};

const Registration registration({
    .name = "fused_residual_forward",
    .sizes = {"rows", "channels"},
    .variants = {{1, "two kernels", {32, 128, 512}},
                 {2, "two kernels, 16-byte accesses", {32, 128, 256}},
                 {3, "one kernel, a warp does a row", {32, 128, 512}},
                 {4, "one kernel, 16-byte accesses", {32, 128, 512}},
                 {5, "the sum kept in shared memory", {32, 128, 256}}},
    .checked = {{3, 8}, {5, 264}, {33, 384}, {2, 1600}},
    .timed = {{8192, 768}, {8192, 1600}},
    .takes = {},
    .make = make_problem<FusedResidualForward>,
    .checked_for_races = {{3, 96}},
});

}  // namespace lab::fused_residual_forward_variants
