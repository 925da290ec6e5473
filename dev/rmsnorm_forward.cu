// RMS norm forward, in five variants. Each of N rows of C channels is divided by the root of its mean square
// and scaled by the weight; the reciprocal of the root is stored (llmc/device/ops.h).
//
// There is little to compute, so memory is the limit: 2 N C elements to move (read x, write out). A kernel
// that moves them once at full bandwidth is optimal. There is one sum per row, and no barrier if a warp does
// a row. The variants approach that:
//   1  A thread does a row. Neighboring threads read C elements apart: every load of a warp touches 32 lines.
//   2  A block does a row, its threads side by side: coalesced loads, and a sum through shared memory.
//   3  A warp does a row: a sum by shuffles, no barriers, more rows in flight.
//   4  16-byte loads. The row is still read twice, the second time from cache.
//   5  The row is read once, four loads per lane at a time, and kept in shared memory
//      (llmc/device/cuda/rmsnorm_forward.cuh).
#include "llmc/device/cuda/rmsnorm_forward.cuh"

#include "dev/lab/lab.h"
#include "dev/rmsnorm_reference.h"

namespace lab::rmsnorm_forward_variants {

using namespace llmc::cuda;

template <class X>
__global__ void rmsnorm_forward_kernel1(X* out, float* rstd, const X* in, const X* weight, std::int64_t rows,
                                        int channels) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const X* x = in + row * channels;
    float squares = 0;
    for (int c = 0; c < channels; ++c) squares += to_float(x[c]) * to_float(x[c]);
    const float r = rsqrtf(squares / static_cast<float>(channels) + rmsnorm_epsilon);
    for (int c = 0; c < channels; ++c) {
        out[row * channels + c] = from_float<X>(to_float(x[c]) * r * to_float(weight[c]));
    }
    rstd[row] = r;
}

// Normalizes a row with the threads `first`, `first` + `step`, ... of a group. `reduce` adds up their sums.
template <class X, class Reduce>
__device__ __forceinline__ void normalize_row(X* out, float* rstd, const X* x, const X* weight, int channels,
                                              int first, int step, Reduce reduce) {
    float squares = 0;
    for (int c = first; c < channels; c += step) squares += to_float(x[c]) * to_float(x[c]);
    const float r = rsqrtf(reduce(squares) / static_cast<float>(channels) + rmsnorm_epsilon);
    for (int c = first; c < channels; c += step) {
        out[c] = from_float<X>(to_float(x[c]) * r * to_float(weight[c]));
    }
    if (first == 0) *rstd = r;
}

template <class X>
__global__ void rmsnorm_forward_kernel2(X* out, float* rstd, const X* in, const X* weight, int channels) {
    const std::int64_t row = blockIdx.x;
    normalize_row(out + row * channels, rstd + row, in + row * channels, weight, channels,
                  static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x),
                  [](float x LLMC_SITE) { return block_sum(x LLMC_PASS_SITE); });
}

template <class X>
__global__ void rmsnorm_forward_kernel3(X* out, float* rstd, const X* in, const X* weight, std::int64_t rows,
                                        int channels) {
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    normalize_row(out + row * channels, rstd + row, in + row * channels, weight, channels,
                  static_cast<int>(threadIdx.x) % warp_threads, warp_threads,
                  [](float x LLMC_SITE) { return warp_sum(x LLMC_PASS_SITE); });
}

template <class X>
__global__ void rmsnorm_forward_kernel4(X* out, float* rstd, const X* in, const X* weight, std::int64_t rows,
                                        int channels) {
    constexpr int pack = Packed<X>::size;
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int first = static_cast<int>(threadIdx.x) % warp_threads * pack;
    const X* x = in + row * channels;
    float squares = 0;
    for (int c = first; c < channels; c += warp_threads * pack) {
        const Packed<X> v = load(x + c);
        for (int i = 0; i < pack; ++i) squares += to_float(v[i]) * to_float(v[i]);
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
class RmsNormForward : public Problem {
  public:
    RmsNormForward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          channels_(static_cast<int>(shape[1])),
          in_(rows_ * channels_),
          weight_(channels_),
          out_(rows_ * channels_),
          rstd_(rows_) {
        draw.normal(in_, 2, 0.5);
        draw.normal(weight_, 0.5, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X* out = out_.data();
        float* rstd = rstd_.data();
        const X *in = in_.data(), *weight = weight_.data();
        const auto blocks = [&](std::int64_t rows_a_block) {
            return static_cast<unsigned>(blocks_for(rows_, rows_a_block));
        };
        const auto launch_rows = [&](auto kernel, unsigned grid) {
            launch(on, kernel, grid, block_size, 0, out, rstd, in, weight, rows_, channels_);
        };
        switch (variant) {
            case 1:
                return launch_rows(rmsnorm_forward_kernel1<X>, blocks(block_size));
            case 2:
                return launch(on, rmsnorm_forward_kernel2<X>, blocks(1), block_size, 0, out, rstd, in, weight,
                              channels_);
            case 3:
                return launch_rows(rmsnorm_forward_kernel3<X>, blocks(block_size / warp_threads));
            case 4:
                return launch_rows(rmsnorm_forward_kernel4<X>, blocks(block_size / warp_threads));
            case 5:
                return llmc::cuda::rmsnorm_forward(on, out, rstd, in, weight, rmsnorm_epsilon, rows_,
                                                   channels_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        out_.clear();
        rstd_.clear();
    }

    void compare(Comparison& comparison) override { compare_rmsnorm(comparison, out_, rstd_, in_, weight_); }

    double bytes() const override { return 2.0 * static_cast<double>(in_.bytes()); }

  private:
    std::int64_t rows_;
    int channels_;
    Array<X> in_, weight_, out_;
    Array<float> rstd_;
};

const Registration registration({
    .name = "rmsnorm_forward",
    .sizes = {"rows", "channels"},
    .variants = {{1, "a thread does a row", {32, 128, 256}},
                 {2, "a block does a row", {32, 128, 512}},
                 {3, "a warp does a row", {32, 128, 512}},
                 {4, "16-byte loads", {32, 128, 512}},
                 {5, "the row read once, kept in shared memory", {32, 128, 256}}},
    .checked = {{3, 8}, {5, 264}, {33, 384}, {1, 2048}},
    .timed = {{8192, 2048}, {8192, 4096}},
    .takes = {},
    .make = make_problem<RmsNormForward>,
    .checked_for_races = {{34, 8}},
});

}  // namespace lab::rmsnorm_forward_variants
