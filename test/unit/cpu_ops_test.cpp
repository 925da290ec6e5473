// The CPU's embeddings, layernorm, classifier and elementwise operations against plain loops in double
// precision. Products, attention, optimizer and device have their own test files.
#include <limits>

#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

class CpuOperations : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
    double uX = roundoff(GetParam());
};

// ---- embeddings

TEST_P(CpuOperations, EncoderForwardAddsRows) {
    for (const auto& [B, T, C] : {std::array{1, 1, 1}, {2, 13, 24}, {3, 5, 130}}) {
        const std::int64_t rows = 11;
        const OwnedTensor wte = normal(X, {rows, C}, "wte");
        const OwnedTensor wpe = normal(X, {T + 2, C}, "wpe");  // may have more positions than are used
        const OwnedTensor tokens = integers({B, T}, "tokens", 0, rows);
        OwnedTensor out = garbage(X, {B, T, C});
        Operations()->encoder_forward(out, tokens, wte, wpe);
        OwnedTensor expected(X, {B, T, C});
        for (std::int64_t i = 0; i < out->elements(); ++i) {
            const std::int64_t row = i / C;
            const std::int64_t c = i % C;
            const auto token = static_cast<std::int64_t>(tokens.get(row));
            expected.set(
                i, static_cast<float>(wte.get(token * C + c)) + static_cast<float>(wpe.get(row % T * C + c)));
        }
        expect_same_bits(out, expected, "embedding");
    }
}

TEST_P(CpuOperations, EncoderBackwardAccumulates) {
    for (const auto& [B, T, C] : {std::array{1, 1, 1}, {2, 13, 24}, {3, 5, 130}}) {
        const std::int64_t rows = 3;  // fewer than positions: most are hit several times
        const OwnedTensor dout = normal(X, {B, T, C}, "dout");
        const OwnedTensor tokens = integers({B, T}, "tokens", 0, rows);
        OwnedTensor dwte = normal(DType::fp32, {rows, C}, "dwte");
        OwnedTensor dwpe = normal(DType::fp32, {T + 2, C}, "dwpe");
        std::vector<double> sum_wte = dwte.values();
        std::vector<double> sum_wpe = dwpe.values();
        double largest = 0.0;
        Operations ops;
        for (int call = 0; call < 2; ++call) {
            ops->encoder_backward(dwte, dwpe, dout, tokens);
            for (std::int64_t i = 0; i < dout->elements(); ++i) {
                const std::int64_t row = i / C;
                const auto token = static_cast<std::int64_t>(tokens.get(row));
                sum_wte[static_cast<std::size_t>(token * C + i % C)] += dout.get(i);
                sum_wpe[static_cast<std::size_t>(row % T * C + i % C)] += dout.get(i);
                largest = std::max(largest, std::fabs(dout.get(i)));
            }
        }
        // A sum of at most 2 B T + 1 terms. Each term is below `largest`, and the initial value below 5.
        // Every addition rounds a partial sum that is at most their total.
        const double terms = 2.0 * B * T + 1.0;
        const auto bound = [&](std::size_t) { return terms * u32 * (terms * largest + 5.0); };
        expect_close(dwte, sum_wte, bound, "dwte");
        expect_close(dwpe, sum_wpe, bound, "dwpe");
    }
}

TEST_P(CpuOperations, EncoderRefusesATokenWithoutARow) {
    const OwnedTensor wte = normal(X, {4, 8}, "wte");
    const OwnedTensor wpe = normal(X, {2, 8}, "wpe");
    OwnedTensor out(X, {1, 2, 8});
    OwnedTensor tokens = filled(DType::int32, {1, 2}, 3);
    Operations ops;
    EXPECT_NO_THROW(ops->encoder_forward(out, tokens, wte, wpe));
    tokens.set(1, 4);
    EXPECT_THROW(ops->encoder_forward(out, tokens, wte, wpe), ProgrammingError);
    tokens.set(1, -1);
    EXPECT_THROW(ops->encoder_forward(out, tokens, wte, wpe), ProgrammingError);
    const OwnedTensor short_wpe = normal(X, {1, 8}, "wpe");
    EXPECT_THROW(ops->encoder_forward(out, filled(DType::int32, {1, 2}, 0), wte, short_wpe),
                 ProgrammingError);
}

// ---- layernorm

struct NormalizedRow {
    std::vector<double> h;
    double mean, rstd;
    double mean_error, h_error;  // bounds for the mean, and for h relative to |h| + 1
};

// Let d = x - mean, all in fp32. The mean is a sum of C terms, divided: its error is (C + 1) u mean|x|. A
// deviation then has that error and u |d|. The mean square deviation has a relative error of (C + 4) u; the
// mean's error enters it in second order. If eps does not hide it, it also has twice the mean's error
// relative to the deviation. rstd has half of that, and 3 u. So the error of h = d rstd is at most rstd
// mean_error + |h| (C + 8) u, with C >= 1.
NormalizedRow normalize(const OwnedTensor& x, std::int64_t row, std::int64_t C) {
    NormalizedRow r{};
    double absolute = 0.0;
    for (std::int64_t c = 0; c < C; ++c) {
        r.mean += x.get(row * C + c) / static_cast<double>(C);
        absolute += std::fabs(x.get(row * C + c)) / static_cast<double>(C);
    }
    double variance = 0.0;
    for (std::int64_t c = 0; c < C; ++c) {
        variance += std::pow(x.get(row * C + c) - r.mean, 2) / static_cast<double>(C);
    }
    r.rstd = 1.0 / std::sqrt(variance + 1e-5);
    for (std::int64_t c = 0; c < C; ++c) r.h.push_back((x.get(row * C + c) - r.mean) * r.rstd);
    const auto n = static_cast<double>(C);
    r.mean_error = (n + 1.0) * u32 * absolute;
    r.h_error = r.rstd * r.mean_error + (n + 8.0) * u32;
    return r;
}

struct Rows {
    std::int64_t N, C;
};
constexpr std::array layernorm_shapes = {Rows{1, 1}, Rows{1, 24}, Rows{13, 5}, Rows{33, 37}, Rows{150, 96}};

TEST_P(CpuOperations, LayernormForward) {
    for (const auto& [N, C] : layernorm_shapes) {
        const OwnedTensor x = normal(X, {N, C}, "x", 2.0, 3.0);
        const OwnedTensor gamma = normal(X, {C}, "gamma", 0.5, 1.0);
        const OwnedTensor beta = normal(X, {C}, "beta");
        OwnedTensor out = garbage(X, {N, C});
        OwnedTensor mean = garbage(DType::fp32, {N});
        OwnedTensor rstd = garbage(DType::fp32, {N});
        Operations()->layernorm_forward(out, mean, rstd, x, gamma, beta);
        std::vector<double> reference, bound, means, rstds, mean_bound, rstd_bound;
        for (std::int64_t n = 0; n < N; ++n) {
            const NormalizedRow r = normalize(x, n, C);
            for (std::int64_t c = 0; c < C; ++c) {
                const double h = r.h[static_cast<std::size_t>(c)];
                const double value = h * gamma.get(c) + beta.get(c);
                reference.push_back(value);
                bound.push_back(std::fabs(gamma.get(c)) * r.h_error * (std::fabs(h) + 1.0) +
                                3.0 * u32 * (std::fabs(h * gamma.get(c)) + std::fabs(beta.get(c))) +
                                uX * std::fabs(value));
            }
            means.push_back(r.mean);
            mean_bound.push_back(r.mean_error);
            rstds.push_back(r.rstd);
            rstd_bound.push_back(r.rstd * r.h_error);
        }
        expect_close(
            out, reference, [&](std::size_t i) { return bound[i]; }, "layernorm");
        expect_close(
            mean, means, [&](std::size_t i) { return mean_bound[i]; }, "mean");
        expect_close(
            rstd, rstds, [&](std::size_t i) { return rstd_bound[i]; }, "rstd");
    }
}

TEST_P(CpuOperations, LayernormOfALargeMeanKeepsItsVariance) {
    // Alternating m - 1/2 and m + 1/2 with m = 64, exact in both dtypes: h = -1, 1 apart from eps.
    const std::int64_t C = 64;
    OwnedTensor x(X, {1, C});
    for (std::int64_t c = 0; c < C; ++c) x.set(c, 64.0 + (c % 2 == 0 ? -0.5 : 0.5));
    OwnedTensor out = garbage(X, {1, C});
    OwnedTensor mean = garbage(DType::fp32, {1});
    OwnedTensor rstd = garbage(DType::fp32, {1});
    Operations()->layernorm_forward(out, mean, rstd, x, filled(X, {C}, 1.0), filled(X, {C}, 0.0));
    EXPECT_EQ(mean.get(0), 64.0);  // all sums in it are exact
    EXPECT_NEAR(rstd.get(0), 1.0 / std::sqrt(0.25 + 1e-5), 4.0 * u32 * 2.0);
}

TEST_P(CpuOperations, FusedResidualLayernormIsAddThenLayernorm) {
    for (const auto& [N, C] : layernorm_shapes) {
        const OwnedTensor a = normal(X, {N, C}, "a");
        const OwnedTensor b = normal(X, {N, C}, "b");
        const OwnedTensor gamma = normal(X, {C}, "gamma");
        const OwnedTensor beta = normal(X, {C}, "beta");
        OwnedTensor residual = garbage(X, {N, C});
        OwnedTensor out = garbage(X, {N, C});
        OwnedTensor mean = garbage(DType::fp32, {N});
        OwnedTensor rstd = garbage(DType::fp32, {N});
        Operations ops;
        ops->fused_residual_layernorm_forward(residual, out, mean, rstd, a, b, gamma, beta);
        OwnedTensor sum(X, {N, C});
        for (std::int64_t i = 0; i < N * C; ++i) {
            sum.set(i, static_cast<float>(a.get(i)) + static_cast<float>(b.get(i)));
        }
        expect_same_bits(residual, sum, "residual");
        OwnedTensor expected(X, {N, C});
        OwnedTensor expected_mean(DType::fp32, {N});
        OwnedTensor expected_rstd(DType::fp32, {N});
        ops->layernorm_forward(expected, expected_mean, expected_rstd, sum, gamma, beta);
        expect_same_bits(out, expected, "out");
        expect_same_bits(mean, expected_mean, "mean");
        expect_same_bits(rstd, expected_rstd, "rstd");
    }
}

TEST_P(CpuOperations, LayernormWithoutBetaHasTheBitsOfZeros) {
    for (const auto& [N, C] : layernorm_shapes) {
        const OwnedTensor a = normal(X, {N, C}, "a");
        const OwnedTensor b = normal(X, {N, C}, "b");
        // A gamma of 0 makes zeros of both signs. Adding `zeros` turns them into +0.
        OwnedTensor gamma = normal(X, {C}, "gamma");
        gamma.set(C / 2, 0.0);
        const OwnedTensor zeros = filled(X, {C}, 0.0);
        Operations ops;
        std::vector<std::vector<std::byte>> bits;
        for (const Tensor& beta : {*zeros, Tensor{}}) {
            OwnedTensor residual = garbage(X, {N, C}), out = garbage(X, {N, C}), alone = garbage(X, {N, C});
            OwnedTensor mean = garbage(DType::fp32, {N}), rstd = garbage(DType::fp32, {N});
            ops->layernorm_forward(alone, mean, rstd, a, gamma, beta);
            for (const OwnedTensor* result : {&alone, &mean, &rstd}) bits.push_back(result->bytes());
            ops->fused_residual_layernorm_forward(residual, out, mean, rstd, a, b, gamma, beta);
            for (const OwnedTensor* result : {&residual, &out, &mean, &rstd}) bits.push_back(result->bytes());
        }
        const auto without = bits.begin() + 7;
        EXPECT_TRUE(std::equal(bits.begin(), without, without, bits.end())) << N << " x " << C;
        OwnedTensor out(X, {N, C}), mean(DType::fp32, {N}), rstd(DType::fp32, {N});
        EXPECT_THROW(ops->layernorm_forward(out, mean, rstd, a, gamma, filled(X, {C + 1}, 0.0)),
                     ProgrammingError);
    }
}

TEST_P(CpuOperations, LayernormBackwardAccumulates) {
    for (const auto& [N, C] : layernorm_shapes) {
        const OwnedTensor x = normal(X, {N, C}, "x", 2.0, 3.0);
        const OwnedTensor gamma = normal(X, {C}, "gamma", 0.5, 1.0);
        const OwnedTensor dout = normal(X, {N, C}, "dout");
        OwnedTensor din = normal(X, {N, C}, "din");
        OwnedTensor dgamma = normal(DType::fp32, {C}, "dgamma");
        OwnedTensor dbeta = normal(DType::fp32, {C}, "dbeta");
        OwnedTensor mean(DType::fp32, {N});
        OwnedTensor rstd(DType::fp32, {N});
        for (std::int64_t n = 0; n < N; ++n) {
            const NormalizedRow r = normalize(x, n, C);
            mean.set(n, r.mean);
            rstd.set(n, r.rstd);
        }

        // The saved mean and rstd are data here, so h has two roundings: 2 u |h|. The sums over a row, for
        // the means of g and g h, have C + 1 more. The three terms add 5 roundings, and then the final ones
        // follow.
        const auto channels = static_cast<double>(C);
        std::vector<double> reference = din.values(), bound;
        std::vector<double> sum_gamma = dgamma.values(), sum_beta = dbeta.values();
        std::vector<double> size_gamma(sum_gamma.size(), 5.0), size_beta(sum_beta.size(), 5.0);
        for (std::int64_t n = 0; n < N; ++n) {
            double mean_g = 0.0, mean_gh = 0.0, size_g = 0.0, size_gh = 0.0;
            const auto h = [&, C = C](std::int64_t c) {
                return (x.get(n * C + c) - mean.get(n)) * rstd.get(n);
            };
            const auto g = [&, C = C](std::int64_t c) { return dout.get(n * C + c) * gamma.get(c); };
            for (std::int64_t c = 0; c < C; ++c) {
                mean_g += g(c) / channels;
                mean_gh += g(c) * h(c) / channels;
                size_g += std::fabs(g(c)) / channels;
                size_gh += std::fabs(g(c) * h(c)) / channels;
            }
            for (std::int64_t c = 0; c < C; ++c) {
                const auto i = static_cast<std::size_t>(n * C + c);
                const auto j = static_cast<std::size_t>(c);
                const double size = std::fabs(g(c)) + size_g + std::fabs(h(c)) * size_gh;
                const double before = reference[i];
                reference[i] += rstd.get(n) * (g(c) - mean_g - h(c) * mean_gh);
                bound.push_back(rstd.get(n) * (channels + 10.0) * u32 * size +
                                u32 * (std::fabs(before) + std::fabs(reference[i])) +
                                uX * std::fabs(reference[i]));
                sum_gamma[j] += dout.get(n * C + c) * h(c);
                size_gamma[j] += std::fabs(dout.get(n * C + c) * h(c));
                sum_beta[j] += dout.get(n * C + c);
                size_beta[j] += std::fabs(dout.get(n * C + c));
            }
        }
        Operations()->layernorm_backward(din, dgamma, dbeta, dout, x, gamma, mean, rstd);
        expect_close(
            din, reference, [&](std::size_t i) { return bound[i]; }, "din");
        // Sums of N terms and an initial value (below 5), with 3 roundings for each term.
        const double terms = static_cast<double>(N) + 4.0;
        expect_close(
            dgamma, sum_gamma, [&](std::size_t i) { return terms * u32 * size_gamma[i]; }, "dgamma");
        expect_close(
            dbeta, sum_beta, [&](std::size_t i) { return terms * u32 * size_beta[i]; }, "dbeta");
    }
}

// ---- classifier

// Losses and gradients of one batch. The first `V` of `Vp` columns are the vocabulary.
void check_classifier(DType X, const OwnedTensor& logits, const OwnedTensor& targets, std::int64_t V,
                      float scale) {
    const std::int64_t N = logits->shape[0];
    const std::int64_t Vp = logits->shape[1];
    std::vector<double> losses, loss_bound, gradients, gradient_bound;
    for (std::int64_t n = 0; n < N; ++n) {
        const auto target = static_cast<std::int64_t>(targets.get(n));
        double greatest = -INFINITY, least = INFINITY, sum = 0.0;
        for (std::int64_t v = 0; v < V; ++v) greatest = std::max(greatest, logits.get(n * Vp + v));
        for (std::int64_t v = 0; v < V; ++v) least = std::min(least, logits.get(n * Vp + v));
        for (std::int64_t v = 0; v < V; ++v) sum += std::exp(logits.get(n * Vp + v) - greatest);
        // An exponent l - greatest is rounded: u times the range. The exponential is zero from 87 on, so a
        // limit of 104 is safe. exp has 2.2 u, and the sum V additions. The logarithm and the differences
        // round again.
        const double range = std::min(104.0, greatest - least);
        const double relative = (range + 2.2 + static_cast<double>(V)) * u32;
        const bool ignored = target == ignored_target;
        const double loss = ignored ? 0.0 : std::log(sum) + greatest - logits.get(n * Vp + target);
        losses.push_back(loss);
        loss_bound.push_back(relative + 4.0 * u32 * (std::log(sum) + std::fabs(loss)));
        for (std::int64_t v = 0; v < Vp; ++v) {
            const double p = v < V ? std::exp(logits.get(n * Vp + v) - greatest) / sum : 0.0;
            const double d = ignored || v >= V ? 0.0 : (p - (v == target ? 1.0 : 0.0)) * double{scale};
            gradients.push_back(d);
            // p has the sum's error and its own. p - 1 adds a rounding. An exponential below 2^-125 becomes
            // 0.
            gradient_bound.push_back(ignored || v >= V ? 0x1p-1000
                                                       : double{scale} * (p * (2.0 * relative + 4.0 * u32) +
                                                                          u32 * (v == target) + 0x1p-125) +
                                                             roundoff(X) * std::fabs(d));
        }
    }
    Operations ops;
    OwnedTensor result = copy(logits);
    OwnedTensor loss = garbage(DType::fp32, {N});
    ops->fused_classifier(result, loss, targets, V, scale, false);
    expect_same_bits(result, logits, "logits without write_dlogits");
    expect_close(
        loss, losses, [&](std::size_t i) { return loss_bound[i]; }, "loss");
    OwnedTensor again = garbage(DType::fp32, {N});
    ops->fused_classifier(result, again, targets, V, scale, true);
    expect_same_bits(again, loss, "losses with and without gradients");
    expect_close(
        result, gradients, [&](std::size_t i) { return gradient_bound[i]; }, "dlogits");
}

TEST_P(CpuOperations, ClassifierIsSoftmaxAndCrossEntropy) {
    for (const auto& [N, V, Vp] :
         {std::array<std::int64_t, 3>{1, 37, 128}, {9, 37, 128}, {5, 1, 1}, {4, 256, 256}, {3, 1000, 1024}}) {
        OwnedTensor logits = normal(X, {N, Vp}, "logits", 3.0);
        OwnedTensor targets = integers({N}, "targets", 0, V);
        // Padded columns may hold any values.
        for (std::int64_t n = 0; n < N; ++n) {
            for (std::int64_t v = V; v < Vp; ++v) logits.set(n * Vp + v, v % 2 == 0 ? NAN : 1e30);
        }
        if (N > 2) targets.set(N / 2, ignored_target);
        check_classifier(X, logits, targets, V, 1.0F / 7.0F);
    }
}

TEST_P(CpuOperations, ClassifierOfExtremeLogitsIsFinite) {
    const std::int64_t V = 37;
    OwnedTensor logits(X, {4, 128});
    for (std::int64_t v = 0; v < V; ++v) {
        logits.set(v, v == 3 ? 9984.0 : -9984.0);                              // the target is the greatest
        logits.set(128 + v, v == 3 ? -9984.0 : 9984.0);                        // the target is the least
        logits.set(256 + v, 9984.0);                                           // all equal
        logits.set(384 + v, v == 3 ? largest_number(X) : -largest_number(X));  // differences overflow
    }
    const OwnedTensor targets = filled(DType::int32, {4}, 3);
    check_classifier(X, logits, targets, V, 0.5F);
}

TEST_P(CpuOperations, ClassifierRefusesATargetOutsideTheVocabulary) {
    OwnedTensor logits(X, {2, 128});
    OwnedTensor losses(DType::fp32, {2});
    Operations ops;
    EXPECT_THROW(ops->fused_classifier(logits, losses, filled(DType::int32, {2}, 37), 37, 1.0F, true),
                 ProgrammingError);
    EXPECT_THROW(ops->fused_classifier(logits, losses, filled(DType::int32, {2}, -2), 37, 1.0F, true),
                 ProgrammingError);
    EXPECT_THROW(ops->fused_classifier(logits, losses, filled(DType::int32, {2}, 0), 129, 1.0F, true),
                 ProgrammingError);
}

// ---- elementwise

TEST_P(CpuOperations, AddMayWriteOverAnOperand) {
    Operations ops;
    for (const std::int64_t n : {1, 13, 8192, 9001}) {
        const OwnedTensor a = normal(X, {n}, "a");
        const OwnedTensor b = normal(X, {n}, "b");
        OwnedTensor expected(X, {n});
        for (std::int64_t i = 0; i < n; ++i) {
            expected.set(i, static_cast<float>(a.get(i)) + static_cast<float>(b.get(i)));
        }
        OwnedTensor out = garbage(X, {n});
        ops->add(out, a, b);
        expect_same_bits(out, expected, "sum");
        OwnedTensor over_a = copy(a);
        ops->add(over_a, over_a, b);
        expect_same_bits(over_a, expected, "sum over a");
        OwnedTensor over_b = copy(b);
        ops->add(over_b, a, over_b);
        expect_same_bits(over_b, expected, "sum over b");
        OwnedTensor twice = copy(a);
        ops->add(twice, twice, twice);
        for (std::int64_t i = 0; i < n; ++i) ASSERT_EQ(twice.get(i), 2.0 * a.get(i));
    }
}

TEST_P(CpuOperations, AllFiniteFindsEveryNanAndInfinity) {
    Operations ops;
    for (const std::int64_t n : {1, 13, 64, 1001}) {
        OwnedTensor x = filled(X, {n}, largest_number(X));
        OwnedTensor flag = filled(DType::int32, {1}, 7);
        ops->all_finite(flag, x);
        EXPECT_EQ(flag.get(0), 1.0);
        for (std::int64_t i = 0; i < n; ++i) {
            for (const double bad :
                 {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
                const double good = x.get(i);
                x.set(i, bad);
                ops->all_finite(flag, x);
                ASSERT_EQ(flag.get(0), 0.0) << i;
                x.set(i, good);
            }
        }
        ops->all_finite(flag, x);
        EXPECT_EQ(flag.get(0), 1.0);
    }
}

TEST(CpuCast, RoundsToNearestEven) {
    const std::vector<float> from = {
        0.0F,   -0.0F,         1.0F,     1.0F + 0x1p-8F, 1.0F + 0x1.8p-7F, 1.0F + 0x1.02p-8F,
        -3e38F, 0x1.ffffp127F, INFINITY, -INFINITY,      0x1p-140F,        0x1.fp-133F};
    // Halfway cases go to the even neighbour, values beyond the largest to infinity. Subnormals are kept.
    const std::vector<float> to = {0.0F,           -0.0F,          1.0F,         1.0F,
                                   1.0F + 0x1p-6F, 1.0F + 0x1p-7F, -0x1.c4p127F, INFINITY,
                                   INFINITY,       -INFINITY,      0.0F,         0x1p-132F};
    const auto n = static_cast<std::int64_t>(from.size());
    OwnedTensor x(DType::fp32, {n});
    OwnedTensor expected(DType::fp32, {n});
    for (std::size_t i = 0; i < from.size(); ++i) {
        x.set(static_cast<std::int64_t>(i), from[i]);
        expected.set(static_cast<std::int64_t>(i), to[i]);
    }
    Operations ops;
    OwnedTensor narrow = garbage(DType::bf16, {n});
    ops->cast(narrow, x);
    OwnedTensor wide = garbage(DType::fp32, {n});
    ops->cast(wide, narrow);
    expect_same_bits(wide, expected, "cast");

    const OwnedTensor nan = filled(DType::fp32, {21}, NAN);
    OwnedTensor narrow_nan = filled(DType::bf16, {21}, 0.0);
    ops->cast(narrow_nan, nan);
    for (const double value : narrow_nan.values()) EXPECT_TRUE(std::isnan(value));
}

TEST(CpuCast, EveryElementOfLongTensors) {
    Operations ops;
    for (const std::int64_t n : {1, 15, 17, 4096, 10007}) {
        const OwnedTensor x = normal(DType::fp32, {n}, "x");
        OwnedTensor narrow = garbage(DType::bf16, {n});
        ops->cast(narrow, x);
        OwnedTensor wide = garbage(DType::fp32, {n});
        ops->cast(wide, narrow);
        for (std::int64_t i = 0; i < n; ++i) {
            ASSERT_EQ(wide.get(i), to_float(to_bfloat16(static_cast<float>(x.get(i)))));
        }
    }
}

TEST(CpuFill, EveryDtype) {
    Operations ops;
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64, DType::int32}) {
        for (const std::int64_t n : {1, 13, 10007}) {
            OwnedTensor x = filled(dtype, {n}, 5.0);
            ops->fill(x, -3.0F);
            for (const double value : x.values()) ASSERT_EQ(value, -3.0);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuOperations, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
