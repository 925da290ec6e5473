// The backward pass of the root-mean-square norm of heads, in three variants (llmc/device/ops.h). For each of
// H heads of D elements in each of N rows, with h = x rstd and g = dout weight:
//   din = rstd (g - h 1/D sum(g h)),  dweight += sum over rows and heads of dout h
// There are no atomics, so every run adds in the same order.
//
// Memory is the limit: 3 N H D elements (x and dout read, din written), and 4 N H bytes of rstd. The partial
// sums of dweight are 4 D bytes for each of the blocks, of which a multiprocessor has two.
//   1  A thread does a head; in a second kernel a thread does a column of dweight. Neighboring threads of the
//      first read D elements apart. The second has D threads, for a GPU that holds 200000.
//   2  A warp does a head: coalesced. The columns are divided into stretches of heads; a third kernel adds
//      their sums. x and dout are read twice: 5 N H D elements, at best three fifths of the roofline.
//   3  One pass. A group of threads does a head, as many as it has pieces of 16 bytes. Two blocks a
//      multiprocessor go over all heads, and a thread's columns are those of every head, so that its part of
//      dweight stays in registers (llmc/device/cuda/head_norm_backward.cuh).
#include "dev/head_norm_reference.h"
#include "dev/lab/lab.h"
#include "llmc/device/cuda/head_norm_backward.cuh"

namespace lab::head_norm_backward_variants {

using namespace llmc::cuda;

struct Sizes {
    unsigned heads;  // in all rows
    int count, size;
};

template <class X>
__global__ void head_norm_backward_heads_kernel1(HeadPlaces<X> din, HeadPlaces<const X> dout,
                                                 HeadPlaces<const X> in, const X* weight, const float* rstd,
                                                 Sizes s) {
    const unsigned head = blockIdx.x * blockDim.x + threadIdx.x;
    if (head >= s.heads) return;
    const unsigned row = head / s.count;
    const auto of_row = static_cast<int>(head % s.count);
    const X *const x = in.at(row, of_row, s.size, 0), *const dy = dout.at(row, of_row, s.size, 0);
    X* const dx = din.at(row, of_row, s.size, 0);
    const float r = rstd[head];
    float sum = 0;
    for (int i = 0; i < s.size; ++i) sum += to_float(dy[i]) * to_float(weight[i]) * (to_float(x[i]) * r);
    const float mean = sum / static_cast<float>(s.size);
    for (int i = 0; i < s.size; ++i) {
        dx[i] = from_float<X>(r * (to_float(dy[i]) * to_float(weight[i]) - to_float(x[i]) * r * mean));
    }
}

template <class X>
__global__ void head_norm_backward_columns_kernel1(float* dweight, HeadPlaces<const X> dout,
                                                   HeadPlaces<const X> in, const float* rstd, Sizes s) {
    const auto i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= s.size) return;
    float sum = 0;
    for (unsigned head = 0; head < s.heads; ++head) {
        const unsigned row = head / s.count;
        const auto of_row = static_cast<int>(head % s.count);
        sum += to_float(*dout.at(row, of_row, s.size, i)) *
               (to_float(*in.at(row, of_row, s.size, i)) * rstd[head]);
    }
    dweight[i] += sum;
}

template <class X>
__global__ void head_norm_backward_heads_kernel2(HeadPlaces<X> din, HeadPlaces<const X> dout,
                                                 HeadPlaces<const X> in, const X* weight, const float* rstd,
                                                 Sizes s) {
    const unsigned head = (blockIdx.x * blockDim.x + threadIdx.x) / warp_threads;
    if (head >= s.heads) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const unsigned row = head / s.count;
    const auto of_row = static_cast<int>(head % s.count);
    const X *const x = in.at(row, of_row, s.size, 0), *const dy = dout.at(row, of_row, s.size, 0);
    X* const dx = din.at(row, of_row, s.size, 0);
    const float r = rstd[head];
    float sum = 0;
    for (int i = lane; i < s.size; i += warp_threads) {
        sum += to_float(dy[i]) * to_float(weight[i]) * (to_float(x[i]) * r);
    }
    const float mean = warp_sum(sum) / static_cast<float>(s.size);
    for (int i = lane; i < s.size; i += warp_threads) {
        dx[i] = from_float<X>(r * (to_float(dy[i]) * to_float(weight[i]) - to_float(x[i]) * r * mean));
    }
}

// A block does 32 columns of every gridDim.y-th group of heads, a warp per head. The sums of its warps are
// added at the end.
template <class X>
__global__ void head_norm_backward_columns_kernel2(float* partials, HeadPlaces<const X> dout,
                                                   HeadPlaces<const X> in, const float* rstd, Sizes s) {
    SHARED(float, sums, [warp_threads][warp_threads]);
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const int warp = static_cast<int>(threadIdx.x) / warp_threads;
    const unsigned warps = blockDim.x / warp_threads;
    const int i = static_cast<int>(blockIdx.x) * warp_threads + lane;
    float sum = 0;
    if (i < s.size) {
        for (unsigned head = blockIdx.y * warps + static_cast<unsigned>(warp); head < s.heads;
             head += gridDim.y * warps) {
            const unsigned row = head / s.count;
            const auto of_row = static_cast<int>(head % s.count);
            sum += to_float(*dout.at(row, of_row, s.size, i)) *
                   (to_float(*in.at(row, of_row, s.size, i)) * rstd[head]);
        }
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || i >= s.size) return;
    for (unsigned w = 1; w < warps; ++w) sum += sums[w][lane];
    partials[std::int64_t{blockIdx.y} * s.size + i] = sum;
}

template <class X>
class HeadNormBackward : public Problem {
  public:
    HeadNormBackward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          dout_(rows_, shape[1], shape[2], 0, 8),
          in_(rows_, shape[1], shape[2], 8, 16),
          din_(rows_, shape[1], shape[2], 16, 0),
          before_(rows_, shape[1], shape[2], 16, 0),
          weight_(shape[2]),
          rstd_(rows_ * shape[1]),
          dweight_(shape[2]),
          dweight_before_(shape[2]) {
        draw.normal(dout_.elements, 1);
        draw.normal(in_.elements, 1, 0.5);
        draw.normal(before_.elements, 1);
        draw.normal(weight_, 0.5, 1);
        draw.normal(dweight_before_, 1);
        draw.normal(rstd_, 0.1, 1);  // plausible values; backward takes them as they are
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const Sizes s{count_heads(rows_, static_cast<int>(in_.count)), static_cast<int>(in_.count),
                      static_cast<int>(in_.size)};
        const HeadPlaces<const X> dout = dout_.const_places(), in = in_.const_places();
        // The first run on a chip allocates the workspace.
        const std::size_t bytes = head_norm_backward_workspace_bytes(on.chip, s.size);
        if (!workspace_ || workspace_->bytes() < bytes) {
            workspace_ = std::make_unique<Array<float>>(static_cast<std::int64_t>(bytes / sizeof(float)));
        }
        const auto blocks = [](unsigned n, int a_block) {
            return blocks_for(n, static_cast<unsigned>(a_block));
        };
        const auto size = static_cast<unsigned>(s.size);
        switch (variant) {
            case 1:
                launch(on, head_norm_backward_heads_kernel1<X>, blocks(s.heads, block_size), block_size, 0,
                       din_.places(), dout, in, weight_.data(), rstd_.data(), s);
                return launch(on, head_norm_backward_columns_kernel1<X>, blocks(size, block_size), block_size,
                              0, dweight_.data(), dout, in, rstd_.data(), s);
            case 2: {
                const int warps = block_size / warp_threads;
                launch(on, head_norm_backward_heads_kernel2<X>, blocks(s.heads, warps), block_size, 0,
                       din_.places(), dout, in, weight_.data(), rstd_.data(), s);
                const auto most = static_cast<unsigned>(bytes / sizeof(float)) / size;
                const unsigned stretches = std::min(blocks(s.heads, warps), most);
                launch(on, head_norm_backward_columns_kernel2<X>, dim3(blocks(size, warp_threads), stretches),
                       block_size, 0, workspace_->data(), dout, in, rstd_.data(), s);
                return detail::add_head_norm_partials(on, dweight_.data(), workspace_->data(),
                                                      static_cast<int>(stretches), s.size);
            }
            case 3:
                return llmc::cuda::head_norm_backward(on, din_.places(), dweight_.data(), dout, in,
                                                      weight_.data(), rstd_.data(),
                                                      {nullptr, 0, static_cast<float>(s.size)}, rows_,
                                                      s.count, s.size, workspace_->data(), block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        din_.elements.copy_from(before_.elements);
        dweight_.copy_from(dweight_before_);
        if (workspace_) workspace_->clear();
    }

    // The bounds: a relative error of u for each operation, and n u sum|terms| for a sum of n terms.
    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        const auto n = static_cast<double>(in_.size);
        const auto size = static_cast<std::size_t>(in_.size);
        std::vector<double> dweight(size), terms(size), h(size), g(size);
        for (std::size_t i = 0; i < size; ++i) {
            dweight[i] = dweight_before_[static_cast<std::int64_t>(i)];
            terms[i] = std::fabs(dweight[i]);
        }
        for (std::int64_t head = 0; head < rstd_.size(); ++head) {
            const double r = rstd_[head];
            double sum = 0, sum_terms = 0;
            for (std::size_t i = 0; i < size; ++i) {
                const auto at = static_cast<std::int64_t>(i);
                h[i] = in_.at(head, at) * r;
                g[i] = dout_.at(head, at) * to_float(weight_[at]);
                sum += g[i] * h[i];
                sum_terms += std::fabs(g[i] * h[i]);
                dweight[i] += dout_.at(head, at) * h[i];
                terms[i] += std::fabs(dout_.at(head, at) * h[i]);
            }
            // A term has 3 operations. Then there is a division.
            const double mean = sum / n, mean_error = (n + 4) * u * sum_terms / n;
            for (std::size_t i = 0; i < size; ++i) {
                const auto at = static_cast<std::int64_t>(i);
                const double right = h[i] * mean, left = g[i] - right;
                // One operation in g, two in the product with the mean, and their difference.
                const double error = u * (std::fabs(g[i]) + 2 * std::fabs(right) + std::fabs(left)) +
                                     std::fabs(h[i]) * mean_error;
                comparison.see("din", din_.place(head, at), din_.at(head, at), r * left,
                               rounded<X>(r * left, r * error + u * std::fabs(r * left)));
            }
        }
        // Sums of one term per head, of 2 operations, and of the old value.
        const double count = static_cast<double>(rstd_.size()) + 1;
        for (std::size_t i = 0; i < size; ++i) {
            const auto at = static_cast<std::int64_t>(i);
            comparison.see("dweight", at, dweight_[at], dweight[i], (count + 2) * u * terms[i]);
        }
        compare_outside(comparison, "other", din_, before_);
    }

    double bytes() const override {
        const auto heads = static_cast<double>(rstd_.size());
        return heads * (3.0 * static_cast<double>(in_.size) * sizeof(X) + sizeof(float));
    }

  private:
    std::int64_t rows_;
    HeadRows<X> dout_, in_, din_, before_;
    Array<X> weight_;
    Array<float> rstd_, dweight_, dweight_before_;
    std::unique_ptr<Array<float>> workspace_;
};

const Registration registration({
    .name = "head_norm_backward",
    .sizes = {"rows", "heads", "head size"},
    .variants = {{1, "a thread does a head, then a column", {32, 128, 256}},
                 {2, "coalesced, in two passes over the heads", {32, 128, 256}},
                 {3, "one pass, the weight's sums in registers", {32, 128, 384}}},
    .checked = {{3, 2, 16}, {5, 3, 24}, {17, 5, 128}, {5, 1, 1032}, {3, 2, 520}},
    .timed = {{8192, 40, 128}, {8192, 20, 64}, {8192, 1, 4096}},
    .takes = {},
    .make = make_problem<HeadNormBackward>,
    // Two blocks of a part of a warp to a head, of several warps with one piece, and with four.
    .checked_for_races = {{41, 5, 40}, {9, 3, 520}, {3, 1, 1032}},
});

}  // namespace lab::head_norm_backward_variants

// The kernels for rows that ranks share, for the compiler's report.
template void llmc::cuda::head_norm_backward_sums(const llmc::cuda::LaunchContext&, float*,
                                                  llmc::cuda::HeadPlaces<const float>,
                                                  llmc::cuda::HeadPlaces<const float>, const float*,
                                                  const float*, std::int64_t, int, int);
template void llmc::cuda::head_norm_backward_sums(const llmc::cuda::LaunchContext&, float*,
                                                  llmc::cuda::HeadPlaces<const llmc::cuda::bf16>,
                                                  llmc::cuda::HeadPlaces<const llmc::cuda::bf16>,
                                                  const llmc::cuda::bf16*, const float*, std::int64_t, int,
                                                  int);
