// RMS norm backward's kernels compared with the CPU device.
#include <cmath>
#include <cstring>
#include <vector>

#include "llmc/device/cuda/rmsnorm_backward.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int channels;
};

enum class Part { whole, only_din, only_dweight };

template <class X>
class RmsNormBackward : public Kernels<X> {
  protected:
    // The inputs of a call, and the gradients that it adds to.
    struct Inputs {
        Array<X> dout, in, weight, din;
        Array<float> rstd, dweight;

        explicit Inputs(const Shape& s)
            : dout(s.rows * s.channels),
              in(s.rows * s.channels),
              weight(s.channels),
              din(s.rows * s.channels),
              rstd(s.rows),
              dweight(s.channels) {
            Draw draw(seed());
            draw.normal(dout, 1);
            draw.normal(in, 1, 0.5);
            draw.normal(weight, 0.5, 1);
            draw.normal(din, 1);
            draw.normal(rstd, 0.1, 1);
            draw.normal(dweight, 1);
        }
    };

    struct Results {
        Array<X> din;
        Array<float> dweight;

        explicit Results(const Inputs& inputs) : din(inputs.din.size()), dweight(inputs.dweight.size()) {
            din.copy_from(inputs.din);
            dweight.copy_from(inputs.dweight);
        }

        bool has_din_of(const Array<X>& other) const {
            return std::memcmp(din.data(), other.data(), din.bytes()) == 0;
        }
        bool has_dweight_of(const Array<float>& other) const {
            return std::memcmp(dweight.data(), other.data(), dweight.bytes()) == 0;
        }
    };

    static void run(const LaunchContext& on, const Shape& shape, const Inputs& inputs, Results& results,
                    int block_threads, Part part = Part::whole, bool weighted = true) {
        Array<std::byte> workspace(
            static_cast<std::int64_t>(llmc::cuda::rmsnorm_backward_workspace_bytes(on.chip, shape.channels)));
        llmc::cuda::rmsnorm_backward(on, part == Part::only_dweight ? nullptr : results.din.data(),
                                     part == Part::only_din ? nullptr : results.dweight.data(),
                                     inputs.dout.data(), inputs.in.data(),
                                     weighted ? inputs.weight.data() : nullptr, inputs.rstd.data(),
                                     shape.rows, shape.channels, workspace.data(), block_threads);
        synchronize();
    }

    // Both devices compute the same sums in another order; the error of a sum of n terms is at most n u
    // sum|terms|.
    static void compare(const Shape& shape, Inputs& inputs, Results& results, Comparison& comparison) {
        const auto [rows, channels] = shape;
        Results expected(inputs);
        Array<std::byte> workspace(
            static_cast<std::int64_t>(cpu_sizes().workspace_bytes({.batch = rows,
                                                                   .sequence = 1,
                                                                   .channels = channels,
                                                                   .heads = 1,
                                                                   .largest_matmul_channels = channels,
                                                                   .head_rows = 1,
                                                                   .dtype = tensor(inputs.in, {1}).dtype})));
        cpu().set_workspace({workspace.data(), llmc::DType::fp32, {workspace.size() / 4}});
        cpu().run(llmc::RmsNormBackward{
            tensor(expected.din, {rows, channels}), tensor(expected.dweight, {channels}),
            tensor(inputs.dout, {rows, channels}), tensor(inputs.in, {rows, channels}),
            tensor(inputs.weight, {channels}), tensor(inputs.rstd, {rows})});
        cpu().set_workspace({});
        constexpr double u = lab::unit_roundoff<float>;
        const double n = channels;
        std::vector<double> terms(static_cast<std::size_t>(channels));
        for (std::int64_t row = 0; row < rows; ++row) {
            double sum_gh = 0, gh_terms = 0;
            const auto h = [&](int c) {
                return double{to_float(inputs.in[row * channels + c])} * inputs.rstd[row];
            };
            const auto g = [&](int c) {
                return double{to_float(inputs.dout[row * channels + c])} * to_float(inputs.weight[c]);
            };
            for (int c = 0; c < channels; ++c) {
                sum_gh += g(c) * h(c);
                gh_terms += std::fabs(g(c) * h(c));
                terms[static_cast<std::size_t>(c)] +=
                    std::fabs(to_float(inputs.dout[row * channels + c]) * h(c));
            }
            for (int c = 0; c < channels; ++c) {
                const std::int64_t i = row * channels + c;
                // g - h mean gh, times rstd. There is the error of the mean (terms of 3 operations, and 2 for
                // the division), and at most 5 roundings of each of the two terms.
                const double error = u * std::fabs(h(c)) * (n + 5) * gh_terms / n +
                                     5 * u * (std::fabs(g(c)) + std::fabs(h(c) * sum_gh) / n);
                const double wanted = to_float(expected.din[i]);
                comparison.see("din", i, to_float(results.din[i]), wanted,
                               twice_rounded<X>(wanted, inputs.rstd[row] * error + u * std::fabs(wanted)));
            }
        }
        for (int c = 0; c < channels; ++c) {
            // A term of 2 operations for each row, and the number before.
            comparison.see("dweight", c, results.dweight[c], expected.dweight[c],
                           2 * (static_cast<double>(rows) + 3) * u *
                               (terms[static_cast<std::size_t>(c)] + std::fabs(double{inputs.dweight[c]})));
        }
    }
};
TYPED_TEST_SUITE(RmsNormBackward, Dtypes);

TYPED_TEST(RmsNormBackward, AddsWhatTheCpuAdds) {
    for (const auto& on : launch_contexts()) {
        for (const Shape& shape : shapes<Shape>({{3, 8}, {1, 768}, {7, 264}, {130, 384}, {5, 2048}})) {
            typename TestFixture::Inputs inputs(shape);
            typename TestFixture::Results results(inputs);
            this->run(on, shape, inputs, results, 512);
            Comparison comparison;
            this->compare(shape, inputs, results, comparison);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

// There are so few blocks that each goes over many rows. It has one group of threads or several; the last
// groups find no rows left.
TYPED_TEST(RmsNormBackward, WalksDownTheRows) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    for (const Shape& shape : shapes<Shape>({{20, 136}, {45, 8}, {130, 264}})) {
        for (const int block_threads : {32, 128, 512}) {
            typename TestFixture::Inputs inputs(shape);
            typename TestFixture::Results results(inputs);
            this->run(on, shape, inputs, results, block_threads);
            Comparison comparison;
            this->compare(shape, inputs, results, comparison);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

// A call that computes one output leaves the other as it is. A missing weight counts as ones.
TYPED_TEST(RmsNormBackward, HasTheSameBitsInParts) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    // Rows that several groups take in turn; threads with one, two and four pieces of a row.
    constexpr int once = 512 * (16 / sizeof(TypeParam));
    for (const Shape& shape : shapes<Shape>({{45, 8}, {7, 264}, {5, 2 * once}, {3, 4 * once}},
                                            {{9, 8}, {3, 2 * once}, {3, 4 * once}})) {
        typename TestFixture::Inputs inputs(shape);
        for (const bool weighted : {true, false}) {
            if (!weighted) inputs.weight.fill(llmc::cuda::from_float<TypeParam>(1));
            typename TestFixture::Results whole(inputs), again(inputs), din(inputs), dweight(inputs);
            this->run(on, shape, inputs, whole, 512);
            this->run(on, shape, inputs, again, 512, Part::whole, weighted);
            EXPECT_TRUE(again.has_din_of(whole.din) && again.has_dweight_of(whole.dweight));
            this->run(on, shape, inputs, din, 512, Part::only_din, weighted);
            EXPECT_TRUE(din.has_din_of(whole.din) && din.has_dweight_of(inputs.dweight));
            this->run(on, shape, inputs, dweight, 512, Part::only_dweight, weighted);
            EXPECT_TRUE(dweight.has_din_of(inputs.din) && dweight.has_dweight_of(whole.dweight));
        }
    }
}

// Threads with two and with four pieces of a row, and the longest row that is allowed.
TYPED_TEST(RmsNormBackward, DoesLongRows) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    // A row has one piece more than the threads have in one round, so that a thread has two; or one more than
    // in two rounds, so that it has four.
    constexpr int more = 16 / sizeof(TypeParam), once = 512 * more;
    for (const Shape& shape :
         shapes<Shape>({{5, once + more}, {3, 2 * once}, {3, 2 * once + more}, {3, 4 * once}},
                       {{5, once + more}, {3, 2 * once + more}})) {
        typename TestFixture::Inputs inputs(shape);
        typename TestFixture::Results results(inputs);
        this->run(on, shape, inputs, results, 512);
        Comparison comparison;
        this->compare(shape, inputs, results, comparison);
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }
}

TYPED_TEST(RmsNormBackward, RefusesWhatItCannotDo) {
    const LaunchContext on = launch_contexts().front();
    const Shape shape{1, 8};
    typename TestFixture::Inputs inputs(shape);
    typename TestFixture::Results results(inputs);
    EXPECT_THROW(this->run(on, {1, 2}, inputs, results, 512), llmc::ProgrammingError);
    EXPECT_THROW(this->run(on, {1, 32768}, inputs, results, 512), llmc::ProgrammingError);
    EXPECT_THROW(this->run(on, shape, inputs, results, 1024), llmc::ProgrammingError);
}

}  // namespace
}  // namespace kernel_test
