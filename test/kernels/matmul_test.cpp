// The matrix product's kernels against the CPU device.
#include "llmc/device/cuda/matmul.cuh"

#include <cstring>

#include "llmc/device/cuda/matmul_backward.cuh"
#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

struct Shape {
    std::int64_t rows;
    int in_channels, out_channels;
};
// One tile and less; more than one in each direction and a remainder; more tiles of channels than the
// pipeline has stages; more than a band of tiles of rows.
const std::vector<Shape> matmul_shapes = {{130, 8, 136},   {2, 8, 16},     {1, 40, 8},    {130, 104, 264},
                                          {128, 256, 128}, {257, 72, 136}, {2100, 8, 136}};

template <class X>
class Matmul : public Kernels<X> {};
TYPED_TEST_SUITE(Matmul, Fp32AndBf16);

TYPED_TEST(Matmul, Forward) {
    using X = TypeParam;
    bool with_bias = false;  // alternates
    for (const auto& [rows, IC, OC] : shapes(matmul_shapes)) {
        with_bias = !with_bias;
        Draw draw(seed());
        Array<X> in(rows * IC), weight(std::int64_t{OC} * IC), bias(OC), expected(rows * OC);
        draw.normal(in, 1);
        draw.normal(weight, 0.5);
        draw.normal(bias, 1);
        cpu().run(MatmulForward{tensor(expected, {rows, OC}), tensor(in, {rows, IC}),
                                tensor(weight, {OC, IC}), with_bias ? tensor(bias, {OC}) : llmc::Tensor{}});
        // Both devices sum IC products and the bias: 3 u for each term, as derived in dev/matmul_forward.cu.
        Array<double> bounds(rows * OC);
        for (std::int64_t i = 0; i < bounds.size(); ++i) {
            const X *x = in.data() + i / OC * IC, *w = weight.data() + i % OC * IC;
            double magnitude = with_bias ? std::fabs(to_float(bias[i % OC])) : 0;
            for (int k = 0; k < IC; ++k) magnitude += std::fabs(double{to_float(x[k])} * to_float(w[k]));
            bounds[i] =
                twice_rounded<X>(to_float(expected[i]), 3 * (IC + 2) * lab::unit_roundoff<float> * magnitude);
        }
        for (const auto& on : contexts_of_all_tilings()) {
            Array<X> out(rows * OC);
            llmc::cuda::matmul_forward(on, out.data(), in.data(), weight.data(),
                                       with_bias ? bias.data() : nullptr, rows, OC, IC);
            synchronize();
            Comparison comparison;
            for (std::int64_t i = 0; i < out.size(); ++i) {
                comparison.see("out", i, to_float(out[i]), to_float(expected[i]), bounds[i]);
            }
            EXPECT_TRUE(comparison.good())
                << rows << "x" << IC << "x" << OC << ": " << comparison.first_failure();
        }
    }
}

TYPED_TEST(Matmul, GivesTheSameBitsTwice) {
    using X = TypeParam;
    constexpr std::int64_t rows = 66;
    constexpr int IC = 168, OC = 72;
    Draw draw(seed());
    Array<X> in(rows * IC), weight(OC * IC), bias(OC), out(rows * OC), again(rows * OC);
    draw.normal(in, 1);
    draw.normal(weight, 0.5);
    draw.normal(bias, 1);
    for (Array<X>* to : {&out, &again}) {
        llmc::cuda::matmul_forward(launch_contexts().front(), to->data(), in.data(), weight.data(),
                                   bias.data(), rows, OC, IC);
    }
    synchronize();
    EXPECT_EQ(std::memcmp(out.data(), again.data(), out.bytes()), 0);
}

// Zero weights make exact results. Nothing past the end of an operand is used, not even times zero (the
// memory there is NaN), and nothing is stored there.
TYPED_TEST(Matmul, StaysInsideItsOperands) {
    using X = TypeParam;
    constexpr std::int64_t rows = 5;
    constexpr int IC = 40, OC = 24, margin = 64;
    for (const auto& on : launch_contexts()) {
        Array<X> in(rows * IC + margin), weight(OC * IC + margin), bias(OC + margin), out(rows * OC + margin);
        const X zero = llmc::cuda::from_float<X>(0), one = llmc::cuda::from_float<X>(1);
        for (int i = 0; i < rows * IC; ++i) in[i] = one;
        for (int i = 0; i < OC * IC; ++i) weight[i] = zero;
        for (int i = 0; i < OC; ++i) bias[i] = one;
        llmc::cuda::matmul_forward(on, out.data(), in.data(), weight.data(), bias.data(), rows, OC, IC);
        synchronize();
        for (int i = 0; i < rows * OC; ++i) ASSERT_EQ(to_float(out[i]), 1) << i;
        for (int i = 0; i < margin; ++i) ASSERT_TRUE(std::isnan(to_float(out[rows * OC + i]))) << i;
    }
}

TYPED_TEST(Matmul, ForwardWithGelu) {
    using X = TypeParam;
    constexpr std::int64_t rows = 19;
    constexpr int IC = 24, OC = 40;
    Draw draw(seed());
    Array<X> in(rows * IC), weight(OC * IC), bias(OC), out(rows * OC), pre_gelu(rows * OC),
        product(rows * OC), gelu(rows * OC);
    draw.normal(in, 1);
    draw.normal(weight, 0.5);
    draw.normal(bias, 1);
    const LaunchContext on = launch_contexts().front();
    for (const X* with_bias : {static_cast<const X*>(bias.data()), static_cast<const X*>(nullptr)}) {
        llmc::cuda::matmul_forward(on, out.data(), in.data(), weight.data(), with_bias, rows, OC, IC,
                                   pre_gelu.data());
        // The same bits as the two separate operations.
        llmc::cuda::matmul_forward(on, product.data(), in.data(), weight.data(), with_bias, rows, OC, IC);
        llmc::cuda::gelu_forward(on, gelu.data(), product.data(), rows * OC);
        synchronize();
        EXPECT_EQ(std::memcmp(pre_gelu.data(), product.data(), product.bytes()), 0);
        EXPECT_EQ(std::memcmp(out.data(), gelu.data(), gelu.bytes()), 0);
    }
}

TYPED_TEST(Matmul, Backward) {
    using X = TypeParam;
    // Two iterations of the loop over rows, and of that over channels.
    for (const auto& [rows, IC, OC] :
         shapes<Shape>({{2, 8, 16}, {1, 40, 8}, {70, 104, 72}, {65, 64, 136}}, {{34, 24, 40}})) {
        Draw draw(seed());
        Array<X> dout(rows * OC), in(rows * IC), weight(std::int64_t{OC} * IC), pre_gelu(rows * IC),
            din(rows * IC), expected_din(rows * IC);
        Array<float> dweight(weight.size()), expected_dweight(weight.size()), dbias(OC), expected_dbias(OC);
        draw.normal(dout, 1);
        draw.normal(in, 1);
        draw.normal(weight, 0.5);
        draw.normal(pre_gelu, 1);
        Array<float> before(weight.size());
        draw.normal(before, 1);
        expected_dweight.copy_from(before);
        expected_dbias.fill(0.5f);
        const llmc::WorkspaceRequest request{.batch = 1,
                                             .sequence = rows,
                                             .channels = IC,
                                             .heads = 1,
                                             .largest_matmul_channels = std::max(IC, OC),
                                             .head_rows = 1,
                                             .dtype = tensor(in, {rows, IC}).dtype};
        Array<float> cpu_workspace(
            static_cast<std::int64_t>(cpu_sizes().workspace_bytes(request) / sizeof(float)));
        cpu().set_workspace(tensor(cpu_workspace, {cpu_workspace.size()}));
        cpu().run(MatmulBackward{tensor(expected_din, {rows, IC}), tensor(expected_dweight, {OC, IC}),
                                 tensor(expected_dbias, {OC}), tensor(dout, {rows, OC}),
                                 tensor(in, {rows, IC}), tensor(weight, {OC, IC}),
                                 tensor(pre_gelu, {rows, IC})});
        cpu().set_workspace({});
        for (const auto& on : launch_contexts()) {
            dweight.copy_from(before);
            dbias.fill(0.5f);
            Array<char> workspace(
                static_cast<std::int64_t>(llmc::cuda::matmul_backward_workspace_bytes<X>(on.chip, rows, OC)));
            llmc::cuda::matmul_backward(on, din.data(), dweight.data(), dbias.data(), dout.data(), in.data(),
                                        weight.data(), pre_gelu.data(), rows, OC, IC, workspace.data());
            synchronize();
            // Both devices sum OC products (for dweight, `rows` products), each within n u sum|terms| of the
            // true sum. GELU' is within -0.2 ... 1.2, with an error of at most 1e-6 on both.
            constexpr double u = lab::unit_roundoff<float>;
            Comparison comparison;
            for (std::int64_t i = 0; i < din.size(); ++i) {
                double magnitude = 0;
                for (int k = 0; k < OC; ++k) {
                    magnitude +=
                        std::fabs(to_float(dout[i / IC * OC + k]) * to_float(weight[k * IC + i % IC]));
                }
                comparison.see(
                    "din", i, to_float(din[i]), to_float(expected_din[i]),
                    twice_rounded<X>(to_float(expected_din[i]), 1.2 * (OC * u + 2e-6) * magnitude));
            }
            const double n = static_cast<double>(rows + 2);
            for (std::int64_t i = 0; i < dweight.size(); ++i) {
                double magnitude = std::fabs(before[i]);
                for (std::int64_t k = 0; k < rows; ++k) {
                    magnitude += std::fabs(to_float(dout[k * OC + i / IC]) * to_float(in[k * IC + i % IC]));
                }
                comparison.see("dweight", i, dweight[i], expected_dweight[i], 2 * n * u * magnitude);
            }
            for (int i = 0; i < OC; ++i) {
                double magnitude = 0.5;
                for (std::int64_t k = 0; k < rows; ++k) magnitude += std::fabs(to_float(dout[k * OC + i]));
                comparison.see("dbias", i, dbias[i], expected_dbias[i], 2 * n * u * magnitude);
            }
            EXPECT_TRUE(comparison.good())
                << rows << "x" << IC << "x" << OC << ": " << comparison.first_failure();

            Array<X> din_of_two(din.size());
            Array<float> dweight_of_two(dweight.size());
            dweight_of_two.copy_from(before);
            llmc::cuda::matmul_backward<X>(on, din_of_two.data(), dweight_of_two.data(), nullptr, dout.data(),
                                           in.data(), weight.data(), pre_gelu.data(), rows, OC, IC,
                                           workspace.data());
            synchronize();
            EXPECT_EQ(std::memcmp(din_of_two.data(), din.data(), din.bytes()), 0) << "without dbias";
            EXPECT_EQ(std::memcmp(dweight_of_two.data(), dweight.data(), dweight.bytes()), 0)
                << "without dbias";
        }
    }
}

TYPED_TEST(Matmul, RefusesUnalignedChannels) {
    Array<TypeParam> x(1024);
    const auto product = [&](int IC, int OC) {
        llmc::cuda::matmul_forward<TypeParam>(launch_contexts().front(), x.data(), x.data(), x.data(),
                                              nullptr, 2, OC, IC);
    };
    EXPECT_THROW(product(10, 16), llmc::ProgrammingError);
    EXPECT_THROW(product(16, 10), llmc::ProgrammingError);
}

}  // namespace
}  // namespace kernel_test
