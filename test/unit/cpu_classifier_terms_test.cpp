// The cap and the z-loss of the CPU's classifier against plain loops in double precision.
#include <cmath>
#include <string>
#include <vector>

#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

constexpr std::int64_t N = 9, V = 37, Vp = 48;
constexpr float scale = 1.0F / 7.0F;

struct Results {
    std::vector<double> losses, dlogits;  // (N), (N,V)
    std::vector<double> loss_bounds, dlogit_bounds;
};

// The true results. A capped logit is within 12 u32 of the cap, and its slope within (2 exponent + 11) u32
// (cpu_activations_test.cpp). The argument of an exponential is rounded, and has these errors twice; the
// exponential has 2.2 u32. A sum has V terms.
Results results(DType X, const OwnedTensor& logits, const OwnedTensor& targets, ClassifierTerms terms) {
    Results r;
    const double cap = terms.cap, z = terms.z_loss;
    for (std::int64_t n = 0; n < N; ++n) {
        std::vector<double> y, slopes, slope_errors;
        double greatest = -INFINITY, least = INFINITY, sum = 0.0;
        for (std::int64_t v = 0; v < V; ++v) {
            const double x = logits.get(n * Vp + v), tanh = cap > 0.0 ? std::tanh(x / cap) : 0.0;
            y.push_back(cap > 0.0 ? cap * tanh : x);
            slopes.push_back(1.0 - tanh * tanh);
            slope_errors.push_back(cap > 0.0 ? (4.0 * std::fabs(x) / cap + 11.0) * u32 : 0.0);
            greatest = std::max(greatest, y.back());
            least = std::min(least, y.back());
        }
        for (const double each : y) sum += std::exp(each - greatest);
        const auto target = static_cast<std::int64_t>(targets.get(n));
        const bool kept = target != ignored_target;
        const double lse = std::log(sum) + greatest, factor = 1.0 + 2.0 * z * lse;
        const double term_error = (greatest - least + 2.2 + 24.0 * cap) * u32;
        const double sum_error = term_error + static_cast<double>(V) * u32;
        const double largest = std::max(std::fabs(greatest), std::fabs(least));
        const double loss_error = sum_error + (4.0 * (2.0 * largest + std::log(sum)) + 24.0 * cap) * u32;
        r.losses.push_back(kept ? lse - y[static_cast<std::size_t>(target)] : 0.0);
        r.loss_bounds.push_back(loss_error);
        for (std::size_t v = 0; v < y.size(); ++v) {
            const bool is_target = static_cast<std::int64_t>(v) == target;
            const double p = std::exp(y[v] - greatest) / sum;
            const double d = (p * factor - (is_target ? 1.0 : 0.0)) * slopes[v] * double{scale};
            // Three products, the sum of the factor and the reciprocal: 5 u32 of p and of the result.
            const double relative = term_error + sum_error + 2.0 * z * loss_error / factor + 5.0 * u32;
            const double error = p * factor * relative * slopes[v] * double{scale} +
                                 std::fabs(d) * (slope_errors[v] + 5.0 * u32 + roundoff(X));
            r.dlogits.push_back(kept ? d : 0.0);
            r.dlogit_bounds.push_back(1.01 * error + 0x1p-120);
        }
    }
    return r;
}

class CpuClassifierTerms : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();

    OwnedTensor logits() const {
        OwnedTensor all = garbage(X, {N, Vp});  // NaN in the padding
        const OwnedTensor drawn = normal(X, {N, V}, "logits", 10.0);
        for (std::int64_t i = 0; i < N * V; ++i) all.set(i / V * Vp + i % V, drawn.get(i));
        return all;
    }
    static OwnedTensor targets() {
        OwnedTensor drawn = integers({N}, "targets", 0, V);
        drawn.set(4, ignored_target);
        return drawn;
    }
};

TEST_P(CpuClassifierTerms, LossesAndGradient) {
    const OwnedTensor given = logits(), ids = targets();
    Operations ops;
    for (const ClassifierTerms& terms : {ClassifierTerms{15.0F, 0.0F}, {0.0F, 0.125F}, {30.0F, 0x1p-7F}}) {
        const Results expected = results(X, given, ids, terms);
        OwnedTensor dlogits = copy(given), losses = garbage(DType::fp32, {N}),
                    alone = garbage(DType::fp32, {N});
        ops->fused_classifier(dlogits, alone, ids, V, scale, false, terms);
        expect_same_bits(dlogits, given, "logits without write_dlogits");
        ops->fused_classifier(dlogits, losses, ids, V, scale, true, terms);
        expect_same_bits(losses, alone, "losses with and without gradients");
        expect_close(
            losses, expected.losses, [&](std::size_t i) { return expected.loss_bounds[i]; }, "losses");
        OwnedTensor inside(X, {N, V});
        for (std::int64_t i = 0; i < N * V; ++i) inside.set(i, dlogits.get(i / V * Vp + i % V));
        expect_close(
            inside, expected.dlogits, [&](std::size_t i) { return expected.dlogit_bounds[i]; }, "dlogits");
        for (std::int64_t i = 0; i < N * Vp; ++i) {
            const bool is_zero = i % Vp >= V || i / Vp == 4;  // padding, and the ignored row
            EXPECT_TRUE(!is_zero || dlogits.get(i) == 0.0) << i;
        }
    }
}

// One rank with all columns gives the bits of the whole; two ranks give the true results.
TEST_P(CpuClassifierTerms, OfRanksWithSomeColumns) {
    const OwnedTensor given = logits(), ids = targets();
    Operations ops;
    for (const ClassifierTerms& terms : {ClassifierTerms{15.0F, 0.0F}, {0.0F, 0.125F}, {30.0F, 0x1p-7F}}) {
        const Results expected = results(X, given, ids, terms);
        OwnedTensor whole = copy(given), losses = garbage(DType::fp32, {N});
        ops->fused_classifier(whole, losses, ids, V, scale, true, terms);
        for (const std::vector<std::int64_t>& columns : {std::vector<std::int64_t>{V}, {16, 0, V - 16}}) {
            const auto ranks = static_cast<std::int64_t>(columns.size());
            OwnedTensor statistics = garbage(DType::fp32, {ranks, N, 3});
            std::vector<OwnedTensor> own;
            std::vector<std::int64_t> firsts = {0};
            for (std::int64_t r = 0; r < ranks; ++r) {
                const std::int64_t count = columns[static_cast<std::size_t>(r)], first = firsts.back();
                own.push_back(garbage(X, {N, Vp}));
                for (std::int64_t i = 0; i < N * count; ++i) {
                    own.back().set(i / count * Vp + i % count, given.get(i / count * Vp + first + i % count));
                }
                ops->classifier_statistics(statistics->slice(r, 1).view({N, 3}), own.back(), ids, count,
                                           first, terms);
                firsts.push_back(first + count);
            }
            OwnedTensor joined(X, {N, V});
            for (std::int64_t r = 0; r < ranks; ++r) {
                const std::int64_t count = columns[static_cast<std::size_t>(r)];
                const std::int64_t first = firsts[static_cast<std::size_t>(r)];
                OwnedTensor& mine = own[static_cast<std::size_t>(r)];
                OwnedTensor loss = garbage(DType::fp32, {N});
                ops->classifier_from_statistics(mine, loss, statistics, ids, count, first, scale, true,
                                                terms);
                // The ranks' maxima are rounded once more, and their sums have one more term each.
                expect_close(
                    loss, expected.losses, [&](std::size_t i) { return 2.0 * expected.loss_bounds[i]; },
                    "losses");
                for (std::int64_t i = 0; i < N * count; ++i) {
                    joined.set(i / count * V + first + i % count, mine.get(i / count * Vp + i % count));
                }
                if (ranks > 1) continue;
                expect_same_bits(loss, losses, "losses of one rank");
                expect_same_bits(mine, whole, "gradients of one rank");
            }
            expect_close(
                joined, expected.dlogits, [&](std::size_t i) { return 2.0 * expected.dlogit_bounds[i]; },
                "dlogits");
        }
    }
}

// A z-loss of 0 must not matter where lse is infinite, and it must not change a bit.
TEST_P(CpuClassifierTerms, DefaultsAreNoTerms) {
    const OwnedTensor given = logits(), ids = targets();
    Operations ops;
    OwnedTensor without = copy(given), with = copy(given);
    OwnedTensor losses = garbage(DType::fp32, {N}), same = garbage(DType::fp32, {N});
    ops->fused_classifier(without, losses, ids, V, scale, true);
    ops->fused_classifier(with, same, ids, V, scale, true, {.cap = 0.0F, .z_loss = 0.0F});
    expect_same_bits(with, without, "dlogits");
    expect_same_bits(same, losses, "losses");
    EXPECT_THROW(ops->fused_classifier(with, same, ids, V, scale, true, {.cap = -1.0F}), ProgrammingError);
    EXPECT_THROW(ops->fused_classifier(with, same, ids, V, scale, true, {.z_loss = -1.0F}), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuClassifierTerms, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
