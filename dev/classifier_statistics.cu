// The statistics of a rank's columns of the logits that it sends to the others, in three variants. For each
// row they are the maximum, the sum of exp(logit - maximum), and the target's logit (llmc/device/ops.h:
// classifier_statistics).
//
// N rows of V / ranks columns are read once, and 12 bytes per row are written. Memory is the limit: N V /
// ranks elements. (dev/classifier.cu, the whole classifier in one kernel, keeps the row until it is written.
// Here the other ranks' sums have to come first, so classifier_from_statistics.cu reads it again.)
//   1  A block does a row in two passes, the maximum and the sum. That is two reads, the second from cache if
//      it still has the row; a load has 2 bytes.
//   2  The maximum and the sum in one pass: when the maximum grows, the sum so far is scaled down (Milakov &
//      Gimelshein 2018). One read. The running maximum is scaled by log2(e). The reported maximum must be the
//      logit itself, so it is kept too.
//   3  16-byte loads, four of them in flight. With one load at a time a multiprocessor would be idle, since a
//      part of a row is short (llmc/device/cuda/classifier_parts.cuh).
#include "dev/lab/lab.h"
#include "llmc/device/cuda/classifier_parts.cuh"

namespace lab::classifier_statistics_variants {

using namespace llmc::cuda;
using llmc::ignored_target;

template <class X>
__device__ __forceinline__ float target_logit(const X* row, int target, OwnColumns own) {
    const int column = own.of(target);
    return column >= 0 ? to_float(row[column]) : 0;
}

template <class X>
__global__ void __launch_bounds__(1024)
    classifier_statistics_kernel1(RowStatistics* statistics, const X* logits, const std::int32_t* targets,
                                  int columns, OwnColumns own) {
    const std::int64_t row = blockIdx.x;
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    if (targets[row] == ignored_target) {
        if (first == 0) statistics[row] = RowStatistics::none();
        return;
    }
    const X* const x = logits + row * columns;
    float maximum = -INFINITY;
    for (int v = first; v < own.count; v += step) maximum = fmaxf(maximum, to_float(x[v]));
    maximum = block_maximum(maximum);
    float sum = 0;
    for (int v = first; v < own.count; v += step) sum += expf(to_float(x[v]) - maximum);
    sum = block_sum(sum);
    if (first == 0) statistics[row] = {maximum, sum, target_logit(x, targets[row], own)};
}

template <class X>
__global__ void __launch_bounds__(1024)
    classifier_statistics_kernel2(RowStatistics* statistics, const X* logits, const std::int32_t* targets,
                                  int columns, OwnColumns own) {
    SHARED(ExponentialSum, partials, [warp_threads]);
    const std::int64_t row = blockIdx.x;
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    if (targets[row] == ignored_target) {
        if (first == 0) statistics[row] = RowStatistics::none();
        return;
    }
    const X* const x = logits + row * columns;
    float maximum = -INFINITY;
    ExponentialSum total = ExponentialSum::none();
    for (int v = first; v < own.count; v += step) {
        const float one[] = {to_float(x[v])};
        maximum = fmaxf(maximum, total.add(one));
    }
    maximum = block_maximum(maximum);
    total = block_sum(total, partials);
    if (first == 0) statistics[row] = {maximum, total.sum, target_logit(x, targets[row], own)};
}

template <class X>
class ClassifierStatistics : public Problem {
  public:
    // The first rank's columns. Targets are in the columns of all ranks.
    ClassifierStatistics(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          own_{0, static_cast<int>(shape[1])},
          columns_(std::max(8, blocks_for(own_.count, 8) * 8)),
          logits_(rows_ * columns_),
          statistics_(3 * rows_),
          targets_(rows_) {
        draw.normal(logits_, 2);
        draw.below(targets_, 2 * own_.count + 1);
        targets_[rows_ / 2] = ignored_target;
        for (std::int64_t row = 0; row < rows_; ++row) {
            for (int v = own_.count; v < columns_; ++v) logits_[row * columns_ + v] = from_float<X>(50);
        }
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        const auto a_row_a_block = [&](auto kernel) {
            launch(on, kernel, static_cast<unsigned>(rows_), block_size, 0,
                   reinterpret_cast<RowStatistics*>(statistics_.data()), logits_.data(), targets_.data(),
                   columns_, own_);
        };
        switch (variant) {
            case 1:
                return a_row_a_block(classifier_statistics_kernel1<X>);
            case 2:
                return a_row_a_block(classifier_statistics_kernel2<X>);
            case 3:
                return classifier_statistics(on, statistics_.data(), logits_.data(), targets_.data(), rows_,
                                             columns_, own_, block_size);
            default:
                llmc::programming_error("no such variant");
        }
    }

    void reset() override { statistics_.clear(); }

    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        for (std::int64_t row = 0; row < rows_; ++row) {
            const X* x = logits_.data() + row * columns_;
            const float* got = statistics_.data() + 3 * row;
            double greatest = -HUGE_VAL, least = HUGE_VAL, sum = 0;
            if (targets_[row] != ignored_target) {
                for (int v = 0; v < own_.count; ++v) {
                    greatest = std::max(greatest, double{to_float(x[v])});
                    least = std::min(least, double{to_float(x[v])});
                }
                for (int v = 0; v < own_.count; ++v) sum += std::exp(to_float(x[v]) - greatest);
            }
            const bool here = targets_[row] >= 0 && targets_[row] < own_.count;
            comparison.see_equal("logits", row, got[2], here ? to_float(x[targets_[row]]) : 0);
            comparison.see_equal("maxima", row, got[0], static_cast<float>(greatest));
            if (sum == 0) {
                comparison.see_equal("sums", row, got[1], 0);
                continue;
            }
            // A sum is added up by at least 32 threads, and their sums in a tree of 10 levels. That makes
            // `length` additions. The sum is scaled at most once per addition (an exponential of 2 ulp, 4u,
            // and a product, u). A term has the 2 ulp of exp and the rounding of its argument, u times the
            // argument, twice. The maximum to which the sum is relative is rounded too.
            const double length = own_.count / 32.0 + 18;
            const double error = (6 * length + 4 + 2 * (greatest - least) + std::fabs(greatest)) * u;
            comparison.see("sums", row, got[1], sum, error * sum);
        }
    }

    double bytes() const override { return static_cast<double>(logits_.bytes() + statistics_.bytes()); }

  private:
    std::int64_t rows_;
    OwnColumns own_;
    int columns_;
    Array<X> logits_;
    Array<float> statistics_;
    Array<std::int32_t> targets_;
};

const Registration registration({
    .name = "classifier_statistics",
    .sizes = {"rows", "columns"},
    .variants = {{1, "a block does a row in two passes", {32, 256, 1024}},
                 {2, "online softmax: one pass", {32, 256, 1024}},
                 {3, "four 16-byte loads in flight", {32, 128, 256, 512}}},
    .checked = {{3, 37}, {1, 1}, {2, 0}, {4, 1003}, {3, 6288}},
    .timed = {{8192, 6288}, {8192, 25152}},
    .dtypes = {llmc::DType::bf16, llmc::DType::fp32},
    .takes = {},
    .make = make_problem<ClassifierStatistics>,
});

}  // namespace lab::classifier_statistics_variants
