// The CPU's norm of heads and its backward pass against plain loops in double precision.
#include <array>
#include <optional>
#include <vector>

#include "test/unit/cpu_test_support.h"
#include "test/unit/head_layout.h"

namespace llmc::cpu_test {

namespace {

class CpuHeadNorm : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
    double uX = roundoff(GetParam());
};

constexpr float eps = 0.125F;  // large enough to matter beside a mean square of 1

struct NormLayouts {
    Layout in, out;
};
constexpr std::array norm_layouts = {NormLayouts{{1, 1, 1, 0, 0}, {1, 1, 1, 0, 0}},
                                     NormLayouts{{13, 3, 24, 8, 16}, {13, 3, 24, 0, 3}},
                                     NormLayouts{{5, 4, 16, 0, 0}, {5, 4, 16, 64, 64}},
                                     NormLayouts{{150, 2, 128, 256, 0}, {150, 2, 128, 0, 0}},
                                     NormLayouts{{3, 1, 4096, 0, 8}, {3, 1, 4096, 16, 0}},
                                     NormLayouts{{33, 5, 37, 1, 1}, {33, 5, 37, 2, 0}}};

TEST_P(CpuHeadNorm, NormForward) {
    for (const auto& [at, out_at] : norm_layouts) {
        const OwnedTensor x = normal(X, at.shape(), "x", 1.0, 0.5);
        const OwnedTensor weight = normal(X, {at.size}, "weight", 0.5, 1.0);
        const OwnedTensor before = normal(X, out_at.shape(), "out");
        for (const bool with_weight : {true, false}) {
            OwnedTensor out = copy(before), rstd = garbage(DType::fp32, {at.rows, at.count});
            Operations()->head_norm_forward(out_at.of(out), rstd, at.of(x), with_weight ? *weight : Tensor{},
                                            eps);
            std::vector<double> reference, bound, rstds, rstd_bound;
            const auto n = static_cast<double>(at.size);
            for (std::int64_t head = 0; head < at.rows * at.count; ++head) {
                double squares = 0.0;
                for (std::int64_t i = 0; i < at.size; ++i) squares += std::pow(x.get(at.place(head, i)), 2);
                const double r = 1.0 / std::sqrt(squares / n + double{eps});
                // A sum of n positive terms with a rounding each, a division, and eps: the root halves these
                // n + 2 roundings. It and the reciprocal have one each.
                const double relative = ((n + 2.0) / 2.0 + 2.0) * u32;
                rstds.push_back(r);
                rstd_bound.push_back(relative * r * (1.0 + 1e-3));
                for (std::int64_t i = 0; i < at.size; ++i) {
                    const double w = with_weight ? weight.get(i) : 1.0;
                    const double value = x.get(at.place(head, i)) * r * w;
                    reference.push_back(value);
                    bound.push_back(((relative + 2.0 * u32) * (1.0 + uX) + uX) * (1.0 + 1e-3) *
                                    std::fabs(value));
                }
            }
            expect_heads(out_at, out, before, reference, bound, "out");
            expect_close(
                rstd, rstds, [&](std::size_t i) { return rstd_bound[i]; }, "rstd");
        }
    }
}

struct Gradients {
    std::vector<double> din, din_bound, dweight, dweight_bound;
};

// The saved rstd is data here. g and the product with the mean have 1 and 2 roundings, their difference and
// its product with rstd one each. A term g h has 3, their sum n, and the mean one more: all relative to sums
// of magnitudes.
Gradients norm_gradients(const Layout& at, const OwnedTensor& x, const Layout& dout_at,
                         const OwnedTensor& dout, const std::vector<double>& weight, const OwnedTensor& rstd,
                         const std::vector<double>& dweight, double uX) {
    Gradients result{{}, {}, dweight, {}};
    std::vector<double> terms;
    for (const double start : dweight) terms.push_back(std::fabs(start));
    const auto n = static_cast<double>(at.size), heads = static_cast<double>(at.rows * at.count);
    for (std::int64_t head = 0; head < at.rows * at.count; ++head) {
        const double r = rstd.get(head);
        const auto h = [&](std::int64_t i) { return x.get(at.place(head, i)) * r; };
        const auto d = [&](std::int64_t i) { return dout.get(dout_at.place(head, i)); };
        const auto g = [&](std::int64_t i) { return d(i) * weight[static_cast<std::size_t>(i)]; };
        double sum = 0.0, size = 0.0;
        for (std::int64_t i = 0; i < at.size; ++i) {
            sum += g(i) * h(i);
            size += std::fabs(g(i) * h(i));
            result.dweight[static_cast<std::size_t>(i)] += d(i) * h(i);
            terms[static_cast<std::size_t>(i)] += std::fabs(d(i) * h(i));
        }
        for (std::int64_t i = 0; i < at.size; ++i) {
            const double right = h(i) * sum / n, value = r * (g(i) - right);
            const double error =
                r * u32 *
                    (std::fabs(g(i)) + 2.0 * std::fabs(right) + std::fabs(h(i)) * (n + 4.0) * size / n) +
                2.0 * u32 * std::fabs(value);
            result.din.push_back(value);
            result.din_bound.push_back((error + uX * (std::fabs(value) + error)) * (1.0 + 1e-3));
        }
    }
    for (const double size : terms) result.dweight_bound.push_back((heads + 3.0) * u32 * size * (1.0 + 1e-3));
    return result;
}

// Workspace for the norm's backward pass.
WorkspaceRequest workspace_for(const Layout& at, DType dtype) {
    return {.batch = 1,
            .sequence = at.rows,
            .channels = at.size,
            .heads = at.count,
            .largest_matmul_channels = 1,
            .head_rows = 1,
            .dtype = dtype,
            .head_size = at.size};
}

TEST_P(CpuHeadNorm, NormBackward) {
    for (const auto& [at, dout_at] : norm_layouts) {
        const Layout din_at{at.rows, at.count, at.size, 5, 7};
        const OwnedTensor x = normal(X, at.shape(), "x", 1.0, 0.5);
        const OwnedTensor dout = normal(X, dout_at.shape(), "dout");
        const OwnedTensor weight = normal(X, {at.size}, "weight", 0.5, 1.0);
        const OwnedTensor rstd = normal(DType::fp32, {at.rows, at.count}, "rstd", 0.1, 1.0);
        const OwnedTensor before = normal(X, din_at.shape(), "din");
        const OwnedTensor start = normal(DType::fp32, {at.size}, "dweight");
        for (const bool with_weight : {true, false}) {
            const std::vector<double> weights =
                with_weight ? weight.values() : std::vector<double>(static_cast<std::size_t>(at.size), 1.0);
            const Tensor given = with_weight ? *weight : Tensor{};
            const Gradients expected =
                norm_gradients(at, x, dout_at, dout, weights, rstd, start.values(), uX);
            Operations ops(workspace_for(at, X));
            OwnedTensor din = copy(before), dweight = copy(start);
            ops->head_norm_backward(din_at.of(din), dweight, dout_at.of(dout), at.of(x), given, rstd);
            expect_heads(din_at, din, before, expected.din, expected.din_bound, "din");
            expect_close(
                dweight, expected.dweight, [&](std::size_t i) { return expected.dweight_bound[i]; },
                "dweight");
            OwnedTensor alone = copy(before), over_dout = copy(dout), dweight_again = copy(start);
            ops->head_norm_backward(din_at.of(alone), {}, dout_at.of(dout), at.of(x), given, rstd);
            expect_same_bits(alone, din, "din without dweight");
            ops->head_norm_backward(dout_at.of(over_dout), dweight_again, dout_at.of(over_dout), at.of(x),
                                    given, rstd);
            EXPECT_EQ(dout_at.heads(over_dout), din_at.heads(din)) << "din in dout's place";
            expect_same_bits(dweight_again, dweight, "dweight with din in dout's place");
        }
    }
}

// ---- rows that ranks share

// Both ways sum n terms, each with a rounding of its square or 3 of g h, in another order.
TEST_P(CpuHeadNorm, RanksShareTheRowsOfANorm) {
    const std::int64_t rows = 9, size = 192;
    const Layout whole{rows, 1, size, 8, 8};
    const OwnedTensor x = normal(X, whole.shape(), "x", 1.0, 0.5);
    const OwnedTensor dout = normal(X, whole.shape(), "dout");
    const OwnedTensor weight = normal(X, {size}, "weight", 0.5, 1.0);
    const OwnedTensor start = normal(DType::fp32, {size}, "dweight");
    Operations ops(workspace_for(whole, X));
    OwnedTensor out = garbage(X, whole.shape()), rstd = garbage(DType::fp32, {rows});
    OwnedTensor din = garbage(X, whole.shape()), dweight = copy(start);
    ops->head_norm_forward(whole.of(out), rstd, whole.of(x), weight, eps);
    ops->head_norm_backward(whole.of(din), dweight, whole.of(dout), whole.of(x), weight, rstd);
    for (const std::int64_t ranks : {1, 2, 4}) {
        const std::int64_t part = size / ranks;
        const auto of_rank = [&](const Tensor& tensor, std::int64_t rank) {
            return Heads{tensor, whole.first + rank * part, 1, part};
        };
        const auto weight_of = [&](std::int64_t rank) { return weight->flat(rank * part, part); };
        OwnedTensor sums = garbage(DType::fp32, {ranks, rows});
        OwnedTensor gradient_sums = garbage(DType::fp32, {ranks, rows});
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
            ops->head_norm_sums(sums->slice(rank, 1), of_rank(x, rank));
            ops->head_norm_backward_sums(gradient_sums->slice(rank, 1), of_rank(dout, rank), of_rank(x, rank),
                                         weight_of(rank), rstd);
        }
        OwnedTensor shared_out = copy(x), shared_din = copy(dout);
        OwnedTensor shared_dweight = copy(start);
        for (std::int64_t rank = 0; rank < ranks; ++rank) {
            OwnedTensor shared_rstd = garbage(DType::fp32, {rows});
            ops->head_norm_forward(of_rank(shared_out, rank), shared_rstd, of_rank(x, rank), weight_of(rank),
                                   eps, SharedRows{sums, size});
            // n + 2 roundings of each sum, and one more for the ranks; the root halves them and adds 2.
            const auto n = static_cast<double>(size);
            const auto reference = rstd.values();
            expect_close(
                shared_rstd, reference,
                [&](std::size_t i) {
                    return ranks == 1 ? 0x1p-1000
                                      : (2.0 * n + 4.0 + static_cast<double>(ranks) + 8.0) / 2.0 * u32 *
                                            reference[i];
                },
                "rstd");
            ops->head_norm_backward(of_rank(shared_din, rank), shared_dweight->flat(rank * part, part),
                                    of_rank(dout, rank), of_rank(x, rank), weight_of(rank), rstd,
                                    SharedRows{gradient_sums, size});
        }
        if (ranks == 1) {
            EXPECT_EQ(whole.heads(shared_out), whole.heads(out));
            EXPECT_EQ(whole.heads(shared_din), whole.heads(din));
        }
        // The terms of dweight are the same.
        expect_same_bits(shared_dweight, dweight, "dweight");
        Gradients expected = norm_gradients(whole, x, whole, dout, weight.values(), rstd, start.values(), uX);
        // The sum over the ranks adds `ranks` roundings of the mean.
        for (double& bound : expected.din_bound) bound *= 1.0 + static_cast<double>(ranks) / 190.0;
        expect_heads(whole, shared_din, dout, expected.din, expected.din_bound, "din");
        std::vector<double> reference, bound;
        for (std::int64_t row = 0; row < rows; ++row) {
            double squares = 0.0;
            for (std::int64_t i = 0; i < size; ++i) squares += std::pow(x.get(whole.place(row, i)), 2);
            const double r = 1.0 / std::sqrt(squares / static_cast<double>(size) + double{eps});
            for (std::int64_t i = 0; i < size; ++i) {
                reference.push_back(x.get(whole.place(row, i)) * r * weight.get(i));
                // As in NormForward, with one rounding more for each rank.
                const double relative = static_cast<double>(size + 2 + ranks) / 2.0 + 4.0;
                bound.push_back((relative * u32 * (1.0 + uX) + uX) * 1.001 * std::fabs(reference.back()));
            }
        }
        expect_heads(whole, shared_out, x, reference, bound, "out");
    }
}

TEST_P(CpuHeadNorm, NormRefusesWrongOperands) {
    const OwnedTensor x(X, {5, 48}), weight(X, {16});
    OwnedTensor out(X, {5, 48}), rstd(DType::fp32, {5, 3}), one(DType::fp32, {5}), dweight(DType::fp32, {16});
    Operations ops(workspace_for({5, 3, 16, 0, 0}, X));
    const Heads heads{x, 0, 3, 16}, first{x, 0, 1, 16};
    const auto forward = [&](const Heads& to, const Tensor& r, const Heads& from,
                             const std::optional<SharedRows>& shared = {}) {
        ops->head_norm_forward(to, r, from, weight, eps, shared);
    };
    EXPECT_NO_THROW(forward({out, 0, 3, 16}, rstd, heads));
    EXPECT_THROW(forward({out, 1, 3, 16}, rstd, heads), ProgrammingError);
    EXPECT_THROW(forward({out, 0, 2, 16}, rstd, heads), ProgrammingError);
    EXPECT_THROW(forward({out->slice(0, 4), 0, 3, 16}, rstd, heads), ProgrammingError);
    EXPECT_THROW(forward({out, 0, 3, 16}, one, heads), ProgrammingError);
    EXPECT_THROW(forward({out, 0, 3, 8}, rstd, {x, 0, 3, 8}), ProgrammingError);  // the weight's size
    const OwnedTensor sums(DType::fp32, {2, 5});
    EXPECT_NO_THROW(forward({out, 0, 1, 16}, one, first, SharedRows{sums, 32}));
    EXPECT_THROW(forward({out, 0, 1, 16}, one, first, SharedRows{sums, 15}), ProgrammingError);
    EXPECT_THROW(forward({out, 0, 1, 16}, one, first, SharedRows{sums->flat(0, 5), 32}), ProgrammingError);
    EXPECT_THROW(forward({out, 0, 1, 16}, one, first, SharedRows{sums->view({5, 2}), 32}), ProgrammingError);
    EXPECT_THROW(forward({out, 0, 3, 16}, rstd, heads, SharedRows{sums, 48}), ProgrammingError);
    EXPECT_THROW(ops->head_norm_sums(one, heads), ProgrammingError);
    EXPECT_THROW(ops->head_norm_backward_sums(one, heads, heads, weight, rstd), ProgrammingError);
    const auto backward = [&](const Heads& din, const Tensor& gradient) {
        ops->head_norm_backward(din, gradient, heads, heads, weight, rstd);
    };
    EXPECT_NO_THROW(backward({out, 0, 3, 16}, dweight));
    EXPECT_THROW(backward({out, 0, 3, 16}, one), ProgrammingError);
    EXPECT_THROW(backward({out, 0, 2, 16}, dweight), ProgrammingError);
    ops->set_workspace({});
    EXPECT_NO_THROW(backward({out, 0, 3, 16}, {}));
    EXPECT_THROW(backward({out, 0, 3, 16}, dweight), ProgrammingError);
}

TEST_P(CpuHeadNorm, BitsDoNotDependOnThreads) {
    const Layout at{200, 3, 64, 8, 0};
    const OwnedTensor x = normal(X, at.shape(), "x");
    const OwnedTensor dout = normal(X, at.shape(), "dout");
    const OwnedTensor weight = normal(X, {at.size}, "weight");
    std::vector<std::vector<std::byte>> first;
    for (const int threads : {1, 3, 2}) {
        Operations ops(workspace_for(at, X), false, threads);
        OwnedTensor out = copy(dout), din = copy(dout);
        OwnedTensor rstd = garbage(DType::fp32, {at.rows, at.count});
        OwnedTensor dweight = filled(DType::fp32, {at.size}, 0.0);
        ops->head_norm_forward(at.of(out), rstd, at.of(x), weight, eps);
        ops->head_norm_backward(at.of(din), dweight, at.of(dout), at.of(x), weight, rstd);
        const std::vector bits = {out.bytes(), rstd.bytes(), din.bytes(), dweight.bytes()};
        if (first.empty()) first = bits;
        EXPECT_TRUE(bits == first) << threads << " threads";
    }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuHeadNorm, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
