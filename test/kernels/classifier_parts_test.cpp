// The kernels of the classifier for ranks with some columns each, compared with the CPU device.
#include "llmc/device/cuda/classifier_parts.cuh"

#include <numeric>

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::cuda::OwnColumns;

// The number of columns of each rank, and the stored columns. With one multiprocessor a block does many rows.
struct Shape {
    std::int64_t rows;
    std::vector<int> columns;
    int stored;
    int multiprocessors;
    double mean = 0;  // mean of the logits
};
const std::vector<Shape> part_shapes = {
    {40, {40, 30}, 40, 1},
    {7, {128}, 128, 108},
    {5, {0, 3, 0, 1}, 8, 108},
    {6, {2100, 2100, 9}, 2176, 1},
    {3, {9000, 8999}, 9088, 2},
    // exp(-300) is 0 in fp32. The sum would be 0 if its first maximum were not far below the logits.
    {4, {100, 60}, 128, 108, -300}};

// The second shape has blocks of several warps, and several rows per block.
const std::vector<Shape> part_shapes_for_races = {{40, {40, 30}, 40, 1}, {70, {700, 600}, 704, 1}};

template <class X>
class ClassifierParts : public Kernels<X> {};
TYPED_TEST_SUITE(ClassifierParts, Dtypes);

// The losses and dlogits of all ranks, with their inputs and statistics.
template <class X>
class Run {
  public:
    Run(const Shape& shape, Draw& draw)
        : shape_(shape),
          ranks_(static_cast<int>(shape.columns.size())),
          targets(shape.rows),
          statistics(ranks_ * shape.rows * 3),
          losses(ranks_ * shape.rows),
          before(ranks_ * shape.rows * shape.stored),
          logits(before.size()) {
        draw.normal(before, 2, shape.mean);
        draw.below(targets, std::accumulate(shape.columns.begin(), shape.columns.end(), 0));
        for (int r = 0; r < ranks_; ++r) {
            // The first column of a rank, which the rank before could confuse with its padding.
            if (r < shape.rows && shape.columns[static_cast<std::size_t>(r)] > 0)
                targets[r] = static_cast<std::int32_t>(own(r).first);
            for (std::int64_t row = 0; row < shape.rows; ++row) {
                for (int v = own(r).count; v < shape.stored; ++v)
                    before[(r * shape.rows + row) * shape.stored + v] = llmc::cuda::from_float<X>(99);
            }
        }
        targets[shape.rows - 1] = llmc::ignored_target;
    }

    int ranks() const { return ranks_; }
    OwnColumns own(int rank) const {
        const auto begin = shape_.columns.begin();
        return {std::accumulate(begin, begin + rank, std::int64_t{0}), *(begin + rank)};
    }

    void on_gpu(LaunchContext on, bool write_dlogits) {
        on.chip.multiprocessors = shape_.multiprocessors;
        start();
        for (int r = 0; r < ranks_; ++r) {
            llmc::cuda::classifier_statistics(on, statistics.data() + r * shape_.rows * 3, logits_of(r),
                                              targets.data(), shape_.rows, shape_.stored, own(r));
        }
        for (int r = 0; r < ranks_; ++r) {
            llmc::cuda::classifier_from_statistics(on, logits_of(r), losses.data() + r * shape_.rows,
                                                   statistics.data(), targets.data(), ranks_, shape_.rows,
                                                   shape_.stored, own(r), scale, write_dlogits);
        }
        synchronize();
    }

    void on_cpu() {
        const std::int64_t N = shape_.rows;
        start();
        const auto of_rank = [&](Array<X>& all, int r) {
            return tensor(all, {ranks_, N, shape_.stored}).slice(r, 1).view({N, shape_.stored});
        };
        for (int r = 0; r < ranks_; ++r) {
            cpu().run(llmc::ClassifierStatistics{tensor(statistics, {ranks_, N, 3}).slice(r, 1).view({N, 3}),
                                                 of_rank(logits, r), tensor(targets, {N}), own(r).count,
                                                 own(r).first});
        }
        for (int r = 0; r < ranks_; ++r) {
            cpu().run(llmc::ClassifierFromStatistics{of_rank(logits, r),
                                                     tensor(losses, {ranks_, N}).slice(r, 1),
                                                     tensor(statistics, {ranks_, N, 3}), tensor(targets, {N}),
                                                     own(r).count, own(r).first, scale, true});
        }
    }

    static constexpr float scale = 0.3f;

  private:
    void start() {
        logits.copy_from(before);
        losses.clear();
        statistics.clear();
    }
    X* logits_of(int rank) { return logits.data() + rank * shape_.rows * shape_.stored; }

    const Shape& shape_;
    int ranks_;

  public:
    Array<std::int32_t> targets;
    Array<float> statistics, losses;
    Array<X> before, logits;
};

TYPED_TEST(ClassifierParts, StatisticsLossesAndGradient) {
    using X = TypeParam;
    for (const Shape& shape : shapes(part_shapes, part_shapes_for_races)) {
        Draw draw(seed()), same_draw(seed());
        Run<X> gpu(shape, draw), expected(shape, same_draw);
        expected.on_cpu();
        const int vocabulary = std::accumulate(shape.columns.begin(), shape.columns.end(), 0);
        for (const auto& on : launch_contexts()) {
            gpu.on_gpu(on, true);
            // Derived as in classifier_test.cpp, with one more rescaling (an exponential of 2 ulp and a
            // product) and one more addition for each rank. Each rank's sum is relative to an exponential of
            // the rounded maximum.
            const double u = lab::unit_roundoff<float>, length = vocabulary / 32.0 + 18;
            const double term_error = (4 + 2 * 24) * u;
            const double largest = 12 + std::fabs(shape.mean);
            const double sum_error = (2.25 * length + 2 + 7 * gpu.ranks()) * u + term_error;
            Comparison comparison;
            for (std::int64_t i = 0; i < gpu.statistics.size(); ++i) {
                const double wanted = expected.statistics[i];
                if (i % 3 == 1) {
                    comparison.see("sums", i, gpu.statistics[i], wanted,
                                   (2 * sum_error + 2 * largest * u) * wanted);
                } else {
                    EXPECT_EQ(gpu.statistics[i], expected.statistics[i]) << i;
                }
            }
            for (std::int64_t i = 0; i < gpu.losses.size(); ++i) {
                comparison.see("losses", i, gpu.losses[i], expected.losses[i],
                               2 * (sum_error + 4 * u * (2 * largest + std::log(vocabulary) + 1)));
                EXPECT_EQ(gpu.losses[i], gpu.losses[i % shape.rows]) << "the same on every rank";
            }
            for (std::int64_t i = 0; i < gpu.logits.size(); ++i) {
                const auto row = i / shape.stored % shape.rows;
                const OwnColumns own = gpu.own(static_cast<int>(i / shape.stored / shape.rows));
                const double d = to_float(expected.logits[i]);
                const bool is_target = own.first + i % shape.stored == gpu.targets[row];
                const double p = d + (is_target ? double{Run<X>::scale} : 0.0);  // times scale
                const double error = (sum_error + term_error) * std::fabs(p) + 4 * u * std::fabs(d);
                comparison.see("dlogits", i, to_float(gpu.logits[i]), d, twice_rounded<X>(d, error));
                if (d == 0) comparison.see_equal("zeros", i, to_float(gpu.logits[i]), 0);
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(ClassifierParts, LossesAloneLeaveTheLogits) {
    using X = TypeParam;
    for (const Shape& shape : shapes(part_shapes, part_shapes_for_races)) {
        Draw draw(seed());
        Run<X> run(shape, draw);
        const LaunchContext on = launch_contexts().front();
        run.on_gpu(on, true);
        Array<float> with_gradient(run.losses.size());
        with_gradient.copy_from(run.losses);
        run.on_gpu(on, false);
        EXPECT_EQ(std::memcmp(run.logits.data(), run.before.data(), run.before.bytes()), 0);
        EXPECT_EQ(std::memcmp(run.losses.data(), with_gradient.data(), with_gradient.bytes()), 0);
    }
}

TYPED_TEST(ClassifierParts, SameBitsFromRunToRun) {
    using X = TypeParam;
    for (const Shape& shape : shapes(part_shapes, part_shapes_for_races)) {
        Draw draw(seed());
        Run<X> run(shape, draw);
        const LaunchContext on = launch_contexts().front();
        run.on_gpu(on, true);
        Array<float> statistics(run.statistics.size()), losses(run.losses.size());
        Array<X> logits(run.logits.size());
        statistics.copy_from(run.statistics);
        losses.copy_from(run.losses);
        logits.copy_from(run.logits);
        run.on_gpu(on, true);
        EXPECT_EQ(std::memcmp(run.statistics.data(), statistics.data(), statistics.bytes()), 0);
        EXPECT_EQ(std::memcmp(run.losses.data(), losses.data(), losses.bytes()), 0);
        EXPECT_EQ(std::memcmp(run.logits.data(), logits.data(), logits.bytes()), 0);
    }
}

}  // namespace
}  // namespace kernel_test
