// RMS norm backward, in five variants (llmc/device/ops.h). For N rows of C channels, with h = x rstd and
// g = dout w:
//   din += rstd (g - h 1/C sum(g h)),  dweight += sum_rows dout h
// There is one sum along each row and one down each column. There are no atomics, so every run adds in the
// same order.
//
// Memory is the limit: 4 N C elements (x, dout and din read, din written). A row needs its threads side by
// side, and a column needs all rows in one place. The variants:
//   1  A thread does a row; in a second kernel a thread does a column. The first kernel's loads are C
//      elements apart. The second has C threads, for a GPU that holds 200000.
//   2  A warp does a row. The columns are divided into stretches of rows; a third kernel adds their partial
//      sums. Everything is coalesced and parallel, but x and dout are read twice: 6 N C elements, at best two
//      thirds of the roofline.
//   3  One pass: two blocks per multiprocessor go over the rows, and add each row to dweight in shared
//      memory. At its end a block writes 4 C bytes of partial sums, which are read once. On 132
//      multiprocessors that is 3% of the traffic at N = 8192 in bf16, if L2 does not keep them.
//   4  16-byte loads, so that fewer instructions request the same bytes. There are still two barriers per
//      row.
//   5  A thread always has the same columns, with their sums in registers. It loads two rows at a time.
//      Groups of warps have their own rows, with one barrier for all of them
//      (llmc/device/cuda/rmsnorm_backward.cuh).
#include "llmc/device/cuda/rmsnorm_backward.cuh"

#include <memory>
#include <vector>

#include "dev/lab/lab.h"

namespace lab::rmsnorm_backward_variants {

using namespace llmc::cuda;

// ---- 1: threads on their own ----

template <class X>
__global__ void rmsnorm_backward_rows_kernel1(X* din, const X* dout, const X* in, const X* weight,
                                              const float* rstd, std::int64_t rows, int channels) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const X *x = in + row * channels, *dy = dout + row * channels;
    float sum_gh = 0;
    for (int c = 0; c < channels; ++c) {
        sum_gh += to_float(dy[c]) * to_float(weight[c]) * (to_float(x[c]) * rstd[row]);
    }
    const float mean_gh = sum_gh / static_cast<float>(channels);
    X* dx = din + row * channels;
    for (int c = 0; c < channels; ++c) {
        const float h = to_float(x[c]) * rstd[row];
        const float g = to_float(dy[c]) * to_float(weight[c]);
        dx[c] = from_float<X>(to_float(dx[c]) + rstd[row] * (g - h * mean_gh));
    }
}

template <class X>
__global__ void rmsnorm_backward_columns_kernel1(float* dweight, const X* dout, const X* in,
                                                 const float* rstd, std::int64_t rows, int channels) {
    const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= channels) return;
    float sum = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        sum += to_float(dout[row * channels + c]) * (to_float(in[row * channels + c]) * rstd[row]);
    }
    dweight[c] += sum;
}

// ---- 2: coalesced ----

template <class X>
__global__ void rmsnorm_backward_rows_kernel2(X* din, const X* dout, const X* in, const X* weight,
                                              const float* rstd, std::int64_t rows, int channels) {
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const X *x = in + row * channels, *dy = dout + row * channels;
    const float r = rstd[row];
    float sum_gh = 0;
    for (int c = lane; c < channels; c += warp_threads) {
        sum_gh += to_float(dy[c]) * to_float(weight[c]) * (to_float(x[c]) * r);
    }
    const float mean_gh = warp_sum(sum_gh) / static_cast<float>(channels);
    X* dx = din + row * channels;
    for (int c = lane; c < channels; c += warp_threads) {
        const float g = to_float(dy[c]) * to_float(weight[c]);
        dx[c] = from_float<X>(to_float(dx[c]) + r * (g - to_float(x[c]) * r * mean_gh));
    }
}

// A block does 32 columns of every gridDim.y-th group of rows, a warp per row. The sums of its warps are
// added at the end.
template <class X>
__global__ void rmsnorm_backward_columns_kernel2(float* partials, const X* dout, const X* in,
                                                 const float* rstd, std::int64_t rows, int channels) {
    SHARED(float, sums, [warp_threads][warp_threads]);
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int c = static_cast<int>(blockIdx.x) * warp_threads + lane;
    float sum = 0;
    if (c < channels) {
        for (std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * warps + warp; row < rows;
             row += static_cast<std::int64_t>(gridDim.y) * warps) {
            sum += to_float(dout[row * channels + c]) * (to_float(in[row * channels + c]) * rstd[row]);
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || c >= channels) return;
    for (int w = 1; w < warps; ++w) sum += sums[w][lane];
    partials[static_cast<std::int64_t>(blockIdx.y) * channels + c] = sum;
}

// ---- 3 and 4: one pass ----

// A block does one row after the other. A thread always has the same columns, so their sums in shared memory
// need no barrier.
template <class X>
__global__ void rmsnorm_backward_kernel3(X* din, float* partials, const X* dout, const X* in, const X* weight,
                                         const float* rstd, std::int64_t rows, int channels) {
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    SharedAllocator shared;
    float* dweight = shared.take<float>(static_cast<std::size_t>(channels));
    for (int c = first; c < channels; c += step) dweight[c] = 0;
    for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *x = in + row * channels, *dy = dout + row * channels;
        const float r = rstd[row];
        float sum_gh = 0;
        for (int c = first; c < channels; c += step) {
            const float h = to_float(x[c]) * r, d = to_float(dy[c]);
            sum_gh += d * to_float(weight[c]) * h;
            dweight[c] += d * h;
        }
        const float mean_gh = block_sum(sum_gh) / static_cast<float>(channels);
        X* dx = din + row * channels;
        for (int c = first; c < channels; c += step) {
            const float g = to_float(dy[c]) * to_float(weight[c]);
            dx[c] = from_float<X>(to_float(dx[c]) + r * (g - to_float(x[c]) * r * mean_gh));
        }
    }
    partials += static_cast<std::int64_t>(blockIdx.x) * channels;
    for (int c = first; c < channels; c += step) partials[c] = dweight[c];
}

template <class X>
__global__ void rmsnorm_backward_kernel4(X* din, float* partials, const X* dout, const X* in, const X* weight,
                                         const float* rstd, std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size;
    const int first = static_cast<int>(threadIdx.x) * pack, step = static_cast<int>(blockDim.x) * pack;
    SharedAllocator shared;
    float* dweight = shared.take<float>(static_cast<std::size_t>(channels));
    for (int c = first; c < channels; c += step) {
        for (int i = 0; i < pack; ++i) dweight[c + i] = 0;
    }
    for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *x = in + row * channels, *dy = dout + row * channels;
        const float r = rstd[row];
        float sum_gh = 0;
        for (int c = first; c < channels; c += step) {
            const Packed<X> v = load(x + c), d = load(dy + c), w = load(weight + c);
            for (int i = 0; i < pack; ++i) {
                const float h = to_float(v[i]) * r;
                sum_gh += to_float(d[i]) * to_float(w[i]) * h;
                dweight[c + i] += to_float(d[i]) * h;
            }
        }
        const float mean_gh = block_sum(sum_gh) / static_cast<float>(channels);
        X* dx = din + row * channels;
        for (int c = first; c < channels; c += step) {
            const Packed<X> v = load(x + c), d = load(dy + c), w = load(weight + c);
            Packed<X> sum = load(dx + c);
            for (int i = 0; i < pack; ++i) {
                const float g = to_float(d[i]) * to_float(w[i]);
                sum[i] = from_float<X>(to_float(sum[i]) + r * (g - to_float(v[i]) * r * mean_gh));
            }
            store(dx + c, sum);
        }
    }
    partials += static_cast<std::int64_t>(blockIdx.x) * channels;
    for (int c = first; c < channels; c += step) {
        for (int i = 0; i < pack; ++i) partials[c + i] = dweight[c + i];
    }
}

template <class X>
class RmsNormBackward : public Problem {
  public:
    RmsNormBackward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          channels_(static_cast<int>(shape[1])),
          dout_(rows_ * channels_),
          in_(rows_ * channels_),
          weight_(channels_),
          din_(rows_ * channels_),
          din_before_(rows_ * channels_),
          rstd_(rows_),
          dweight_(channels_),
          dweight_before_(channels_) {
        draw.normal(dout_, 1);
        draw.normal(in_, 1, 0.5);
        draw.normal(weight_, 0.5, 1);
        draw.normal(din_before_, 1);
        draw.normal(dweight_before_, 1);
        draw.normal(rstd_, 0.1, 1);  // plausible values; backward takes them as they are
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X* din = din_.data();
        float* dweight = dweight_.data();
        const X *dout = dout_.data(), *in = in_.data(), *weight = weight_.data();
        const float* rstd = rstd_.data();
        // The first run on a chip allocates the workspace.
        const std::size_t workspace_bytes = rmsnorm_backward_workspace_bytes(on.chip, channels_);
        if (!workspace_ || workspace_->bytes() < workspace_bytes) {
            workspace_ =
                std::make_unique<Array<float>>(static_cast<std::int64_t>(workspace_bytes / sizeof(float)));
        }
        float* partials = workspace_->data();
        // The blocks that may write partial sums.
        const int most_blocks = static_cast<int>(workspace_bytes / sizeof(float)) / channels_;
        const auto blocks = [](std::int64_t n, int size) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(n, size));
        };

        switch (variant) {
            case 1:
                launch(on, rmsnorm_backward_rows_kernel1<X>, blocks(rows_, block_size), block_size, 0, din,
                       dout, in, weight, rstd, rows_, channels_);
                return launch(on, rmsnorm_backward_columns_kernel1<X>, blocks(channels_, block_size),
                              block_size, 0, dweight, dout, in, rstd, rows_, channels_);
            case 2: {
                const int warps = block_size / warp_threads;
                launch(on, rmsnorm_backward_rows_kernel2<X>, blocks(rows_, warps), block_size, 0, din, dout,
                       in, weight, rstd, rows_, channels_);
                const unsigned column_blocks = blocks(channels_, warp_threads);
                const unsigned stretches =
                    std::min(blocks(rows_, warps), blocks(most_blocks, static_cast<int>(column_blocks)));
                launch(on, rmsnorm_backward_columns_kernel2<X>, dim3(column_blocks, stretches), block_size, 0,
                       partials, dout, in, rstd, rows_, channels_);
                return detail::add_rmsnorm_partials(on, dweight, partials, static_cast<int>(stretches),
                                                    channels_);
            }
            case 3:
            case 4: {
                const int grid = static_cast<int>(std::min<std::int64_t>(rows_, most_blocks));
                launch(on, variant == 3 ? rmsnorm_backward_kernel3<X> : rmsnorm_backward_kernel4<X>,
                       static_cast<unsigned>(grid), block_size,
                       SharedAllocator::bytes<float>(static_cast<std::size_t>(channels_)), din, partials,
                       dout, in, weight, rstd, rows_, channels_);
                return detail::add_rmsnorm_partials(on, dweight, partials, grid, channels_);
            }
            case 5:
                return llmc::cuda::rmsnorm_backward(on, din, dweight, dout, in, weight, rstd, rows_,
                                                    channels_, partials, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        din_.copy_from(din_before_);
        dweight_.copy_from(dweight_before_);
        if (workspace_) workspace_->clear();
    }

    // The bounds: a relative error of u for each operation, and n u sum|terms| for a sum of n terms.
    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        const double n = channels_;
        const auto size = static_cast<std::size_t>(channels_);
        std::vector<double> dweight(size), terms(size), h(size), g(size);
        for (std::size_t c = 0; c < size; ++c) {
            dweight[c] = dweight_before_[static_cast<std::int64_t>(c)];
            terms[c] = std::fabs(dweight[c]);
        }
        for (std::int64_t row = 0; row < rows_; ++row) {
            double sum_gh = 0, gh_terms = 0;
            for (std::size_t c = 0; c < size; ++c) {
                const std::int64_t i = row * channels_ + static_cast<std::int64_t>(c);
                const double d = to_float(dout_[i]);
                h[c] = double{to_float(in_[i])} * rstd_[row];                // 1 operation
                g[c] = d * to_float(weight_[static_cast<std::int64_t>(c)]);  // 1
                sum_gh += g[c] * h[c];
                gh_terms += std::fabs(g[c] * h[c]);
                dweight[c] += d * h[c];
                terms[c] += std::fabs(d * h[c]);
            }
            // A term has 3 operations. Then there is a division, or 2 operations if it is by a rounded
            // reciprocal.
            const double mean_gh = sum_gh / n, mean_gh_error = (n + 5) * u * gh_terms / n;
            for (std::size_t c = 0; c < size; ++c) {
                const std::int64_t i = row * channels_ + static_cast<std::int64_t>(c);
                const double right = h[c] * mean_gh;
                const double error = u * std::fabs(g[c]) + std::fabs(h[c]) * mean_gh_error +
                                     2 * u * std::fabs(right) +
                                     2 * u * std::fabs(g[c] - right);  // their difference, times rstd
                const double din = to_float(din_before_[i]) + rstd_[row] * (g[c] - right);
                comparison.see("din", i, to_float(din_[i]), din,
                               rounded<X>(din, rstd_[row] * error + u * std::fabs(din)));
            }
        }
        // A sum of one term per row, of 2 operations, and of the old value.
        for (std::size_t c = 0; c < size; ++c) {
            comparison.see("dweight", static_cast<std::int64_t>(c), dweight_[static_cast<std::int64_t>(c)],
                           dweight[c], (static_cast<double>(rows_) + 3) * u * terms[c]);
        }
    }

    double bytes() const override { return 4.0 * static_cast<double>(in_.bytes()); }

  private:
    std::int64_t rows_;
    int channels_;
    Array<X> dout_, in_, weight_, din_, din_before_;
    Array<float> rstd_, dweight_, dweight_before_;
    std::unique_ptr<Array<float>> workspace_;
};

const Registration registration({
    .name = "rmsnorm_backward",
    .sizes = {"rows", "channels"},
    .variants = {{1, "a thread does a row, then a column", {32, 128, 256}},
                 {2, "coalesced, in two passes over the rows", {32, 128, 256}},
                 {3, "one pass, column sums in shared memory", {32, 128, 256}},
                 {4, "16-byte loads", {32, 128, 256}},
                 {5, "column sums in registers, two rows at a time", {32, 256, 512}}},
    .checked = {{3, 8}, {450, 8}, {5, 264}, {33, 384}, {1, 2048}},
    .timed = {{8192, 2048}, {8192, 4096}},
    .takes = {},
    .make = make_problem<RmsNormBackward>,
    // The second has several rows per block, and partial sums for several warps of the kernel that adds them.
    .checked_for_races = {{3, 40}, {45, 8}},
});

}  // namespace lab::rmsnorm_backward_variants
