// The classifier's kernel against the CPU device.
#include "llmc/device/cuda/classifier.cuh"

#include <algorithm>

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

// With one multiprocessor a block does many rows, and copies a row while it writes the previous one.
struct Shape {
    std::int64_t rows;
    int vocabulary;
    int columns;
    int multiprocessors;
    double mean = 0;  // mean of the logits
};
// A row of 50257 fp32 fits only the shared memory of sm_90; a row of 50257 bf16 fits that of all chips.
const std::vector<Shape> classifier_shapes = {
    {40, 300, 384, 1},
    {4, 37, 128, 108},
    {1, 1, 128, 1},
    {5, 128, 128, 108},
    {6, 50257, 50304, 1},
    // exp(-300) is 0 in fp32. The sum would be 0 if its first maximum were not far below the logits.
    {4, 200, 256, 108, -300}};

template <class X>
class Classifier : public Kernels<X> {};
TYPED_TEST_SUITE(Classifier, Dtypes);

template <class X>
struct Problem {
    Problem(const Shape& shape, Draw& draw)
        : rows(shape.rows),
          vocabulary(shape.vocabulary),
          columns(shape.columns),
          logits(rows * columns),
          targets(rows) {
        draw.normal(logits, 2, shape.mean);
        draw.below(targets, vocabulary);
        // They include consecutive rows of a block, and the first row.
        for (const std::int64_t row : {rows / 2, rows / 2 + 1, rows - 1}) {
            if (row > 1 && row < rows) targets[row] = llmc::ignored_target;
        }
        if (rows == 5) targets[0] = llmc::ignored_target;
        for (std::int64_t row = 0; row < rows; ++row) {
            for (int v = vocabulary; v < columns; ++v)
                logits[row * columns + v] = llmc::cuda::from_float<X>(99);
        }
    }

    std::int64_t rows;
    int vocabulary, columns;
    Array<X> logits;
    Array<std::int32_t> targets;
};

// Records the shared memory of a block. A row that fits is read once, so the block must hold all of it.
struct SharedBytes : llmc::cuda::LaunchObserver {
    void launched(const llmc::cuda::LaunchRecord& record) override {
        of_a_block = record.dynamic_shared_bytes;
    }
    std::size_t of_a_block = 0;
};

template <class X>
void run(LaunchContext on, const Shape& shape, const Problem<X>& problem, Array<X>& logits,
         Array<float>& losses, float scale, bool write_dlogits) {
    on.chip.multiprocessors = shape.multiprocessors;
    SharedBytes shared;
    on.observer = &shared;
    logits.copy_from(problem.logits);
    losses.clear();
    llmc::cuda::fused_classifier(on, logits.data(), losses.data(), problem.targets.data(), problem.rows,
                                 problem.columns, problem.vocabulary, scale, write_dlogits);
    synchronize();
    const std::size_t row_bytes = static_cast<std::size_t>(shape.vocabulary) * sizeof(X);
    const bool fits = sizeof(X) == 2 || row_bytes + 1024 <= on.chip.shared_bytes_per_block;
    EXPECT_GE(shared.of_a_block, fits ? row_bytes : 0);
}

TYPED_TEST(Classifier, LossesAndGradient) {
    using X = TypeParam;
    const float scale = 0.3f;
    for (const Shape& shape : shapes(classifier_shapes)) {
        Draw draw(seed());
        Problem<X> problem(shape, draw);
        const std::int64_t rows = shape.rows, columns = shape.columns;
        Array<X> expected(rows * columns), logits(rows * columns);
        Array<float> expected_losses(rows), losses(rows);
        expected.copy_from(problem.logits);
        cpu().run(llmc::FusedClassifier{tensor(expected, {rows, columns}), tensor(expected_losses, {rows}),
                                        tensor(problem.targets, {rows}), shape.vocabulary, scale, true});
        for (const auto& on : launch_contexts()) {
            run(on, shape, problem, logits, losses, scale, true);
            // Derived as in dev/classifier.cu: sums of `length` additions, at most one in 4 with a rescaling,
            // of terms that have their own error. The logits differ from their mean by less than 2 * 6, so
            // their differences are below 24. Both devices have these errors.
            const double u = lab::unit_roundoff<float>, length = shape.vocabulary / 32.0 + 18;
            const double term_error = (4 + 2 * 24) * u;
            const double largest = 12 + std::fabs(shape.mean);
            const double sum_error = 2.25 * length * u + 2 * u + term_error;
            Comparison comparison;
            for (std::int64_t row = 0; row < rows; ++row) {
                comparison.see("losses", row, losses[row], expected_losses[row],
                               2 * (sum_error + 4 * u * (2 * largest + std::log(shape.vocabulary) + 1)));
                for (std::int64_t i = row * columns; i < (row + 1) * columns; ++i) {
                    const double d = to_float(expected[i]);
                    const bool is_target = i - row * columns == problem.targets[row];
                    const double p = d + (is_target ? double{scale} : 0.0);  // times scale
                    const double error = (sum_error + term_error) * std::fabs(p) + 4 * u * std::fabs(d);
                    comparison.see("dlogits", i, to_float(logits[i]), d, twice_rounded<X>(d, error));
                    if (d == 0) comparison.see_equal("zeros", i, to_float(logits[i]), 0);
                }
            }
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(Classifier, LossesAloneLeaveTheLogits) {
    using X = TypeParam;
    for (const Shape& shape : shapes(classifier_shapes)) {
        Draw draw(seed());
        Problem<X> problem(shape, draw);
        Array<X> logits(problem.logits.size()), written(problem.logits.size());
        Array<float> losses(shape.rows), with_gradient(shape.rows);
        for (const auto& on : launch_contexts()) {
            run(on, shape, problem, written, with_gradient, 1, true);
            run(on, shape, problem, logits, losses, 1, false);
            EXPECT_EQ(std::memcmp(logits.data(), problem.logits.data(), logits.bytes()), 0);
            EXPECT_EQ(std::memcmp(losses.data(), with_gradient.data(), losses.bytes()), 0);
        }
    }
}

TYPED_TEST(Classifier, SameBitsFromRunToRun) {
    using X = TypeParam;
    for (const Shape& shape : shapes(classifier_shapes)) {
        Draw draw(seed());
        Problem<X> problem(shape, draw);
        Array<X> first(problem.logits.size()), second(problem.logits.size());
        Array<float> first_losses(shape.rows), second_losses(shape.rows);
        const auto on = launch_contexts().front();
        run(on, shape, problem, first, first_losses, 1, true);
        run(on, shape, problem, second, second_losses, 1, true);
        EXPECT_EQ(std::memcmp(first.data(), second.data(), first.bytes()), 0);
        EXPECT_EQ(std::memcmp(first_losses.data(), second_losses.data(), first_losses.bytes()), 0);
    }
}

// The exponential of the largest logit alone would overflow. A logit of minus infinity has probability 0,
// also if a thread has no other logits.
TYPED_TEST(Classifier, ExtremeLogits) {
    using X = TypeParam;
    constexpr int vocabulary = 300, columns = 384;
    Array<X> logits(columns);
    Array<float> losses(1);
    Array<std::int32_t> targets(1);
    targets[0] = 299;
    for (int v = 0; v < columns; ++v) logits[v] = llmc::cuda::from_float<X>(-INFINITY);
    logits[150] = llmc::cuda::from_float<X>(1024);
    logits[299] = llmc::cuda::from_float<X>(1024);
    llmc::cuda::fused_classifier(launch_contexts().front(), logits.data(), losses.data(), targets.data(), 1,
                                 columns, vocabulary, 1, true);
    synchronize();
    EXPECT_NEAR(losses[0], std::log(2.0), 1024 * 4 * lab::unit_roundoff<float>);
    for (int v = 0; v < columns; ++v) {
        const float expected = v == 150 ? 0.5f : v == 299 ? -0.5f : 0.0f;
        EXPECT_EQ(to_float(logits[v]), expected) << v;
    }
}

// The largest logits that are allowed (ExponentialSum::none) or that X has.
TYPED_TEST(Classifier, LogitsOfTheGreatestSize) {
    using X = TypeParam;
    constexpr int vocabulary = 300, columns = 384;
    Array<X> logits(columns);
    Array<float> losses(1);
    Array<std::int32_t> targets(1);
    targets[0] = 7;
    const float greatest = std::min(1e9f, largest<X>);
    for (const float size : {-greatest, greatest}) {
        for (int v = 0; v < columns; ++v) logits[v] = llmc::cuda::from_float<X>(size);
        llmc::cuda::fused_classifier(launch_contexts().front(), logits.data(), losses.data(), targets.data(),
                                     1, columns, vocabulary, 1, true);
        synchronize();
        EXPECT_TRUE(std::isfinite(losses[0]));  // log(300) is less than the last place of the logits
        Comparison comparison;
        for (int v = 0; v < vocabulary; ++v) {
            const double expected = 1.0 / vocabulary - (v == 7);
            comparison.see("dlogits", v, to_float(logits[v]), expected,
                           twice_rounded<X>(expected, 300 * lab::unit_roundoff<float> * std::fabs(expected)));
        }
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }
}

// A grid without blocks would leave the logits unchanged.
TYPED_TEST(Classifier, RefusesBlocksThatDoNotFit) {
    using X = TypeParam;
    constexpr int columns = 1 << 14;
    Array<X> logits(columns);
    Array<float> losses(1);
    Array<std::int32_t> targets(1);
    targets[0] = 0;
    EXPECT_THROW(llmc::cuda::fused_classifier(launch_contexts().front(), logits.data(), losses.data(),
                                              targets.data(), 1, columns, columns, 1, true, {}, 2048),
                 llmc::ProgrammingError);
}

}  // namespace
}  // namespace kernel_test
