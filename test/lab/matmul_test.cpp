// The lab's best matrix product against the CPU device, at more shapes and chips than the lab checks.
#include "dev/matmul.cuh"

#include <cstring>

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
        cpu().run(llmc::MatmulForward{tensor(expected, {rows, OC}), tensor(in, {rows, IC}),
                                      tensor(weight, {OC, IC}),
                                      with_bias ? tensor(bias, {OC}) : llmc::Tensor{}});
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
