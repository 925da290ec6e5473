// The CPU's operations in parts, as pipeline and tensor parallelism call them. Gradients are computed one at
// a time. A rank has some rows of the tables and some columns of the logits. The parts together give the
// results of the whole.
#include <numeric>

#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

class CpuParts : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
};

// ---- gradients one at a time

TEST_P(CpuParts, LayernormBackwardHasTheSameBitsInParts) {
    for (const auto& [N, C] : {std::array<std::int64_t, 2>{1, 1}, {13, 5}, {33, 37}, {150, 96}}) {
        const OwnedTensor x = normal(X, {N, C}, "x");
        const OwnedTensor dout = normal(X, {N, C}, "dout");
        const OwnedTensor gamma = normal(X, {C}, "gamma");
        const OwnedTensor mean = normal(DType::fp32, {N}, "mean", 0.1);
        const OwnedTensor rstd = normal(DType::fp32, {N}, "rstd", 0.1, 1.0);
        const OwnedTensor start = normal(X, {N, C}, "din");
        const OwnedTensor start_gamma = normal(DType::fp32, {C}, "dgamma");
        Operations ops;
        OwnedTensor din = copy(start), dgamma = copy(start_gamma), dbeta = copy(start_gamma);
        ops->layernorm_backward(din, dgamma, dbeta, dout, x, gamma, mean, rstd);
        OwnedTensor only_din = copy(start);
        ops->layernorm_backward(only_din, {}, {}, dout, x, gamma, mean, rstd);
        OwnedTensor only_dgamma = copy(start_gamma), only_dbeta = copy(start_gamma);
        ops->layernorm_backward({}, only_dgamma, only_dbeta, dout, x, gamma, mean, rstd);
        OwnedTensor din_of_two = copy(start), dgamma_of_two = copy(start_gamma);
        ops->layernorm_backward(din_of_two, dgamma_of_two, {}, dout, x, gamma, mean, rstd);
        OwnedTensor dgamma_alone = copy(start_gamma);
        ops->layernorm_backward({}, dgamma_alone, {}, dout, x, gamma, mean, rstd);
        expect_same_bits(only_din, din, "din");
        expect_same_bits(only_dgamma, dgamma, "dgamma");
        expect_same_bits(only_dbeta, dbeta, "dbeta");
        expect_same_bits(din_of_two, din, "din without dbeta");
        expect_same_bits(dgamma_of_two, dgamma, "dgamma without dbeta");
        expect_same_bits(dgamma_alone, dgamma, "dgamma alone");
        EXPECT_THROW(ops->layernorm_backward({}, {}, dbeta, dout, x, gamma, mean, rstd), ProgrammingError);
        EXPECT_THROW(ops->layernorm_backward(din, {}, dbeta, dout, x, gamma, mean, rstd), ProgrammingError);
    }
}

TEST_P(CpuParts, MatmulBackwardHasTheSameBitsInParts) {
    for (const bool native_bf16 : {false, X == DType::bf16 && cpu::processor_has_bf16()}) {
        const std::int64_t N = 33, IC = 24, OC = 37;
        const OwnedTensor in = normal(X, {N, IC}, "in");
        const OwnedTensor weight = normal(X, {OC, IC}, "weight");
        const OwnedTensor dout = normal(X, {N, OC}, "dout");
        const OwnedTensor start_weight = normal(DType::fp32, {OC, IC}, "dweight");
        const OwnedTensor start_bias = normal(DType::fp32, {OC}, "dbias");
        const OwnedTensor pre_gelu = normal(X, {N, IC}, "pre_gelu");
        for (const Tensor& before_gelu : {Tensor{}, *pre_gelu}) {
            Operations ops(WorkspaceRequest{1, N, 1, 1, OC, N, X}, native_bf16);
            OwnedTensor din = garbage(X, {N, IC}), dweight = copy(start_weight), dbias = copy(start_bias);
            ops->matmul_backward(din, dweight, dbias, dout, in, weight, before_gelu);
            OwnedTensor only_din = garbage(X, {N, IC});
            ops->matmul_backward(only_din, {}, {}, dout, in, weight, before_gelu);
            OwnedTensor only_dweight = copy(start_weight), only_dbias = copy(start_bias);
            ops->matmul_backward({}, only_dweight, only_dbias, dout, in, weight);
            expect_same_bits(only_din, din, "din");
            expect_same_bits(only_dweight, dweight, "dweight");
            expect_same_bits(only_dbias, dbias, "dbias");
        }
    }
}

// ---- rows of a table

TEST_P(CpuParts, EncoderOutputsAddUpToTheWhole) {
    const std::int64_t B = 3, T = 13, C = 24, V = 37;
    const OwnedTensor wte = normal(X, {V, C}, "wte"), wpe = normal(X, {T, C}, "wpe");
    const OwnedTensor tokens = integers({B, T}, "tokens", 0, V);
    Operations ops;
    OwnedTensor whole = garbage(X, {B, T, C});
    ops->encoder_forward(whole, tokens, wte, wpe);
    const OwnedTensor dout = normal(X, {B, T, C}, "dout");
    const OwnedTensor start = normal(DType::fp32, {V, C}, "dwte");
    OwnedTensor dwte = copy(start), dwpe = filled(DType::fp32, {T, C}, 0.0);
    ops->encoder_backward(dwte, dwpe, dout, tokens);
    // Parts may contain no token, or have one row.
    for (const std::vector<std::int64_t>& firsts : {std::vector<std::int64_t>{0}, {0, 20}, {0, 1, 30, 36}}) {
        OwnedTensor sum = filled(X, {B, T, C}, 0.0);
        OwnedTensor dwte_of_parts = copy(start);
        for (std::size_t part = 0; part < firsts.size(); ++part) {
            const std::int64_t first = firsts[part];
            const std::int64_t rows = (part + 1 < firsts.size() ? firsts[part + 1] : V) - first;
            OwnedTensor out = garbage(X, {B, T, C});
            ops->encoder_forward(out, tokens, wte->slice(first, rows), part == 0 ? *wpe : Tensor{}, first);
            // In each element at most two terms are not 0, rounded once as in the whole.
            ops->add(sum, sum, out);
            OwnedTensor dwpe_of_part = filled(DType::fp32, {T, C}, 0.0);
            // The first part computes no gradient of the positions. Its rows must get the same sums all the
            // same.
            ops->encoder_backward(dwte_of_parts->slice(first, rows), part == 0 ? Tensor{} : *dwpe_of_part,
                                  dout, tokens, first);
            if (part > 0) expect_same_bits(dwpe_of_part, dwpe, "dwpe");
        }
        expect_same_bits(sum, whole, "sum of the parts");
        expect_same_bits(dwte_of_parts, dwte, "dwte");
    }
    OwnedTensor out = garbage(X, {B, T, C});
    EXPECT_NO_THROW(ops->encoder_forward(out, tokens, wte->slice(0, 1), wpe, 100));
    EXPECT_THROW(ops->encoder_forward(out, tokens, wte->slice(0, 1), wpe), ProgrammingError);
    EXPECT_THROW(ops->encoder_forward(out, filled(DType::int32, {B, T}, -1), wte, wpe, 0), ProgrammingError);
}

// ---- columns of the logits

// Ranks' columns: one rank has all, some ranks have none, or they have unequal numbers. Each rank's logits
// are padded to a multiple of 8, and the padding may hold any values.
struct Parts {
    std::vector<std::int64_t> columns;

    std::int64_t first(std::size_t rank) const {
        return std::accumulate(columns.begin(), columns.begin() + static_cast<std::ptrdiff_t>(rank),
                               std::int64_t{0});
    }
    std::int64_t stored(std::size_t rank) const {
        return std::max<std::int64_t>(8, (columns[rank] + 7) / 8 * 8);
    }
};

class CpuClassifierParts : public CpuParts {
  protected:
    void compare(const OwnedTensor& logits, const OwnedTensor& targets, const Parts& parts) {
        const std::int64_t N = logits->shape[0], V = logits->shape[1];
        const float scale = 1.0F / 7.0F;
        const std::size_t ranks = parts.columns.size();
        Operations ops;
        OwnedTensor whole = copy(logits), losses = garbage(DType::fp32, {N});
        ops->fused_classifier(whole, losses, targets, V, scale, true);

        OwnedTensor statistics = garbage(DType::fp32, {static_cast<std::int64_t>(ranks), N, 3});
        std::vector<OwnedTensor> own;
        for (std::size_t r = 0; r < ranks; ++r) {
            own.push_back(garbage(X, {N, parts.stored(r)}));
            for (std::int64_t n = 0; n < N; ++n) {
                for (std::int64_t v = 0; v < parts.columns[r]; ++v) {
                    own[r].set(n * parts.stored(r) + v, logits.get(n * V + parts.first(r) + v));
                }
            }
            const OwnedTensor before = copy(own[r]);
            ops->classifier_statistics(statistics->slice(static_cast<std::int64_t>(r), 1).view({N, 3}),
                                       own[r], targets, parts.columns[r], parts.first(r));
            expect_same_bits(own[r], before, "logits");
        }
        // Both sides' p and loss have relative errors: those of a sum of exponentials. The arguments of its
        // terms are rounded (the range), and exp has 2.2 u. There are as many additions as columns and ranks.
        for (std::size_t r = 0; r < ranks; ++r) {
            OwnedTensor loss = garbage(DType::fp32, {N});
            const OwnedTensor before = copy(own[r]);
            const auto finish = [&](bool write_dlogits) {
                ops->classifier_from_statistics(own[r], loss, statistics, targets, parts.columns[r],
                                                parts.first(r), scale, write_dlogits);
            };
            finish(false);
            expect_same_bits(own[r], before, "logits without write_dlogits");
            const OwnedTensor alone = copy(loss);
            finish(true);
            expect_same_bits(loss, alone, "losses with and without gradients");
            for (std::int64_t n = 0; n < N; ++n) {
                double greatest = -INFINITY, least = INFINITY;
                for (std::int64_t v = 0; v < V; ++v) greatest = std::max(greatest, logits.get(n * V + v));
                for (std::int64_t v = 0; v < V; ++v) least = std::min(least, logits.get(n * V + v));
                const double relative = 2.0 *
                                        (2.0 * std::min(104.0, greatest - least) + 4.4 +
                                         static_cast<double>(V) + static_cast<double>(ranks)) *
                                        u32;
                ASSERT_NEAR(loss.get(n), losses.get(n), relative + 16.0 * u32 * std::fabs(losses.get(n)));
                for (std::int64_t v = 0; v < parts.stored(r); ++v) {
                    const double part = own[r].get(n * parts.stored(r) + v);
                    if (v >= parts.columns[r]) {
                        ASSERT_EQ(part, 0.0) << "padding of rank " << r;
                        continue;
                    }
                    const double expected = whole.get(n * V + parts.first(r) + v);
                    const double p = std::fabs(expected) + double{scale};
                    ASSERT_NEAR(part, expected,
                                2.0 * relative * p + 2.0 * roundoff(X) * std::fabs(expected) + 0x1p-120)
                        << "rank " << r << ", row " << n << ", column " << v;
                }
            }
            if (ranks > 1) continue;
            expect_same_bits(loss, losses, "losses of one rank");
            expect_same_bits(own[r], whole, "gradients of one rank");
        }
    }
};

TEST_P(CpuClassifierParts, GiveTheLossesAndGradientsOfTheWhole) {
    for (const Parts& parts : {Parts{{40}}, Parts{{37, 43}}, Parts{{0, 9, 0, 1}}, Parts{{1000, 24}}}) {
        const std::int64_t N = 9, V = parts.first(parts.columns.size());
        ASSERT_TRUE(parts.columns.size() > 1 || parts.stored(0) == V);  // a single rank is compared bit by
                                                                        // bit
        const OwnedTensor logits = normal(X, {N, V}, "logits", 3.0);
        OwnedTensor targets = integers({N}, "targets", 0, V);
        targets.set(4, ignored_target);
        // The first column of each rank, which other ranks may mistake for their padding.
        for (std::size_t r = 0; r < parts.columns.size(); ++r) {
            if (parts.columns[r] > 0)
                targets.set(static_cast<std::int64_t>(r), static_cast<double>(parts.first(r)));
        }
        compare(logits, targets, parts);
    }
}

TEST_P(CpuClassifierParts, OfExtremeLogitsAreFinite) {
    OwnedTensor logits(X, {4, 24});
    for (std::int64_t v = 0; v < 24; ++v) {
        logits.set(v, v == 3 ? 9984.0 : -9984.0);                             // the target is the greatest
        logits.set(24 + v, v == 3 ? -9984.0 : 9984.0);                        // the target is the least
        logits.set(48 + v, 9984.0);                                           // all equal
        logits.set(72 + v, v == 3 ? largest_number(X) : -largest_number(X));  // differences overflow
    }
    compare(logits, filled(DType::int32, {4}, 3), {{4, 10, 10}});
}

TEST_P(CpuParts, ClassifierStatisticsAreThoseOfTheColumns) {
    OwnedTensor logits = filled(X, {3, 8}, 50.0);
    for (const std::int64_t n : {0, 1, 2}) {
        logits.set(n * 8, 1.0);
        logits.set(n * 8 + 1, 3.0);
        logits.set(n * 8 + 2, 3.0);
    }
    OwnedTensor targets = filled(DType::int32, {3}, 11);
    targets.set(1, 12);  // a column of the next rank
    targets.set(2, ignored_target);
    OwnedTensor statistics = garbage(DType::fp32, {3, 3});
    Operations ops;
    ops->classifier_statistics(statistics, logits, targets, 3, 9);
    const double sum = 2.0 + std::exp(-2.0);
    const std::vector<double> expected = {3.0, sum, 3.0, 3.0, sum, 0.0};
    for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(statistics.get(static_cast<std::int64_t>(i)), expected[i], 8.0 * u32 * sum) << i;
    }
    EXPECT_EQ(statistics.get(6), -INFINITY);
    EXPECT_EQ(statistics.get(7), 0.0);
    EXPECT_EQ(statistics.get(8), 0.0);
    ops->classifier_statistics(statistics, logits, targets, 0, 9);
    for (std::int64_t n = 0; n < 3; ++n) {
        EXPECT_EQ(statistics.get(n * 3), -INFINITY);
        EXPECT_EQ(statistics.get(n * 3 + 1), 0.0);
        EXPECT_EQ(statistics.get(n * 3 + 2), 0.0);
    }
    EXPECT_THROW(ops->classifier_statistics(statistics, logits, targets, 9, 0), ProgrammingError);
    EXPECT_THROW(ops->classifier_statistics(statistics, logits, targets, 8, -1), ProgrammingError);
    targets.set(0, -2);
    EXPECT_THROW(ops->classifier_statistics(statistics, logits, targets, 8, 0), ProgrammingError);
    OwnedTensor losses(DType::fp32, {3});
    EXPECT_THROW(ops->classifier_from_statistics(logits, losses, statistics, targets, 8, 0, 1.0F, true),
                 ProgrammingError);
}

// ---- copies

TEST(CpuCopy, EveryBitOfEveryDtype) {
    Operations ops;
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64, DType::int32}) {
        for (const std::int64_t n : {0, 1, 13, 10007, 40000}) {
            // All byte values, NaNs among them.
            OwnedTensor x(dtype, {n + 1}), y = filled(dtype, {n + 1}, 5.0);
            for (std::size_t i = 0; i < x->bytes(); ++i) x->data[i] = static_cast<std::byte>(i * 37 % 251);
            const OwnedTensor before = copy(y);
            ops->copy(y->flat(0, n), x->flat(0, n).view({1, n}));
            const std::size_t bytes = static_cast<std::size_t>(n) * size_of(dtype);
            EXPECT_EQ(std::memcmp(y->data, x->data, bytes), 0) << name_of(dtype) << " " << n;
            EXPECT_EQ(std::memcmp(y->data + bytes, before->data + bytes, size_of(dtype)), 0)
                << "past the end";
        }
    }
    OwnedTensor out(DType::fp32, {4});
    EXPECT_THROW(ops->copy(out, OwnedTensor(DType::fp32, {3})), ProgrammingError);
    EXPECT_THROW(ops->copy(out, OwnedTensor(DType::int32, {4})), ProgrammingError);
    EXPECT_THROW(ops->copy(out, {}), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuClassifierParts, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });
INSTANTIATE_TEST_SUITE_P(DTypes, CpuParts, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
