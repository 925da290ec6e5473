// The CPU's RMS norm against plain loops in double precision.
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

class CpuRmsnorm : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
    double uX = roundoff(GetParam());
};

struct Rows {
    std::int64_t N, C;
};
constexpr std::array rmsnorm_shapes = {Rows{1, 1}, Rows{1, 24}, Rows{13, 5}, Rows{33, 37}, Rows{150, 96}};
constexpr float eps = 1e-5F;

// The sum of squares has C terms with a product each, so a relative error of (C + 1) u. The division and the
// addition of eps add 2 u; the root halves this. The root and the reciprocal add 2 u: (C + 7) / 2 u in all.
double rstd_error(std::int64_t C) { return (static_cast<double>(C) + 7.0) / 2.0 * u32; }

double exact_rstd(const OwnedTensor& x, std::int64_t row, std::int64_t C) {
    double squares = 0.0;
    for (std::int64_t c = 0; c < C; ++c) squares += std::pow(x.get(row * C + c), 2);
    return 1.0 / std::sqrt(squares / static_cast<double>(C) + double{eps});
}

TEST_P(CpuRmsnorm, Forward) {
    for (const auto& [N, C] : rmsnorm_shapes) {
        const OwnedTensor x = normal(X, {N, C}, "x", 2.0, 1.0);
        const OwnedTensor weight = normal(X, {C}, "weight", 0.5, 1.0);
        for (const bool weighted : {true, false}) {
            OwnedTensor out = garbage(X, {N, C}), rstd = garbage(DType::fp32, {N});
            Operations()->rmsnorm_forward(out, rstd, x, weighted ? *weight : Tensor{}, eps);
            std::vector<double> values, rstds;
            for (std::int64_t i = 0; i < N * C; ++i) {
                if (i % C == 0) rstds.push_back(exact_rstd(x, i / C, C));
                values.push_back(x.get(i) * rstds.back() * (weighted ? weight.get(i % C) : 1.0));
            }
            expect_close(
                rstd, rstds, [&](std::size_t i) { return rstd_error(C) * rstds[i]; }, "rstd");
            // Two products in fp32, and one rounding to X.
            expect_close(
                out, values,
                [&](std::size_t i) {
                    return (rstd_error(C) + 2.01 * u32 + 1.01 * uX) * std::fabs(values[i]) + 0x1p-126;
                },
                "out");
        }
    }
}

TEST_P(CpuRmsnorm, ForwardWithoutAWeightHasTheBitsOfOnes) {
    const std::int64_t N = 13, C = 37;
    const OwnedTensor x = normal(X, {N, C}, "x"), ones = filled(X, {C}, 1.0);
    OwnedTensor out = garbage(X, {N, C}), expected = garbage(X, {N, C}), rstd = garbage(DType::fp32, {N});
    Operations ops;
    ops->rmsnorm_forward(out, rstd, x, {}, eps);
    ops->rmsnorm_forward(expected, rstd, x, ones, eps);
    expect_same_bits(out, expected, "out");
}

TEST_P(CpuRmsnorm, EpsilonIsThatOfTheCall) {
    const OwnedTensor zeros = filled(X, {1, 8}, 0.0);
    OwnedTensor out = garbage(X, {1, 8}), rstd = garbage(DType::fp32, {1});
    Operations ops;
    for (const float given : {0.25F, 0.0625F}) {
        ops->rmsnorm_forward(out, rstd, zeros, {}, given);
        EXPECT_EQ(rstd.get(0), 1.0 / std::sqrt(double{given}));
        expect_equal(out, std::vector<double>(8, 0.0), "out");
    }
}

TEST_P(CpuRmsnorm, FusedResidualIsAddThenRmsnorm) {
    for (const auto& [N, C] : rmsnorm_shapes) {
        const OwnedTensor a = normal(X, {N, C}, "a"), b = normal(X, {N, C}, "b");
        const OwnedTensor weight = normal(X, {C}, "weight", 0.5, 1.0);
        for (const Tensor& w : {*weight, Tensor{}}) {
            Operations ops;
            OwnedTensor residual = garbage(X, {N, C}), out = garbage(X, {N, C}),
                        rstd = garbage(DType::fp32, {N});
            ops->fused_residual_rmsnorm_forward(residual, out, rstd, a, b, w, eps);
            OwnedTensor sum = garbage(X, {N, C}), expected = garbage(X, {N, C}),
                        expected_rstd = garbage(DType::fp32, {N});
            ops->add(sum, a, b);
            ops->rmsnorm_forward(expected, expected_rstd, sum, w, eps);
            expect_same_bits(residual, sum, "residual");
            expect_same_bits(out, expected, "out");
            expect_same_bits(rstd, expected_rstd, "rstd");
        }
    }
}

TEST_P(CpuRmsnorm, BackwardAccumulates) {
    for (const auto& [N, C] : rmsnorm_shapes) {
        const OwnedTensor x = normal(X, {N, C}, "x", 1.0, 0.5), dout = normal(X, {N, C}, "dout");
        const OwnedTensor weight = normal(X, {C}, "weight", 0.5, 1.0);
        const OwnedTensor rstd = normal(DType::fp32, {N}, "rstd", 0.1, 1.0);
        for (const bool weighted : {true, false}) {
            OwnedTensor din = normal(X, {N, C}, "din"), dweight = normal(DType::fp32, {C}, "dweight");
            std::vector<double> dins, din_bounds, dweights = dweight.values(), terms;
            for (const double before : dweights) terms.push_back(std::fabs(before));
            const double n = static_cast<double>(C);
            for (std::int64_t row = 0; row < N; ++row) {
                std::vector<double> g, h;
                double sum = 0.0, absolute = 0.0;
                for (std::int64_t c = 0; c < C; ++c) {
                    const double d = dout.get(row * C + c);
                    h.push_back(x.get(row * C + c) * rstd.get(row));
                    g.push_back(weighted ? d * weight.get(c) : d);
                    sum += g.back() * h.back();
                    absolute += std::fabs(g.back() * h.back());
                    dweights[static_cast<std::size_t>(c)] += d * h.back();
                    terms[static_cast<std::size_t>(c)] += std::fabs(d * h.back());
                }
                // The sum has C terms of 3 operations; the division adds one. Each of g and h mean has 3
                // operations, their difference and its factor have 2, and the sum with din has one.
                const double mean = sum / n, mean_error = (n + 3.0) * u32 * absolute / n;
                for (std::size_t c = 0; c < static_cast<std::size_t>(C); ++c) {
                    const double right = h[c] * mean, before = din.get(row * C + static_cast<int>(c));
                    const double value = before + rstd.get(row) * (g[c] - right);
                    const double error = std::fabs(h[c]) * mean_error +
                                         3.0 * u32 * (std::fabs(g[c]) + std::fabs(right)) +
                                         2.0 * u32 * std::fabs(g[c] - right);
                    dins.push_back(value);
                    din_bounds.push_back(1.01 * (rstd.get(row) * error + (u32 + uX) * std::fabs(value)));
                }
            }
            Operations()->rmsnorm_backward(din, dweight, dout, x, weighted ? *weight : Tensor{}, rstd);
            expect_close(
                din, dins, [&](std::size_t i) { return din_bounds[i]; }, "din");
            // One term of 2 operations for each row, and the number before.
            expect_close(
                dweight, dweights,
                [&](std::size_t i) { return 1.01 * (static_cast<double>(N) + 3.0) * u32 * terms[i]; },
                "dweight");
        }
    }
}

TEST_P(CpuRmsnorm, BackwardHasTheSameBitsInParts) {
    for (const auto& [N, C] : rmsnorm_shapes) {
        const OwnedTensor x = normal(X, {N, C}, "x"), dout = normal(X, {N, C}, "dout");
        const OwnedTensor weight = normal(X, {C}, "weight");
        const OwnedTensor rstd = normal(DType::fp32, {N}, "rstd", 0.1, 1.0);
        const OwnedTensor start = normal(X, {N, C}, "din"), start_weight = normal(DType::fp32, {C}, "dw");
        for (const Tensor& w : {*weight, Tensor{}}) {
            OwnedTensor din = copy(start), dweight = copy(start_weight);
            OwnedTensor only_din = copy(start), only_dweight = copy(start_weight);
            Operations ops;
            ops->rmsnorm_backward(din, dweight, dout, x, w, rstd);
            ops->rmsnorm_backward(only_din, {}, dout, x, w, rstd);
            ops->rmsnorm_backward({}, only_dweight, dout, x, w, rstd);
            expect_same_bits(only_din, din, "din");
            expect_same_bits(only_dweight, dweight, "dweight");
        }
    }
}

TEST_P(CpuRmsnorm, BitsDoNotDependOnTheThreads) {
    const std::int64_t N = 300, C = 72;
    const OwnedTensor x = normal(X, {N, C}, "x"), dout = normal(X, {N, C}, "dout");
    const OwnedTensor weight = normal(X, {C}, "weight");
    std::vector<std::vector<std::byte>> first;
    for (const int threads : {1, 3, 2}) {
        Operations ops(threads);
        OwnedTensor residual = garbage(X, {N, C}), out = garbage(X, {N, C}), rstd = garbage(DType::fp32, {N});
        OwnedTensor din = filled(X, {N, C}, 1.0), dweight = filled(DType::fp32, {C}, 0.0);
        ops->fused_residual_rmsnorm_forward(residual, out, rstd, x, dout, weight, eps);
        ops->rmsnorm_forward(residual, rstd, x, weight, eps);
        ops->rmsnorm_backward(din, dweight, dout, x, weight, rstd);
        const std::vector bits = {residual.bytes(), out.bytes(), rstd.bytes(), din.bytes(), dweight.bytes()};
        if (first.empty()) first = bits;
        EXPECT_TRUE(bits == first) << threads << " threads";
    }
}

TEST_P(CpuRmsnorm, RefusesWrongShapes) {
    const OwnedTensor x = normal(X, {3, 8}, "x"), weight = normal(X, {8}, "weight");
    OwnedTensor out(X, {3, 8}), rstd(DType::fp32, {3}), dweight(DType::fp32, {8});
    Operations ops;
    EXPECT_NO_THROW(ops->rmsnorm_forward(out, rstd, x, weight, eps));
    EXPECT_THROW(ops->rmsnorm_forward(out, rstd, x, OwnedTensor(X, {7}), eps), ProgrammingError);
    EXPECT_THROW(ops->rmsnorm_forward(out, OwnedTensor(DType::fp32, {4}), x, weight, eps), ProgrammingError);
    EXPECT_THROW(ops->rmsnorm_forward(OwnedTensor(X, {8, 3}), rstd, x, weight, eps), ProgrammingError);
    EXPECT_THROW(ops->fused_residual_rmsnorm_forward(out, out, rstd, x, OwnedTensor(X, {3, 7}), weight, eps),
                 ProgrammingError);
    EXPECT_THROW(ops->rmsnorm_backward(out, OwnedTensor(DType::fp32, {7}), x, x, weight, rstd),
                 ProgrammingError);
    EXPECT_THROW(ops->rmsnorm_backward(OwnedTensor(X, {3, 7}), dweight, x, x, weight, rstd),
                 ProgrammingError);
    ops->set_workspace({});
    EXPECT_NO_THROW(ops->rmsnorm_backward(out, {}, x, x, weight, rstd));
    EXPECT_THROW(ops->rmsnorm_backward(out, dweight, x, x, weight, rstd), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuRmsnorm, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
