// The classifier's cap and z-loss, and the cap alone, against the CPU device.
#include <cmath>
#include <cstring>
#include <vector>

#include "llmc/device/cuda/classifier_parts.cuh"
#include "llmc/device/cuda/soft_cap.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::ClassifierTerms;
using llmc::cuda::OwnColumns;

// With one multiprocessor a block does many rows.
struct Shape {
    std::int64_t rows;
    int vocabulary, columns;
    int multiprocessors;
};
const std::vector<Shape> term_shapes = {{40, 300, 384, 1}, {4, 37, 128, 108}, {3, 12000, 12032, 2}};
const std::vector<ClassifierTerms> all_terms = {{15, 0}, {0, 0.125f}, {30, 0x1p-7f}};
constexpr float scale = 0.3f;

template <class X>
class ClassifierOfTerms : public Kernels<X> {
  protected:
    struct Inputs {
        Array<X> logits;
        Array<std::int32_t> targets;

        explicit Inputs(const Shape& s) : logits(s.rows * s.columns), targets(s.rows) {
            Draw draw(seed());
            draw.normal(logits, 10);
            draw.below(targets, s.vocabulary);
            targets[s.rows / 2] = llmc::ignored_target;
            // Padding may hold any values, and must not matter.
            for (std::int64_t row = 0; row < s.rows; ++row) {
                for (int v = s.vocabulary; v < s.columns; ++v)
                    logits[row * s.columns + v] = llmc::cuda::from_float<X>(v % 2 == 0 ? NAN : 99);
            }
        }
    };

    // The bounds of dev/classifier.cu for one row: with a relative error of p, of 1 + 2 z lse and of the
    // cap's slope. Both devices have these errors.
    struct Bounds {
        double loss, p, factor, slope;

        Bounds(const Inputs& inputs, const Shape& s, std::int64_t row, const ClassifierTerms& terms) {
            constexpr double u = lab::unit_roundoff<float>;
            double greatest = -HUGE_VAL, least = HUGE_VAL, farthest = 0, sum = 0;
            const auto y = [&](int v) {
                const double x = to_float(inputs.logits[row * s.columns + v]);
                return terms.cap > 0 ? terms.cap * std::tanh(x / terms.cap) : x;
            };
            for (int v = 0; v < s.vocabulary; ++v) {
                greatest = std::fmax(greatest, y(v));
                least = std::fmin(least, y(v));
                farthest = std::fmax(farthest, std::fabs(to_float(inputs.logits[row * s.columns + v])));
            }
            for (int v = 0; v < s.vocabulary; ++v) sum += std::exp(y(v) - greatest);
            const double term_error = (4 + 2 * (greatest - least) + 36 * terms.cap) * u;
            const double sum_error = (2.25 * (s.vocabulary / 32.0 + 18) + 2) * u + term_error;
            const double largest = std::fmax(std::fabs(greatest), std::fabs(least));
            loss = sum_error + (4 * (2 * largest + std::log(sum) + 1) + 36 * terms.cap) * u;
            p = sum_error + term_error;
            factor = 1 + 2 * terms.z_loss * (std::log(sum) + greatest);
            p += (2 * terms.z_loss * loss) / factor + 3 * u;
            slope = terms.cap > 0 ? (6 * farthest / terms.cap + 14) * u : 0;
        }
    };

    static void compare(Comparison& comparison, const Inputs& inputs, const Shape& s,
                        const ClassifierTerms& terms, const Array<X>& dlogits, const Array<float>& losses,
                        const Array<X>& expected, const Array<float>& expected_losses) {
        constexpr double u = lab::unit_roundoff<float>;
        for (std::int64_t row = 0; row < s.rows; ++row) {
            if (inputs.targets[row] == llmc::ignored_target) {
                comparison.see_equal("losses", row, losses[row], 0);
            } else {
                const Bounds bounds(inputs, s, row, terms);
                comparison.see("losses", row, losses[row], expected_losses[row], 2 * bounds.loss);
                for (int v = 0; v < s.vocabulary; ++v) {
                    const std::int64_t i = row * s.columns + v;
                    const double x = to_float(inputs.logits[i]), d = to_float(expected[i]);
                    const double slope = terms.cap > 0 ? 1 - std::pow(std::tanh(x / terms.cap), 2) : 1;
                    // The part of the softmax, times scale and slope.
                    const double of_p = std::fabs(d) + (v == inputs.targets[row] ? scale * slope : 0);
                    // A term below the smallest normal number may become 0, before the factor multiplies it.
                    const double underflow = scale * slope * std::fabs(bounds.factor) * 0x1p-126;
                    const double error =
                        bounds.p * of_p + (5 * u + bounds.slope) * (std::fabs(d) + of_p) + underflow;
                    comparison.see("dlogits", i, to_float(dlogits[i]), d, twice_rounded<X>(d, error));
                }
            }
            const int zeros = inputs.targets[row] == llmc::ignored_target ? 0 : s.vocabulary;
            for (int v = zeros; v < s.columns; ++v) {
                comparison.see_equal("zeros", row * s.columns + v, to_float(dlogits[row * s.columns + v]), 0);
            }
        }
    }
};
TYPED_TEST_SUITE(ClassifierOfTerms, Dtypes);

TYPED_TEST(ClassifierOfTerms, WholeRows) {
    using X = TypeParam;
    for (const Shape& s : shapes(term_shapes)) {
        typename TestFixture::Inputs inputs(s);
        for (const ClassifierTerms& terms : all_terms) {
            Array<X> expected(inputs.logits.size()), dlogits(inputs.logits.size());
            Array<float> expected_losses(s.rows), losses(s.rows), alone(s.rows);
            expected.copy_from(inputs.logits);
            cpu().run(llmc::FusedClassifier{
                tensor(expected, {s.rows, s.columns}), tensor(expected_losses, {s.rows}),
                tensor(inputs.targets, {s.rows}), s.vocabulary, scale, true, terms});
            for (LaunchContext on : launch_contexts()) {
                on.chip.multiprocessors = s.multiprocessors;
                const auto run = [&](Array<float>& to, bool write_dlogits) {
                    dlogits.copy_from(inputs.logits);
                    llmc::cuda::fused_classifier(on, dlogits.data(), to.data(), inputs.targets.data(), s.rows,
                                                 s.columns, s.vocabulary, scale, write_dlogits, terms);
                    synchronize();
                };
                run(alone, false);
                EXPECT_EQ(std::memcmp(dlogits.data(), inputs.logits.data(), dlogits.bytes()), 0);
                run(losses, true);
                EXPECT_EQ(std::memcmp(losses.data(), alone.data(), losses.bytes()), 0);
                Comparison comparison;
                this->compare(comparison, inputs, s, terms, dlogits, losses, expected, expected_losses);
                EXPECT_TRUE(comparison.good()) << comparison.first_failure();
            }
        }
    }
}

// Two ranks' columns, from their statistics, against whole rows on the CPU.
TYPED_TEST(ClassifierOfTerms, ColumnsOfRanks) {
    using X = TypeParam;
    for (const Shape& s : shapes(term_shapes)) {
        typename TestFixture::Inputs inputs(s);
        const int half = s.vocabulary / 16 * 8;  // whole pieces
        const OwnColumns own[] = {{0, half}, {half, s.vocabulary - half}};
        for (const ClassifierTerms& terms : all_terms) {
            Array<X> expected(inputs.logits.size()), dlogits(inputs.logits.size());
            Array<float> expected_losses(s.rows);
            expected.copy_from(inputs.logits);
            cpu().run(llmc::FusedClassifier{
                tensor(expected, {s.rows, s.columns}), tensor(expected_losses, {s.rows}),
                tensor(inputs.targets, {s.rows}), s.vocabulary, scale, true, terms});
            LaunchContext on = launch_contexts().front();
            on.chip.multiprocessors = s.multiprocessors;
            Array<float> statistics(2 * s.rows * 3), losses(2 * s.rows), of_rank(s.rows);
            Array<X> parts[] = {Array<X>(inputs.logits.size()), Array<X>(inputs.logits.size())};
            for (int r = 0; r < 2; ++r) {
                for (std::int64_t i = 0; i < inputs.logits.size(); ++i) {
                    const std::int64_t v = i % s.columns + own[r].first;
                    const bool inside = i % s.columns < own[r].count;
                    parts[r][i] = inside ? inputs.logits[i / s.columns * s.columns + v]
                                         : llmc::cuda::from_float<X>(NAN);
                }
                llmc::cuda::classifier_statistics(on, statistics.data() + r * s.rows * 3, parts[r].data(),
                                                  inputs.targets.data(), s.rows, s.columns, own[r], terms);
            }
            for (int r = 0; r < 2; ++r) {
                llmc::cuda::classifier_from_statistics(on, parts[r].data(), losses.data() + r * s.rows,
                                                       statistics.data(), inputs.targets.data(), 2, s.rows,
                                                       s.columns, own[r], scale, true, terms);
            }
            synchronize();
            EXPECT_EQ(std::memcmp(losses.data(), losses.data() + s.rows, of_rank.bytes()), 0);
            std::memcpy(of_rank.data(), losses.data(), of_rank.bytes());
            for (std::int64_t i = 0; i < dlogits.size(); ++i) {
                const int v = static_cast<int>(i % s.columns), r = v < half ? 0 : 1;
                dlogits[i] = v < s.vocabulary ? parts[r][i - own[r].first] : llmc::cuda::from_float<X>(0);
            }
            for (int r = 0; r < 2; ++r) {
                for (std::int64_t i = 0; i < parts[r].size(); ++i) {
                    EXPECT_TRUE(i % s.columns < own[r].count || to_float(parts[r][i]) == 0) << i;
                }
            }
            Comparison comparison;
            this->compare(comparison, inputs, s, terms, dlogits, of_rank, expected, expected_losses);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

// Each device is within 18 u cap of the true number (soft_cap.cuh). The arrays begin anywhere.
TYPED_TEST(ClassifierOfTerms, CapAlone) {
    using X = TypeParam;
    for (const auto& on : launch_contexts()) {
        for (const std::int64_t n : shapes<std::int64_t>({1, 131, 4096, 40003}, {531, 4616})) {
            for (const std::int64_t offset : {0, 1}) {
                const float cap = 7.5f;
                Draw draw(seed());
                Array<X> in(n + offset), out(n + offset), expected(n + offset);
                draw.normal(in, 10);
                if (n > 2) {
                    in[offset] = llmc::cuda::from_float<X>(-INFINITY);
                    in[offset + 1] = llmc::cuda::from_float<X>(-0.0f);
                }
                llmc::cuda::soft_cap(on, out.data() + offset, in.data() + offset, cap, n);
                synchronize();
                cpu().run(llmc::SoftCap{tensor(expected, {n + offset}).flat(offset, n),
                                        tensor(in, {n + offset}).flat(offset, n), cap});
                Comparison comparison;
                for (std::int64_t i = offset; i < n + offset; ++i) {
                    const double wanted = to_float(expected[i]);
                    comparison.see("out", i, to_float(out[i]), wanted,
                                   twice_rounded<X>(wanted, 18 * lab::unit_roundoff<float> * cap));
                }
                EXPECT_TRUE(comparison.good()) << comparison.first_failure();
                if (n > 2) {
                    EXPECT_EQ(to_float(out[offset]), -cap);
                    EXPECT_EQ(to_float(out[offset + 1]), 0);
                }
                llmc::cuda::soft_cap(on, in.data() + offset, in.data() + offset, cap, n);
                synchronize();
                EXPECT_EQ(std::memcmp(in.data() + offset, out.data() + offset,
                                      static_cast<std::size_t>(n) * sizeof(X)),
                          0)
                    << "out is in";
            }
        }
    }
}

}  // namespace
}  // namespace kernel_test
