// The losses and the gradient of a rank's columns of the logits, from the statistics of all ranks, in three
// variants (llmc/device/ops.h: classifier_from_statistics; dev/classifier_statistics.cu computes the
// statistics).
//
// A logit is read and replaced by its gradient. The statistics of a row have 12 bytes per rank. Memory is the
// limit: 2 N V / ranks elements.
//   1  A thread does an element, and combines the ranks' sums for it: as many exponentials and 12-byte loads
//      as there are ranks, and a division, for 4 bytes.
//   2  A block does a row: one thread combines the sums, and the others wait for it at a barrier, once per
//      row.
//   3  16-byte loads, four of them in flight. Each thread combines the sums itself, which for a few ranks
//      takes less time than a barrier: all read the same 12 bytes, from cache, and no warp waits for another.
//      The grid is persistent, and the blocks of a multiprocessor are at different stages of their rows
//      (llmc/device/cuda/classifier_parts.cuh).
// Shapes with a cap also have a z-loss. A logit is capped once more, for its slope: an ex2 and a rcp, and the
// same bytes.
#include "dev/lab/lab.h"
#include "llmc/device/cuda/classifier_parts.cuh"

namespace lab::classifier_from_statistics_variants {

using namespace llmc::cuda;
using llmc::ignored_target;

// A row's target, and the combined statistics of all ranks.
struct Row {
    float maximum, sum, target_logit;
    int target;  // its column here, or -1 if another rank has it
    bool ignored;

    __device__ float loss() const { return ignored ? 0 : logf(sum) - (target_logit - maximum); }
    template <class Cap>
    __device__ float dlogit(float logit, int column, OwnColumns own, float scale, const Cap& cap,
                            float z_loss) const {
        if (ignored || column >= own.count) return 0;
        const Capped y = cap(logit);
        const float p = expf(y.value - maximum) / sum * (1 + 2 * z_loss * (logf(sum) + maximum));
        return (p - (column == target ? 1.0f : 0.0f)) * scale * y.slope;
    }
};

__device__ Row row_of(const RowStatistics* statistics, const std::int32_t* targets, int ranks,
                      std::int64_t rows, std::int64_t row, OwnColumns own) {
    Row r{-INFINITY, 0, 0, own.of(targets[row]), targets[row] == ignored_target};
    if (r.ignored) return r;
    for (int i = 0; i < ranks; ++i) r.maximum = fmaxf(r.maximum, statistics[i * rows + row].maximum);
    for (int i = 0; i < ranks; ++i) {
        const RowStatistics s = statistics[i * rows + row];
        r.sum += s.sum * expf(s.maximum - r.maximum);
        r.target_logit += s.target_logit;
    }
    return r;
}

template <class X, class Cap>
__global__ void classifier_from_statistics_kernel1(X* logits, float* losses, const RowStatistics* statistics,
                                                   const std::int32_t* targets, int ranks, std::int64_t rows,
                                                   int columns, OwnColumns own, float scale, Cap cap,
                                                   float z_loss) {
    const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const std::int64_t row = i / columns;
    const int column = static_cast<int>(i % columns);
    if (row >= rows) return;
    const Row r = row_of(statistics, targets, ranks, rows, row, own);
    if (column == 0) losses[row] = r.loss();
    logits[i] = from_float<X>(r.dlogit(to_float(logits[i]), column, own, scale, cap, z_loss));
}

template <class X, class Cap>
__global__ void __launch_bounds__(1024)
    classifier_from_statistics_kernel2(X* logits, float* losses, const RowStatistics* statistics,
                                       const std::int32_t* targets, int ranks, std::int64_t rows, int columns,
                                       OwnColumns own, float scale, Cap cap, float z_loss) {
    SHARED(Row, shared_row, [1]);
    const std::int64_t row = blockIdx.x;
    if (threadIdx.x == 0) {
        shared_row[0] = row_of(statistics, targets, ranks, rows, row, own);
        losses[row] = shared_row[0].loss();
    }
    __syncthreads();
    const Row r = shared_row[0];
    X* const x = logits + row * columns;
    for (int c = static_cast<int>(threadIdx.x); c < columns; c += static_cast<int>(blockDim.x)) {
        x[c] = from_float<X>(r.dlogit(to_float(x[c]), c, own, scale, cap, z_loss));
    }
}

template <class X>
class ClassifierFromStatistics : public Problem {
  public:
    // The second of the ranks, all of which have the same number of columns.
    ClassifierFromStatistics(const Shape& shape, Draw& draw)
        : rows_(shape[0]),
          ranks_(static_cast<int>(shape[2])),
          own_{ranks_ > 1 ? shape[1] : 0, static_cast<int>(shape[1])},
          columns_(std::max(8, blocks_for(own_.count, 8) * 8)),
          terms_{static_cast<float>(shape[3]), shape[3] > 0 ? 0x1p-7f : 0.0f},
          logits_(rows_ * columns_),
          result_(rows_ * columns_),
          statistics_(ranks_ * rows_ * 3),
          losses_(rows_),
          targets_(rows_) {
        draw.normal(logits_, 2);
        draw.normal(statistics_, 1, 4);
        draw.below(targets_, ranks_ * std::max(1, own_.count));
        targets_[rows_ / 2] = ignored_target;
        for (std::int64_t i = 0; i < ranks_ * rows_; ++i) {
            float* const s = statistics_.data() + 3 * i;
            s[1] = 2 + s[1] * s[1];  // sums are positive
            if (i / rows_ != ranks_ / 2) s[2] = 0;
        }
        for (std::int64_t row = 0; row < rows_; ++row) {
            for (int v = own_.count; v < columns_; ++v) logits_[row * columns_ + v] = from_float<X>(50);
        }
    }

    void run(int variant, int block_size, const LaunchContext& on) override {
        llmc::cuda::detail::with_cap(terms_.cap, [&]<class Cap>(Cap cap) {
            const auto launch_with = [&](auto kernel, std::int64_t blocks) {
                launch(on, kernel, static_cast<unsigned>(blocks), block_size, 0, result_.data(),
                       losses_.data(), reinterpret_cast<const RowStatistics*>(statistics_.data()),
                       targets_.data(), ranks_, rows_, columns_, own_, scale, cap, terms_.z_loss);
            };
            switch (variant) {
                case 1:
                    return launch_with(classifier_from_statistics_kernel1<X, Cap>,
                                       blocks_for<std::int64_t>(rows_ * columns_, block_size));
                case 2:
                    return launch_with(classifier_from_statistics_kernel2<X, Cap>, rows_);
                case 3:
                    return classifier_from_statistics(on, result_.data(), losses_.data(), statistics_.data(),
                                                      targets_.data(), ranks_, rows_, columns_, own_, scale,
                                                      true, terms_, block_size);
                default:
                    llmc::programming_error("no such variant");
            }
        });
    }

    void reset() override {
        result_.copy_from(logits_);
        losses_.clear();
    }

    void compare(Comparison& comparison) override {
        constexpr double u = unit_roundoff<float>;
        for (std::int64_t row = 0; row < rows_; ++row) {
            const X* x = logits_.data() + row * columns_;
            const X* got = result_.data() + row * columns_;
            if (targets_[row] == ignored_target) {
                comparison.see_equal("losses", row, losses_[row], 0);
                for (int v = 0; v < columns_; ++v) comparison.see_equal("dlogits", v, to_float(got[v]), 0);
                continue;
            }
            const auto statistic = [&](int rank, int which) {
                return double{statistics_[(rank * rows_ + row) * 3 + which]};
            };
            double maximum = -HUGE_VAL, least = HUGE_VAL, sum = 0, target_logit = 0;
            for (int r = 0; r < ranks_; ++r) {
                maximum = std::max(maximum, statistic(r, 0));
                least = std::min(least, statistic(r, 0));
                target_logit += statistic(r, 2);
            }
            for (int r = 0; r < ranks_; ++r) sum += statistic(r, 1) * std::exp(statistic(r, 0) - maximum);
            // A rank's term has the 2 ulp of exp (4u), a product, and additions. Its argument is rounded
            // twice: in the difference and in its factor. Both maxima are rounded when they are multiplied by
            // log2(e).
            const double largest = std::max(std::fabs(maximum), std::fabs(least));
            const double sum_error = (ranks_ + 5 + 2 * (maximum - least) + 2 * largest) * u;
            const double cap = terms_.cap, z = terms_.z_loss, lse = std::log(sum) + maximum;
            const double loss_error =
                sum_error + 4 * u * (2 * (largest + std::fabs(target_logit)) + std::log(sum) + 1);
            comparison.see("losses", row, losses_[row], lse - target_logit, loss_error);
            const double factor = 1 + 2 * z * lse, factor_error = 2 * z * loss_error + 3 * u * factor;
            for (int v = 0; v < own_.count; ++v) {
                const double l = to_float(x[v]), y = cap > 0 ? cap * std::tanh(l / cap) : l;
                const double argument = y - maximum;
                const double p = std::exp(argument) / sum;
                const double d = p * factor - (own_.first + v == targets_[row] ? 1 : 0);
                // A capped logit has an error of 18 u cap (dev/soft_cap.cu). Its slope has that of
                // dev/classifier.cu.
                const double slope = cap > 0 ? 1 - std::pow(y / cap, 2) : 1;
                const double slope_error = cap > 0 ? (6 * std::fabs(l) / cap + 14) * u : 0;
                const double term_error = (4 + 2 * std::fabs(argument) + largest + 18 * cap) * u;
                const double error = (sum_error + term_error) * p * factor + factor_error * p +
                                     (5 * u + slope_error) * std::fabs(d);
                comparison.see("dlogits", row * columns_ + v, to_float(got[v]), d * scale * slope,
                               rounded<X>(d * scale * slope, scale * slope * error));
            }
            for (int v = own_.count; v < columns_; ++v) {
                comparison.see_equal("padding", row * columns_ + v, to_float(got[v]), 0);
            }
        }
    }

    double bytes() const override {
        return static_cast<double>(2 * logits_.bytes() + statistics_.bytes() + losses_.bytes());
    }

  private:
    static constexpr float scale = 0.125f;
    std::int64_t rows_;
    int ranks_;
    OwnColumns own_;
    int columns_;
    llmc::ClassifierTerms terms_;
    Array<X> logits_, result_;
    Array<float> statistics_, losses_;
    Array<std::int32_t> targets_;
};

const Registration registration({
    .name = "classifier_from_statistics",
    .sizes = {"rows", "columns", "ranks", "cap"},
    .variants = {{1, "one element a thread", {32, 256, 1024}},
                 {2, "a block does a row", {32, 256, 1024}},
                 {3, "four 16-byte loads in flight, no barrier", {32, 128, 256, 512}}},
    .checked = {{3, 37, 2, 0},
                {1, 1, 1, 0},
                {2, 0, 3, 0},
                {4, 1003, 8, 0},
                {3, 6288, 2, 0},
                {3, 37, 2, 15},
                {2, 0, 3, 15},
                {4, 1003, 8, 15}},
    .timed = {{8192, 6288, 8, 0}, {8192, 25152, 2, 0}, {8192, 25152, 2, 15}},
    .takes = {},
    .make = make_problem<ClassifierFromStatistics>,
    .checked_for_races = {{3, 37, 2, 0}, {3, 37, 2, 15}},
});

}  // namespace lab::classifier_from_statistics_variants
