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
// Shapes with a cap take y = cap tanh(x/cap) for each logit x: an ex2 and a rcp more, and the same bytes.
#include "dev/lab/lab.h"
#include "llmc/device/cuda/classifier_parts.cuh"

namespace lab::classifier_statistics_variants {

using namespace llmc::cuda;
using llmc::ignored_target;

template <class X, class Cap>
__device__ __forceinline__ float target_logit(const X* row, int target, OwnColumns own, const Cap& cap) {
    const int column = own.of(target);
    return column >= 0 ? cap(to_float(row[column])).value : 0;
}

template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_statistics_kernel1(RowStatistics* statistics, const X* logits, const std::int32_t* targets,
                                  int columns, OwnColumns own, Cap cap) {
    const std::int64_t row = blockIdx.x;
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    if (targets[row] == ignored_target) {
        if (first == 0) statistics[row] = RowStatistics::none();
        return;
    }
    const X* const x = logits + row * columns;
    float maximum = -INFINITY;
    for (int v = first; v < own.count; v += step) maximum = fmaxf(maximum, cap(to_float(x[v])).value);
    maximum = block_maximum(maximum);
    float sum = 0;
    for (int v = first; v < own.count; v += step) sum += expf(cap(to_float(x[v])).value - maximum);
    sum = block_sum(sum);
    if (first == 0) statistics[row] = {maximum, sum, target_logit(x, targets[row], own, cap)};
}

template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_statistics_kernel2(RowStatistics* statistics, const X* logits, const std::int32_t* targets,
                                  int columns, OwnColumns own, Cap cap) {
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
        const float one[] = {cap(to_float(x[v])).value};
        maximum = fmaxf(maximum, total.add(one));
    }
    maximum = block_maximum(maximum);
    total = block_sum(total, partials);
    if (first == 0) statistics[row] = {maximum, total.sum, target_logit(x, targets[row], own, cap)};
}

template <class X>
class ClassifierStatistics : public Problem {
  public:
    // The first rank's columns. Targets are in the columns of all ranks.
    ClassifierStatistics(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          own_{0, static_cast<int>(shape[1])},
          columns_(std::max(8, blocks_for(own_.count, 8) * 8)),
          terms_{static_cast<float>(shape[2]), 0},
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
        llmc::cuda::detail::with_cap(terms_.cap, [&]<class Cap>(Cap cap) {
            const auto a_row_a_block = [&](auto kernel) {
                launch(on, kernel, static_cast<unsigned>(rows_), block_size, 0,
                       reinterpret_cast<RowStatistics*>(statistics_.data()), logits_.data(), targets_.data(),
                       columns_, own_, cap);
            };
            switch (variant) {
                case 1:
                    return a_row_a_block(classifier_statistics_kernel1<X, Cap>);
                case 2:
                    return a_row_a_block(classifier_statistics_kernel2<X, Cap>);
                case 3:
                    return classifier_statistics(on, statistics_.data(), logits_.data(), targets_.data(),
                                                 rows_, columns_, own_, terms_, block_size);
                default:
                    llmc::programming_error("no such variant");
            }
        });
    }

    void reset() override { statistics_.clear(); }

    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        for (std::int64_t row = 0; row < rows_; ++row) {
            const X* x = logits_.data() + row * columns_;
            const float* got = statistics_.data() + 3 * row;
            const double cap = terms_.cap;
            const auto y = [&](int v) {
                return cap > 0 ? cap * std::tanh(to_float(x[v]) / cap) : double{to_float(x[v])};
            };
            double greatest = -HUGE_VAL, least = HUGE_VAL, sum = 0;
            if (targets_[row] != ignored_target) {
                for (int v = 0; v < own_.count; ++v) {
                    greatest = std::max(greatest, y(v));
                    least = std::min(least, y(v));
                }
                for (int v = 0; v < own_.count; ++v) sum += std::exp(y(v) - greatest);
            }
            // A logit is exact. A capped one has an error of 18 u cap (dev/soft_cap.cu).
            const double cap_error = 18 * u * cap, exact = 0x1p-1000;
            const bool here = targets_[row] >= 0 && targets_[row] < own_.count;
            comparison.see("logits", row, got[2], here ? y(targets_[row]) : 0, std::max(cap_error, exact));
            comparison.see("maxima", row, got[0], greatest, std::max(cap_error, exact));
            if (sum == 0) {
                comparison.see_equal("sums", row, got[1], 0);
                continue;
            }
            // A sum is added up by at least 32 threads, and their sums in a tree of 10 levels. That makes
            // `length` additions. The sum is scaled at most once per addition (an exponential of 2 ulp, 4u,
            // and a product, u). A term has the 2 ulp of exp and the rounding of its argument, u times the
            // argument, twice. The maximum to which the sum is relative is rounded too,
            // and both may be capped.
            const double length = own_.count / 32.0 + 18;
            const double error =
                (6 * length + 4 + 2 * (greatest - least) + std::fabs(greatest)) * u + 2 * cap_error;
            comparison.see("sums", row, got[1], sum, error * sum);
        }
    }

    double bytes() const override { return static_cast<double>(logits_.bytes() + statistics_.bytes()); }

  private:
    std::int64_t rows_;
    OwnColumns own_;
    int columns_;
    llmc::ClassifierTerms terms_;
    Array<X> logits_;
    Array<float> statistics_;
    Array<std::int32_t> targets_;
};

const Registration registration({
    .name = "classifier_statistics",
    .sizes = {"rows", "columns", "cap"},
    .variants = {{1, "a block does a row in two passes", {32, 256, 1024}},
                 {2, "online softmax: one pass", {32, 256, 1024}},
                 {3, "four 16-byte loads in flight", {32, 128, 256, 512}}},
    .checked = {{3, 37, 0},
                {1, 1, 0},
                {2, 0, 0},
                {4, 1003, 0},
                {3, 6288, 0},
                {3, 37, 15},
                {2, 0, 15},
                {4, 1003, 15}},
    .timed = {{8192, 6288, 0}, {8192, 25152, 0}, {8192, 25152, 15}},
    .takes = {},
    .make = make_problem<ClassifierStatistics>,
    .checked_for_races = {{3, 37, 0}, {3, 37, 15}},
});

}  // namespace lab::classifier_statistics_variants
