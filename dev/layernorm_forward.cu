// Layernorm forward, in five variants. Each of N rows of C channels is normalized to mean 0 and deviation 1,
// scaled by gamma and shifted by beta; the mean and the reciprocal deviation are stored (llmc/device/ops.h).
//
// There is little to compute, so memory is the limit: 2 N C elements to move (read x, write out). A kernel
// that moves them once at full bandwidth is optimal. The variants approach that:
//   1  A thread does a row. Neighboring threads read C elements apart: every load of a warp touches 32 lines.
//   2  A block does a row, its threads side by side: coalesced loads, and sums through shared memory.
//   3  A warp does a row: sums by shuffles, no barriers, more rows in flight.
//   4  16-byte loads. The row is still read three times, twice of them from cache.
//   5  The row is read once, four loads per lane at a time, and kept in shared memory
//      (llmc/device/cuda/norm_forward.cuh).
#include "llmc/device/cuda/norm_forward.cuh"

#include "dev/lab/lab.h"

namespace lab::layernorm_forward_variants {

using namespace llmc::cuda;

template <class X>
__global__ void layernorm_forward_kernel1(X* out, float* mean, float* rstd, const X* in, const X* gamma,
                                          const X* beta, std::int64_t rows, int channels) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const X* x = in + row * channels;
    float sum = 0;
    for (int c = 0; c < channels; ++c) sum += to_float(x[c]);
    const float m = sum / static_cast<float>(channels);
    float squares = 0;
    for (int c = 0; c < channels; ++c) squares += (to_float(x[c]) - m) * (to_float(x[c]) - m);
    const float r = rsqrtf(squares / static_cast<float>(channels) + layernorm_epsilon);
    for (int c = 0; c < channels; ++c) {
        const float normalized = (to_float(x[c]) - m) * r;
        out[row * channels + c] = from_float<X>(normalized * to_float(gamma[c]) + to_float(beta[c]));
    }
    mean[row] = m;
    rstd[row] = r;
}

// Normalizes a row with the threads `first`, `first` + `step`, ... of a group. `reduce` adds up their sums.
template <class X, class Reduce>
__device__ __forceinline__ void normalize_row(X* out, float* mean, float* rstd, const X* x, const X* gamma,
                                              const X* beta, int channels, int first, int step,
                                              Reduce reduce) {
    float sum = 0;
    for (int c = first; c < channels; c += step) sum += to_float(x[c]);
    const float m = reduce(sum) / static_cast<float>(channels);
    float squares = 0;
    for (int c = first; c < channels; c += step) squares += (to_float(x[c]) - m) * (to_float(x[c]) - m);
    const float r = rsqrtf(reduce(squares) / static_cast<float>(channels) + layernorm_epsilon);
    for (int c = first; c < channels; c += step) {
        const float normalized = (to_float(x[c]) - m) * r;
        out[c] = from_float<X>(normalized * to_float(gamma[c]) + to_float(beta[c]));
    }
    if (first == 0) {
        *mean = m;
        *rstd = r;
    }
}

template <class X>
__global__ void layernorm_forward_kernel2(X* out, float* mean, float* rstd, const X* in, const X* gamma,
                                          const X* beta, int channels) {
    const std::int64_t row = blockIdx.x;
    normalize_row(out + row * channels, mean + row, rstd + row, in + row * channels, gamma, beta, channels,
                  static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                  [](float x LLMC_SITE) { return block_sum(x LLMC_PASS_SITE); });
}

template <class X>
__global__ void layernorm_forward_kernel3(X* out, float* mean, float* rstd, const X* in, const X* gamma,
                                          const X* beta, std::int64_t rows, int channels) {
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    normalize_row(out + row * channels, mean + row, rstd + row, in + row * channels, gamma, beta, channels,
                  static_cast<int>(threadIdx.x) % warp_threads, warp_threads,
                  [](float x LLMC_SITE) { return warp_sum(x LLMC_PASS_SITE); });
}

template <class X>
__global__ void layernorm_forward_kernel4(X* out, float* mean, float* rstd, const X* in, const X* gamma,
                                          const X* beta, std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int first = static_cast<int>(threadIdx.x) % warp_threads * pack;
    const X* x = in + row * channels;
    float sum = 0;
    for (int c = first; c < channels; c += warp_threads * pack) {
        const Packed<X> v = load(x + c);
        for (int i = 0; i < pack; ++i) sum += to_float(v[i]);
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
class LayerNormForward : public Problem {
  public:
    LayerNormForward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          channels_(static_cast<int>(shape[1])),
          in_(rows_ * channels_),
          gamma_(channels_),
          beta_(channels_),
          out_(rows_ * channels_),
          mean_(rows_),
          rstd_(rows_) {
        draw.normal(in_, 2, 0.5);
        draw.normal(gamma_, 0.5, 1);
        draw.normal(beta_, 0.5);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X* out = out_.data();
        float *mean = mean_.data(), *rstd = rstd_.data();
        const X *in = in_.data(), *gamma = gamma_.data(), *beta = beta_.data();
        const auto blocks = [&](std::int64_t rows_a_block) {
            return static_cast<unsigned>(blocks_for(rows_, rows_a_block));
        };
        const auto launch_rows = [&](auto kernel, unsigned grid) {
            launch(on, kernel, grid, block_size, 0, out, mean, rstd, in, gamma, beta, rows_, channels_);
        };
        switch (variant) {
            case 1:
                return launch_rows(layernorm_forward_kernel1<X>, blocks(block_size));
            case 2:
                return launch(on, layernorm_forward_kernel2<X>, blocks(1), block_size, 0, out, mean, rstd, in,
                              gamma, beta, channels_);
            case 3:
                return launch_rows(layernorm_forward_kernel3<X>, blocks(block_size / warp_threads));
            case 4:
                return launch_rows(layernorm_forward_kernel4<X>, blocks(block_size / warp_threads));
            case 5:
                return llmc::cuda::norm_forward<true, X>(on, nullptr, out, mean, rstd, in, nullptr, gamma,
                                                         beta, llmc::cuda::layernorm_epsilon, rows_,
                                                         channels_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        out_.clear();
        mean_.clear();
        rstd_.clear();
    }

    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        const auto n = static_cast<double>(channels_);
        for (std::int64_t row = 0; row < mean_.size(); ++row) {
            const X* x = in_.data() + row * channels_;
            double sum = 0, magnitude = 0, squares = 0;
            for (std::int64_t c = 0; c < channels_; ++c) {
                sum += to_float(x[c]);
                magnitude += std::fabs(to_float(x[c]));
            }
            const double mean = sum / n;
            for (std::int64_t c = 0; c < channels_; ++c) squares += std::pow(to_float(x[c]) - mean, 2);
            const double rstd = 1 / std::sqrt(squares / n + layernorm_epsilon);
            // The sum has n roundings, and the division one. An error e of the mean changes the sum of squares
            // only by n e^2. The sum's own n + 2 roundings are halved by the root, and rsqrtf has 2 ulp.
            const double mean_error = (n + 1) * u * magnitude / n;
            const double rstd_error = rstd * ((n + 2) / 2 * u + 4 * u + std::pow(mean_error * rstd, 2));
            comparison.see("mean", row, mean_[row], mean, mean_error);
            comparison.see("rstd", row, rstd_[row], rstd, rstd_error);
            for (std::int64_t c = 0; c < channels_; ++c) {
                const double g = to_float(gamma_[c]), b = to_float(beta_[c]);
                const double normalized = (to_float(x[c]) - mean) * rstd;
                const double error =
                    std::fabs(g) * (mean_error * rstd + std::fabs(normalized) * (rstd_error / rstd + 3 * u)) +
                    u * std::fabs(normalized * g + b);
                comparison.see("out", row * channels_ + c, to_float(out_[row * channels_ + c]),
                               normalized * g + b, rounded<X>(normalized * g + b, error));
            }
        }
    }

    double bytes() const override { return 2.0 * static_cast<double>(in_.bytes()); }

  private:
    std::int64_t rows_;
    int channels_;
    Array<X> in_, gamma_, beta_, out_;
    Array<float> mean_, rstd_;
};

const Registration registration({
    .name = "layernorm_forward",
    .sizes = {"rows", "channels"},
    .variants = {{1, "a thread does a row", {32, 128, 256}},
                 {2, "a block does a row", {32, 128, 512}},
                 {3, "a warp does a row", {32, 128, 512}},
                 {4, "16-byte loads", {32, 128, 512}},
                 {5, "the row read once, kept in shared memory", {32, 128, 256}}},
    .checked = {{3, 8}, {5, 264}, {33, 384}, {1, 768}},
    .timed = {{8192, 768}, {8192, 1600}},
    .takes = {},
    .make = make_problem<LayerNormForward>,
    .checked_for_races = {{34, 8}},
});

}  // namespace lab::layernorm_forward_variants
