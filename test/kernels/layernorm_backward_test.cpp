// Layernorm backward's kernels compared with the CPU device.
#include "llmc/device/cuda/layernorm_backward.cuh"

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int channels;
};

enum class Part { whole, only_din, only_parameters, no_dbeta, only_dgamma };

template <class X>
class LayerNormBackward : public Kernels<X> {
  protected:
    // The inputs of a call, and the gradients that it adds to.
    struct Inputs {
        Array<X> dout, in, gamma, din;
        Array<float> mean, rstd, dgamma, dbeta;

        explicit Inputs(const Shape& s)
            : dout(s.rows * s.channels),
              in(s.rows * s.channels),
              gamma(s.channels),
              din(s.rows * s.channels),
              mean(s.rows),
              rstd(s.rows),
              dgamma(s.channels),
              dbeta(s.channels) {
            Draw draw(seed());
            draw.normal(dout, 1);
            draw.normal(in, 1, 0.5);
            draw.normal(gamma, 0.5, 1);
            draw.normal(din, 1);
            draw.normal(mean, 0.1, 0.5);
            draw.normal(rstd, 0.1, 1);
            draw.normal(dgamma, 1);
            draw.normal(dbeta, 1);
        }
    };

    struct Results {
        Array<X> din;
        Array<float> dgamma, dbeta;

        explicit Results(const Inputs& inputs)
            : din(inputs.din.size()), dgamma(inputs.dgamma.size()), dbeta(inputs.dbeta.size()) {
            din.copy_from(inputs.din);
            dgamma.copy_from(inputs.dgamma);
            dbeta.copy_from(inputs.dbeta);
        }
    };

    static void run(const LaunchContext& on, const Shape& shape, const Inputs& inputs, Results& results,
                    int block_threads, Part part = Part::whole) {
        const bool din = part != Part::only_parameters && part != Part::only_dgamma;
        const bool dgamma = part != Part::only_din;
        const bool dbeta = part == Part::whole || part == Part::only_parameters;
        Array<std::byte> workspace(static_cast<std::int64_t>(
            llmc::cuda::layernorm_backward_workspace_bytes(on.chip, shape.channels)));
        llmc::cuda::layernorm_backward(
            on, din ? results.din.data() : nullptr, dgamma ? results.dgamma.data() : nullptr,
            dbeta ? results.dbeta.data() : nullptr, inputs.dout.data(), inputs.in.data(), inputs.gamma.data(),
            inputs.mean.data(), inputs.rstd.data(), shape.rows, shape.channels, workspace.data(),
            block_threads);
        synchronize();
    }

    // Both devices compute the same sums in another order; the error of a sum of n terms is at most n u
    // sum|terms|.
    static void compare(const Shape& shape, Inputs& inputs, Results& results, Comparison& comparison) {
        const auto [rows, channels] = shape;
        Results expected(inputs);
        const auto dtype = tensor(inputs.in, {rows, channels}).dtype;
        Array<std::byte> workspace(
            static_cast<std::int64_t>(cpu_sizes().workspace_bytes({.batch = rows,
                                                                   .sequence = 1,
                                                                   .channels = channels,
                                                                   .heads = 1,
                                                                   .largest_matmul_channels = channels,
                                                                   .head_rows = 1,
                                                                   .dtype = dtype})));
        cpu().set_workspace({workspace.data(), llmc::DType::fp32, {workspace.size() / 4}});
        cpu().run(llmc::LayerNormBackward{
            tensor(expected.din, {rows, channels}), tensor(expected.dgamma, {channels}),
            tensor(expected.dbeta, {channels}), tensor(inputs.dout, {rows, channels}),
            tensor(inputs.in, {rows, channels}), tensor(inputs.gamma, {channels}),
            tensor(inputs.mean, {rows}), tensor(inputs.rstd, {rows})});
        cpu().set_workspace({});
        constexpr double u = lab::unit_roundoff<float>;
        const double n = channels, terms = static_cast<double>(rows) + 1;
        const auto size = static_cast<std::size_t>(channels);
        std::vector<double> dgamma_terms(size), dbeta_terms(size), g(size), h(size);
        for (std::int64_t row = 0; row < rows; ++row) {
            double sum_gh = 0, g_terms = 0, gh_terms = 0;
            for (int c = 0; c < channels; ++c) {
                const std::int64_t i = row * channels + c;
                const double d = to_float(inputs.dout[i]);
                h[c] = (to_float(inputs.in[i]) - inputs.mean[row]) * inputs.rstd[row];
                g[c] = d * to_float(inputs.gamma[c]);
                sum_gh += g[c] * h[c];
                g_terms += std::fabs(g[c]);
                gh_terms += std::fabs(g[c] * h[c]);
                dgamma_terms[c] += std::fabs(d * h[c]);
                dbeta_terms[c] += std::fabs(d);
            }
            for (int c = 0; c < channels; ++c) {
                const std::int64_t i = row * channels + c;
                // g - mean g - h mean gh, times rstd. There are the errors of the means (terms of 1 and 4
                // operations, and 2 for the division), and at most 6 roundings of each of the three terms.
                const double error = u * ((n + 3) * g_terms + std::fabs(h[c]) * (n + 6) * gh_terms) / n +
                                     6 * u * (std::fabs(g[c]) + g_terms / n + std::fabs(h[c] * sum_gh) / n);
                const double wanted = to_float(expected.din[i]);
                comparison.see(
                    "din", i, to_float(results.din[i]), wanted,
                    twice_rounded<TypeOf>(wanted, inputs.rstd[row] * error + u * std::fabs(wanted)));
            }
        }
        for (int c = 0; c < channels; ++c) {
            comparison.see("dgamma", c, results.dgamma[c], expected.dgamma[c],
                           2 * (terms + 3) * u * (dgamma_terms[c] + std::fabs(double{inputs.dgamma[c]})));
            comparison.see("dbeta", c, results.dbeta[c], expected.dbeta[c],
                           2 * terms * u * (dbeta_terms[c] + std::fabs(double{inputs.dbeta[c]})));
        }
    }

    using TypeOf = X;
};
TYPED_TEST_SUITE(LayerNormBackward, Dtypes);

TYPED_TEST(LayerNormBackward, AddsWhatTheCpuAdds) {
    for (const auto& on : launch_contexts()) {
        for (const Shape& shape : shapes<Shape>({{3, 8}, {1, 768}, {7, 264}, {130, 384}, {5, 1600}})) {
            typename TestFixture::Inputs inputs(shape);
            typename TestFixture::Results results(inputs);
            this->run(on, shape, inputs, results, 384);
            Comparison comparison;
            this->compare(shape, inputs, results, comparison);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

// There are so few blocks that each goes over many rows. It has one group of threads or several; the last
// groups find no rows left.
TYPED_TEST(LayerNormBackward, WalksDownTheRows) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    for (const Shape& shape : shapes<Shape>({{20, 136}, {45, 8}, {130, 264}})) {
        for (const int block_threads : {32, 128, 384}) {
            typename TestFixture::Inputs inputs(shape);
            typename TestFixture::Results results(inputs);
            this->run(on, shape, inputs, results, block_threads);
            Comparison comparison;
            this->compare(shape, inputs, results, comparison);
            EXPECT_TRUE(comparison.good()) << comparison.first_failure();
        }
    }
}

TYPED_TEST(LayerNormBackward, GivesTheSameBitsAgain) {
    const LaunchContext on = launch_contexts().front();
    const Shape shape = shapes<Shape>({{3, 8}, {33, 384}}).back();
    typename TestFixture::Inputs inputs(shape);
    typename TestFixture::Results results(inputs), again(inputs);
    this->run(on, shape, inputs, results, 384);
    this->run(on, shape, inputs, again, 384);
    EXPECT_EQ(std::memcmp(results.din.data(), again.din.data(), again.din.bytes()), 0);
    EXPECT_EQ(std::memcmp(results.dgamma.data(), again.dgamma.data(), again.dgamma.bytes()), 0);
    EXPECT_EQ(std::memcmp(results.dbeta.data(), again.dbeta.data(), again.dbeta.bytes()), 0);
}

// Outputs that a partial call does not compute keep their bits too.
TYPED_TEST(LayerNormBackward, HasTheSameBitsInParts) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    // Rows that several groups take in turn; threads with one, two and four pieces of a row.
    constexpr int once = 384 * (16 / sizeof(TypeParam));
    for (const Shape& shape : shapes<Shape>({{45, 8}, {7, 264}, {5, 2 * once}, {3, 4 * once}},
                                            {{9, 8}, {3, 2 * once}, {3, 4 * once}})) {
        typename TestFixture::Inputs inputs(shape);
        typename TestFixture::Results whole(inputs), in_parts(inputs);
        this->run(on, shape, inputs, whole, 384);
        this->run(on, shape, inputs, in_parts, 384, Part::only_din);
        EXPECT_EQ(std::memcmp(in_parts.din.data(), whole.din.data(), whole.din.bytes()), 0);
        EXPECT_EQ(std::memcmp(in_parts.dgamma.data(), inputs.dgamma.data(), whole.dgamma.bytes()), 0);
        EXPECT_EQ(std::memcmp(in_parts.dbeta.data(), inputs.dbeta.data(), whole.dbeta.bytes()), 0);
        this->run(on, shape, inputs, in_parts, 384, Part::only_parameters);
        EXPECT_EQ(std::memcmp(in_parts.din.data(), whole.din.data(), whole.din.bytes()), 0);
        EXPECT_EQ(std::memcmp(in_parts.dgamma.data(), whole.dgamma.data(), whole.dgamma.bytes()), 0);
        EXPECT_EQ(std::memcmp(in_parts.dbeta.data(), whole.dbeta.data(), whole.dbeta.bytes()), 0);
        typename TestFixture::Results no_dbeta(inputs), only_dgamma(inputs);
        this->run(on, shape, inputs, no_dbeta, 384, Part::no_dbeta);
        EXPECT_EQ(std::memcmp(no_dbeta.din.data(), whole.din.data(), whole.din.bytes()), 0);
        EXPECT_EQ(std::memcmp(no_dbeta.dgamma.data(), whole.dgamma.data(), whole.dgamma.bytes()), 0);
        EXPECT_EQ(std::memcmp(no_dbeta.dbeta.data(), inputs.dbeta.data(), whole.dbeta.bytes()), 0);
        this->run(on, shape, inputs, only_dgamma, 384, Part::only_dgamma);
        EXPECT_EQ(std::memcmp(only_dgamma.din.data(), inputs.din.data(), whole.din.bytes()), 0);
        EXPECT_EQ(std::memcmp(only_dgamma.dgamma.data(), whole.dgamma.data(), whole.dgamma.bytes()), 0);
        EXPECT_EQ(std::memcmp(only_dgamma.dbeta.data(), inputs.dbeta.data(), whole.dbeta.bytes()), 0);
    }
}

// Threads with two and with four pieces of a row, and the longest row that is allowed.
TYPED_TEST(LayerNormBackward, DoesLongRows) {
    LaunchContext on = launch_contexts().front();
    on.chip.multiprocessors = 1;
    // A row has one piece more than the threads have in one round, so that a thread has two; or one more than
    // in two rounds, so that it has four.
    constexpr int more = 16 / sizeof(TypeParam), once = 384 * more;
    for (const Shape& shape :
         shapes<Shape>({{5, once + more}, {3, 2 * once}, {3, 2 * once + more}, {3, 4 * once}},
                       {{5, once + more}, {3, 2 * once + more}})) {
        typename TestFixture::Inputs inputs(shape);
        typename TestFixture::Results results(inputs);
        this->run(on, shape, inputs, results, 384);
        Comparison comparison;
        this->compare(shape, inputs, results, comparison);
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }
}

TYPED_TEST(LayerNormBackward, RefusesWhatItCannotDo) {
    const LaunchContext on = launch_contexts().front();
    const Shape shape{1, 8};
    typename TestFixture::Inputs inputs(shape);
    typename TestFixture::Results results(inputs);
    EXPECT_THROW(this->run(on, {1, 2}, inputs, results, 384), llmc::ProgrammingError);
    EXPECT_THROW(this->run(on, {1, 32768}, inputs, results, 384), llmc::ProgrammingError);
    EXPECT_THROW(this->run(on, shape, inputs, results, 512), llmc::ProgrammingError);
}

}  // namespace
}  // namespace kernel_test
