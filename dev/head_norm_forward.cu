// The root-mean-square norm of heads, in three variants (llmc/device/ops.h). Each of H heads of D elements in
// each of N rows is divided by the root of its mean square, and scaled by a weight (D). The reciprocal root
// is stored.
//
// There is little to compute, so memory is the limit: 2 N H D elements to move (read x, write out), and 4 N H
// bytes of reciprocal roots. A head has 16 to 128 elements, fewer than a warp can load at once; over all
// heads (H = 1) D is several thousand.
//   1  A thread does a head. Neighboring threads read D elements apart.
//   2  A warp does a head: coalesced, but 2 or 4 bytes a lane. The head is read twice, once of that from
//      cache.
//   3  A group of threads does a head, as many as it has pieces of 16 bytes. They keep it in registers, with
//      the loads of four heads in flight (llmc/device/cuda/head_norm_forward.cuh).
#include "dev/head_norm_reference.h"
#include "dev/lab/lab.h"
#include "llmc/device/cuda/head_norm_forward.cuh"

namespace lab::head_norm_forward_variants {

using namespace llmc::cuda;

constexpr float eps = 0.125f;  // large enough to matter beside a mean square of 1

template <class X>
__global__ void head_norm_forward_kernel1(HeadPlaces<X> out, float* rstd, HeadPlaces<const X> in,
                                          const X* weight, unsigned heads, int count, int size) {
    const unsigned head = blockIdx.x * blockDim.x + threadIdx.x;
    if (head >= heads) return;
    const unsigned row = head / count;
    const auto of_row = static_cast<int>(head % count);
    const X* const x = in.at(row, of_row, size, 0);
    X* const y = out.at(row, of_row, size, 0);
    float squares = 0;
    for (int i = 0; i < size; ++i) squares += to_float(x[i]) * to_float(x[i]);
    const float r = rsqrtf(squares / static_cast<float>(size) + eps);
    for (int i = 0; i < size; ++i) y[i] = from_float<X>(to_float(x[i]) * r * to_float(weight[i]));
    rstd[head] = r;
}

template <class X>
__global__ void head_norm_forward_kernel2(HeadPlaces<X> out, float* rstd, HeadPlaces<const X> in,
                                          const X* weight, unsigned heads, int count, int size) {
    const unsigned head = (blockIdx.x * blockDim.x + threadIdx.x) / warp_threads;
    if (head >= heads) return;
    const int lane = static_cast<int>(threadIdx.x) % warp_threads;
    const unsigned row = head / count;
    const auto of_row = static_cast<int>(head % count);
    const X* const x = in.at(row, of_row, size, 0);
    X* const y = out.at(row, of_row, size, 0);
    float squares = 0;
    for (int i = lane; i < size; i += warp_threads) squares += to_float(x[i]) * to_float(x[i]);
    const float r = rsqrtf(warp_sum(squares) / static_cast<float>(size) + eps);
    for (int i = lane; i < size; i += warp_threads) {
        y[i] = from_float<X>(to_float(x[i]) * r * to_float(weight[i]));
    }
    if (lane == 0) rstd[head] = r;
}

template <class X>
class HeadNormForward : public Problem {
  public:
    HeadNormForward(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          in_(rows_, shape[1], shape[2], 8, 16),
          out_(rows_, shape[1], shape[2], 16, 0),
          before_(rows_, shape[1], shape[2], 16, 0),
          weight_(shape[2]),
          rstd_(rows_ * shape[1]) {
        draw.normal(in_.elements, 1, 0.5);
        draw.normal(before_.elements, 1);
        draw.normal(weight_, 0.5, 1);
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const unsigned heads = count_heads(rows_, static_cast<int>(in_.count));
        const auto launch_heads = [&](auto kernel, int heads_a_block) {
            launch(on, kernel, blocks_for(heads, static_cast<unsigned>(heads_a_block)), block_size, 0,
                   out_.places(), rstd_.data(), in_.const_places(), weight_.data(), heads,
                   static_cast<int>(in_.count), static_cast<int>(in_.size));
        };
        switch (variant) {
            case 1:
                return launch_heads(head_norm_forward_kernel1<X>, block_size);
            case 2:
                return launch_heads(head_norm_forward_kernel2<X>, block_size / warp_threads);
            case 3:
                return llmc::cuda::head_norm_forward(
                    on, out_.places(), rstd_.data(), in_.const_places(), weight_.data(), eps,
                    {nullptr, 0, static_cast<float>(in_.size)}, rows_, static_cast<int>(in_.count),
                    static_cast<int>(in_.size), block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override {
        out_.elements.copy_from(before_.elements);
        rstd_.clear();
    }

    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        const auto n = static_cast<double>(in_.size);
        for (std::int64_t head = 0; head < rstd_.size(); ++head) {
            double squares = 0;
            for (std::int64_t i = 0; i < in_.size; ++i) squares += std::pow(in_.at(head, i), 2);
            const double rstd = 1 / std::sqrt(squares / n + double{eps});
            // A sum of n positive terms of one rounding each; a division, and the addition of eps. The root
            // halves these n + 2 roundings, and rsqrtf has 2 ulp.
            const double relative = ((n + 2) / 2 + 4) * u;
            comparison.see("rstd", head, rstd_[head], rstd, relative * rstd);
            for (std::int64_t i = 0; i < in_.size; ++i) {
                const double out = in_.at(head, i) * rstd * to_float(weight_[i]);
                comparison.see("out", out_.place(head, i), out_.at(head, i), out,
                               rounded<X>(out, (relative + 2 * u) * std::fabs(out)));
            }
        }
        compare_outside(comparison, "other", out_, before_);
    }

    double bytes() const override {
        const auto heads = static_cast<double>(rstd_.size());
        return heads * (2.0 * static_cast<double>(in_.size) * sizeof(X) + sizeof(float));
    }

  private:
    std::int64_t rows_;
    HeadRows<X> in_, out_, before_;
    Array<X> weight_;
    Array<float> rstd_;
};

const Registration registration({
    .name = "head_norm_forward",
    .sizes = {"rows", "heads", "head size"},
    .variants = {{1, "a thread does a head", {32, 128, 256}},
                 {2, "a warp does a head", {32, 128, 256}},
                 {3, "16-byte pieces in registers, four heads in flight", {32, 128, 256, 384}}},
    .checked = {{3, 2, 16}, {5, 3, 24}, {17, 5, 128}, {5, 1, 1032}, {3, 2, 520}},
    .timed = {{8192, 40, 128}, {8192, 20, 64}, {8192, 1, 4096}},
    .takes = {},
    .make = make_problem<HeadNormForward>,
    // Two blocks of a part of a warp to a head, of several warps with one piece, and with four.
    .checked_for_races = {{41, 5, 16}, {9, 3, 520}, {3, 1, 1032}},
});

}  // namespace lab::head_norm_forward_variants

// The kernels for rows that ranks share, for the compiler's report.
template void llmc::cuda::head_norm_sums(const llmc::cuda::LaunchContext&, float*,
                                         llmc::cuda::HeadPlaces<const float>, std::int64_t, int, int);
template void llmc::cuda::head_norm_sums(const llmc::cuda::LaunchContext&, float*,
                                         llmc::cuda::HeadPlaces<const llmc::cuda::bf16>, std::int64_t, int,
                                         int);
