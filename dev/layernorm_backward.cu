// Layernorm backward, in five variants (llmc/device/ops.h). For N rows of C channels, with h = (x - mean)
// rstd and g = dout gamma:
//   din += rstd (g - 1/C sum g - h 1/C sum(g h)),  dgamma += sum_rows dout h,  dbeta += sum_rows dout
// There are two sums along each row and two down each column. There are no atomics, so every run adds in the
// same order.
//
// Memory is the limit again: 4 N C elements (x, dout and din read, din written). It is harder than the
// forward pass: a row needs its threads side by side, and a column needs all rows in one place. The variants:
//   1  A thread does a row; in a second kernel a thread does a column. The first kernel's loads are C
//      elements apart. The second has C threads, for a GPU that holds 200000.
//   2  A warp does a row. The columns are divided into stretches of rows; a third kernel adds their partial
//      sums. Everything is coalesced and parallel, but x and dout are read twice: 6 N C elements, at best two
//      thirds of the roofline.
//   3  One pass: two blocks per multiprocessor go over the rows, and add each row to dgamma and dbeta in
//      shared memory. At its end a block writes 8 C bytes of partial sums, which are read once. On 132
//      multiprocessors that is 6% of the traffic at N = 8192 in bf16, if L2 does not keep them. So there are
//      few blocks, and the goal is 80% of the roofline.
//   4  16-byte loads, so that fewer instructions request the same bytes. There are still four barriers per
//      row.
//   5  A thread always has the same columns, with their sums in registers. It loads two rows at a time.
//      Groups of warps have their own rows, with one barrier for all of them
//      (llmc/device/cuda/norm_backward.cuh).
#include "llmc/device/cuda/norm_backward.cuh"

#include "dev/lab/lab.h"

namespace lab::layernorm_backward_variants {

using namespace llmc::cuda;

// ---- 1: threads on their own ----

template <class X>
__global__ void layernorm_backward_rows_kernel1(X* din, const X* dout, const X* in, const X* gamma,
                                                const float* mean, const float* rstd, std::int64_t rows,
                                                int channels) {
    const std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const X *x = in + row * channels, *dy = dout + row * channels;
    float sum_g = 0, sum_gh = 0;
    for (int c = 0; c < channels; ++c) {
        const float g = to_float(dy[c]) * to_float(gamma[c]);
        sum_g += g;
        sum_gh += g * (to_float(x[c]) - mean[row]) * rstd[row];
    }
    const float mean_g = sum_g / static_cast<float>(channels),
                mean_gh = sum_gh / static_cast<float>(channels);
    X* dx = din + row * channels;
    for (int c = 0; c < channels; ++c) {
        const float h = (to_float(x[c]) - mean[row]) * rstd[row];
        const float g = to_float(dy[c]) * to_float(gamma[c]);
        dx[c] = from_float<X>(to_float(dx[c]) + rstd[row] * (g - mean_g - h * mean_gh));
    }
}

template <class X>
__global__ void layernorm_backward_columns_kernel1(float* dgamma, float* dbeta, const X* dout, const X* in,
                                                   const float* mean, const float* rstd, std::int64_t rows,
                                                   int channels) {
    const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (c >= channels) return;
    float sum_gamma = 0, sum_beta = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
        const float d = to_float(dout[row * channels + c]);
        sum_gamma += d * (to_float(in[row * channels + c]) - mean[row]) * rstd[row];
        sum_beta += d;
    }
    dgamma[c] += sum_gamma;
    dbeta[c] += sum_beta;
}

// ---- 2: coalesced ----

template <class X>
__global__ void layernorm_backward_rows_kernel2(X* din, const X* dout, const X* in, const X* gamma,
                                                const float* mean, const float* rstd, std::int64_t rows,
                                                int channels) {
    const std::int64_t row =
        (static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / warp_threads;
    if (row >= rows) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const X *x = in + row * channels, *dy = dout + row * channels;
    const float m = mean[row], r = rstd[row];
    float sum_g = 0, sum_gh = 0;
    for (int c = lane; c < channels; c += warp_threads) {
        const float g = to_float(dy[c]) * to_float(gamma[c]);
        sum_g += g;
        sum_gh += g * (to_float(x[c]) - m) * r;
    }
    const float mean_g = warp_sum(sum_g) / static_cast<float>(channels);
    const float mean_gh = warp_sum(sum_gh) / static_cast<float>(channels);
    X* dx = din + row * channels;
    for (int c = lane; c < channels; c += warp_threads) {
        const float h = (to_float(x[c]) - m) * r;
        const float g = to_float(dy[c]) * to_float(gamma[c]);
        dx[c] = from_float<X>(to_float(dx[c]) + r * (g - mean_g - h * mean_gh));
    }
}

// A block does 32 columns of every gridDim.y-th group of rows, a warp per row. The sums of its warps are
// added at the end.
template <class X>
__global__ void layernorm_backward_columns_kernel2(float* partials, const X* dout, const X* in,
                                                   const float* mean, const float* rstd, std::int64_t rows,
                                                   int channels) {
    SHARED(float, gamma_sums, [warp_threads][warp_threads]);
    SHARED(float, beta_sums, [warp_threads][warp_threads]);
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const int warps = static_cast<int>(blockDim.x) / warp_threads;
    const int c = static_cast<int>(blockIdx.x) * warp_threads + lane;
    float sum_gamma = 0, sum_beta = 0;
    if (c < channels) {
        for (std::int64_t row = static_cast<std::int64_t>(blockIdx.y) * warps + warp; row < rows;
             row += static_cast<std::int64_t>(gridDim.y) * warps) {
            const float d = to_float(dout[row * channels + c]);
            sum_gamma += d * (to_float(in[row * channels + c]) - mean[row]) * rstd[row];
            sum_beta += d;
        }
    }
    gamma_sums[warp][lane] = sum_gamma;
    beta_sums[warp][lane] = sum_beta;
    __syncthreads();
    if (warp > 0 || c >= channels) return;
    for (int w = 1; w < warps; ++w) {
        sum_gamma += gamma_sums[w][lane];
        sum_beta += beta_sums[w][lane];
    }
    partials += static_cast<std::int64_t>(blockIdx.y) * 2 * channels;
    partials[c] = sum_gamma;
    partials[channels + c] = sum_beta;
}

// ---- 3 and 4: one pass ----

// A block does one row after the other. A thread always has the same columns, so their sums in shared memory
// need no barrier.
template <class X>
__global__ void layernorm_backward_kernel3(X* din, float* partials, const X* dout, const X* in,
                                           const X* gamma, const float* mean, const float* rstd,
                                           std::int64_t rows, int channels) {
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    SharedAllocator shared;
    float* dgamma = shared.take<float>(static_cast<std::size_t>(channels));
    float* dbeta = shared.take<float>(static_cast<std::size_t>(channels));
    for (int c = first; c < channels; c += step) dgamma[c] = dbeta[c] = 0;
    for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *x = in + row * channels, *dy = dout + row * channels;
        const float m = mean[row], r = rstd[row];
        float sum_g = 0, sum_gh = 0;
        for (int c = first; c < channels; c += step) {
            const float h = (to_float(x[c]) - m) * r;
            const float d = to_float(dy[c]), g = d * to_float(gamma[c]);
            sum_g += g;
            sum_gh += g * h;
            dgamma[c] += d * h;
            dbeta[c] += d;
        }
        const float mean_g = block_sum(sum_g) / static_cast<float>(channels);
        const float mean_gh = block_sum(sum_gh) / static_cast<float>(channels);
        X* dx = din + row * channels;
        for (int c = first; c < channels; c += step) {
            const float h = (to_float(x[c]) - m) * r;
            const float g = to_float(dy[c]) * to_float(gamma[c]);
            dx[c] = from_float<X>(to_float(dx[c]) + r * (g - mean_g - h * mean_gh));
        }
    }
    partials += static_cast<std::int64_t>(blockIdx.x) * 2 * channels;
    for (int c = first; c < channels; c += step) {
        partials[c] = dgamma[c];
        partials[channels + c] = dbeta[c];
    }
}

template <class X>
__global__ void layernorm_backward_kernel4(X* din, float* partials, const X* dout, const X* in,
                                           const X* gamma, const float* mean, const float* rstd,
                                           std::int64_t rows, int channels) {
    constexpr int pack = Packed<X>::size;
    const int first = static_cast<int>(threadIdx.x) * pack, step = static_cast<int>(blockDim.x) * pack;
    SharedAllocator shared;
    float* dgamma = shared.take<float>(static_cast<std::size_t>(channels));
    float* dbeta = shared.take<float>(static_cast<std::size_t>(channels));
    for (int c = first; c < channels; c += step) {
        for (int i = 0; i < pack; ++i) dgamma[c + i] = dbeta[c + i] = 0;
    }
    for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const X *x = in + row * channels, *dy = dout + row * channels;
        const float m = mean[row], r = rstd[row];
        float sum_g = 0, sum_gh = 0;
        for (int c = first; c < channels; c += step) {
            const Packed<X> v = load(x + c), w = load(dy + c), weight = load(gamma + c);
            for (int i = 0; i < pack; ++i) {
                const float h = (to_float(v[i]) - m) * r;
                const float d = to_float(w[i]), g = d * to_float(weight[i]);
                sum_g += g;
                sum_gh += g * h;
                dgamma[c + i] += d * h;
                dbeta[c + i] += d;
            }
        }
        const float mean_g = block_sum(sum_g) / static_cast<float>(channels);
        const float mean_gh = block_sum(sum_gh) / static_cast<float>(channels);
        X* dx = din + row * channels;
        for (int c = first; c < channels; c += step) {
            const Packed<X> v = load(x + c), w = load(dy + c), weight = load(gamma + c);
            Packed<X> sum = load(dx + c);
            for (int i = 0; i < pack; ++i) {
                const float h = (to_float(v[i]) - m) * r;
                const float g = to_float(w[i]) * to_float(weight[i]);
                sum[i] = from_float<X>(to_float(sum[i]) + r * (g - mean_g - h * mean_gh));
            }
            store(dx + c, sum);
        }
    }
    partials += static_cast<std::int64_t>(blockIdx.x) * 2 * channels;
    for (int c = first; c < channels; c += step) {
        for (int i = 0; i < pack; ++i) {
            partials[c + i] = dgamma[c + i];
            partials[channels + c + i] = dbeta[c + i];
        }
    }
}

template <class X>
class LayerNormBackward : public Problem {
  public:
    LayerNormBackward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          channels_(static_cast<int>(shape[1])),
          dout_(rows_ * channels_),
          in_(rows_ * channels_),
          gamma_(channels_),
          din_(rows_ * channels_),
          din_before_(rows_ * channels_),
          mean_(rows_),
          rstd_(rows_),
          dgamma_(channels_),
          dbeta_(channels_),
          dgamma_before_(channels_),
          dbeta_before_(channels_) {
        draw.normal(dout_, 1);
        draw.normal(in_, 1, 0.5);
        draw.normal(gamma_, 0.5, 1);
        draw.normal(din_before_, 1);
        draw.normal(dgamma_before_, 1);
        draw.normal(dbeta_before_, 1);
        // Plausible values; backward takes them as they are.
        draw.normal(mean_, 0.1, 0.5);
        draw.normal(rstd_, 0.1, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        X* din = din_.data();
        float *dgamma = dgamma_.data(), *dbeta = dbeta_.data();
        const X *dout = dout_.data(), *in = in_.data(), *gamma = gamma_.data();
        const float *mean = mean_.data(), *rstd = rstd_.data();
        // The first run on a chip allocates the workspace.
        const std::size_t workspace_bytes = norm_backward_workspace_bytes(on.chip, channels_);
        if (!workspace_ || workspace_->bytes() < workspace_bytes) {
            workspace_ =
                std::make_unique<Array<float>>(static_cast<std::int64_t>(workspace_bytes / sizeof(float)));
        }
        float* partials = workspace_->data();
        const int most_blocks =
            static_cast<int>(workspace_bytes / sizeof(float)) / (2 * channels_);  // that write partials
        const auto blocks = [](std::int64_t n, int size) {
            return static_cast<unsigned>(blocks_for<std::int64_t>(n, size));
        };

        switch (variant) {
            case 1:
                launch(on, layernorm_backward_rows_kernel1<X>, blocks(rows_, block_size), block_size, 0, din,
                       dout, in, gamma, mean, rstd, rows_, channels_);
                return launch(on, layernorm_backward_columns_kernel1<X>, blocks(channels_, block_size),
                              block_size, 0, dgamma, dbeta, dout, in, mean, rstd, rows_, channels_);
            case 2: {
                const int warps = block_size / warp_threads;
                launch(on, layernorm_backward_rows_kernel2<X>, blocks(rows_, warps), block_size, 0, din, dout,
                       in, gamma, mean, rstd, rows_, channels_);
                const unsigned column_blocks = blocks(channels_, warp_threads);
                const unsigned stretches =
                    std::min(blocks(rows_, warps), blocks(most_blocks, static_cast<int>(column_blocks)));
                launch(on, layernorm_backward_columns_kernel2<X>, dim3(column_blocks, stretches), block_size,
                       0, partials, dout, in, mean, rstd, rows_, channels_);
                return detail::add_norm_partials(on, dgamma, dbeta, partials, static_cast<int>(stretches),
                                                 2 * channels_, channels_);
            }
            case 3:
            case 4: {
                const int grid = static_cast<int>(std::min<std::int64_t>(rows_, most_blocks));
                launch(on, variant == 3 ? layernorm_backward_kernel3<X> : layernorm_backward_kernel4<X>,
                       static_cast<unsigned>(grid), block_size,
                       2 * SharedAllocator::bytes<float>(static_cast<std::size_t>(channels_)), din, partials,
                       dout, in, gamma, mean, rstd, rows_, channels_);
                return detail::add_norm_partials(on, dgamma, dbeta, partials, grid, 2 * channels_, channels_);
            }
            case 5:
                return llmc::cuda::norm_backward<true, X>(on, din, dgamma, dbeta, dout, in, gamma, mean, rstd,
                                                          rows_, channels_, partials, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        din_.copy_from(din_before_);
        dgamma_.copy_from(dgamma_before_);
        dbeta_.copy_from(dbeta_before_);
        if (workspace_) workspace_->clear();
    }

    // The bounds: a relative error of u for each operation, and n u sum|terms| for a sum of n terms.
    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        const double n = channels_;
        const auto columns = [&] { return std::vector<double>(static_cast<std::size_t>(channels_)); };
        auto dgamma = columns(), dbeta = columns(), dgamma_terms = columns(), dbeta_terms = columns();
        auto h = columns(), g = columns();
        for (int c = 0; c < channels_; ++c) {
            dgamma[c] = dgamma_before_[c];
            dbeta[c] = dbeta_before_[c];
            dgamma_terms[c] = std::fabs(dgamma[c]);
            dbeta_terms[c] = std::fabs(dbeta[c]);
        }
        for (std::int64_t row = 0; row < rows_; ++row) {
            double sum_g = 0, sum_gh = 0, g_terms = 0, gh_terms = 0;
            for (int c = 0; c < channels_; ++c) {
                const double d = to_float(dout_[row * channels_ + c]);
                h[c] =
                    (double{to_float(in_[row * channels_ + c])} - mean_[row]) * rstd_[row];  // 2 operations
                g[c] = d * to_float(gamma_[c]);                                              // 1
                sum_g += g[c];
                sum_gh += g[c] * h[c];
                g_terms += std::fabs(g[c]);
                gh_terms += std::fabs(g[c] * h[c]);
                dgamma[c] += d * h[c];
                dbeta[c] += d;
                dgamma_terms[c] += std::fabs(d * h[c]);
                dbeta_terms[c] += std::fabs(d);
            }
            // A term has 1 operation, or 4. Then there is a division, or 2 operations if it is by a rounded
            // reciprocal.
            const double mean_g = sum_g / n, mean_g_error = (n + 3) * u * g_terms / n;
            const double mean_gh = sum_gh / n, mean_gh_error = (n + 6) * u * gh_terms / n;
            for (int c = 0; c < channels_; ++c) {
                const std::int64_t i = row * channels_ + c;
                const double left = g[c] - mean_g, right = h[c] * mean_gh;
                const double error = u * std::fabs(g[c]) + mean_g_error + u * std::fabs(left) +
                                     std::fabs(h[c]) * mean_gh_error + 3 * u * std::fabs(right) +
                                     2 * u * std::fabs(left - right);  // their difference, times rstd
                const double din = to_float(din_before_[i]) + rstd_[row] * (left - right);
                comparison.see("din", i, to_float(din_[i]), din,
                               rounded<X>(din, rstd_[row] * error + u * std::fabs(din)));
            }
        }
        // Sums of one term per row, of 3 operations or none, and of the old value.
        const double terms = static_cast<double>(rows_) + 1;
        for (int c = 0; c < channels_; ++c) {
            comparison.see("dgamma", c, dgamma_[c], dgamma[c], (terms + 3) * u * dgamma_terms[c]);
            comparison.see("dbeta", c, dbeta_[c], dbeta[c], terms * u * dbeta_terms[c]);
        }
    }

    double bytes() const override { return 4.0 * static_cast<double>(in_.bytes()); }

  private:
    std::int64_t rows_;
    int channels_;
    Array<X> dout_, in_, gamma_, din_, din_before_;
    Array<float> mean_, rstd_, dgamma_, dbeta_, dgamma_before_, dbeta_before_;
    std::unique_ptr<Array<float>> workspace_;
};

const Registration registration({
    .name = "layernorm_backward",
    .sizes = {"rows", "channels"},
    .variants = {{1, "a thread does a row, then a column", {32, 128, 256}},
                 {2, "coalesced, in two passes over the rows", {32, 128, 256}},
                 {3, "one pass, column sums in shared memory", {32, 128, 256}},
                 {4, "16-byte loads", {32, 128, 256}},
                 {5, "column sums in registers, two rows at a time", {32, 192, 384}}},
    .checked = {{3, 8}, {450, 8}, {5, 264}, {33, 384}, {1, 768}},
    .timed = {{8192, 768}, {8192, 1600}},
    .takes = {},
    .make = make_problem<LayerNormBackward>,
    // The second has several rows per block, and partial sums for several warps of the kernel that adds them.
    .checked_for_races = {{3, 40}, {45, 8}},
});

}  // namespace lab::layernorm_backward_variants
