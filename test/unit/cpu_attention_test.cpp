// The CPU's causal attention against plain loops in double precision.
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

struct Sizes {
    std::int64_t B, T, NH, HS;

    Shape qkv() const { return {B, T, 3, NH, HS}; }
    Shape out() const { return {B, T, NH, HS}; }
    Shape lse() const { return {B, NH, T}; }
    std::int64_t at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t c) const {
        return ((b * T + t) * NH + h) * HS + c;
    }
    std::int64_t in_qkv(int part, std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t c) const {
        return (((b * T + t) * 3 + part) * NH + h) * HS + c;
    }
};

// One position, odd sizes, head sizes that are not multiples of 16, and more than one block of queries (32)
// and of keys (128).
constexpr std::array sizes = {Sizes{1, 1, 1, 5},   Sizes{2, 13, 3, 5},  Sizes{3, 33, 2, 24},
                              Sizes{1, 64, 2, 64}, Sizes{1, 70, 3, 40}, Sizes{2, 130, 1, 16},
                              Sizes{1, 300, 1, 8}};

// The scores, probabilities and their bounds for one query.
//
// A score is a sum of HS products times 1/sqrt(HS). Its error is at most e = (HS + 3) u sum|q k| / sqrt(HS).
// The relative error of an exponential exp(s - m) is 2 e + (|s - m| + 3) u. It consists of the errors of both
// numbers, the rounding of their difference, and 2.2 u. Here m is the greatest score or lse. A difference of
// more than 87 gives zero instead of 2^-125.
struct Query {
    Query(const Sizes& s, const OwnedTensor& qkv, std::int64_t b, std::int64_t h, std::int64_t t) {
        const double root = std::sqrt(static_cast<double>(s.HS));
        for (std::int64_t j = 0; j <= t; ++j) {
            double score = 0.0, size = 0.0;
            for (std::int64_t c = 0; c < s.HS; ++c) {
                const double term =
                    qkv.get(s.in_qkv(0, b, t, h, c)) * qkv.get(s.in_qkv(1, b, j, h, c)) / root;
                score += term;
                size += std::fabs(term);
            }
            scores.push_back(score);
            score_error = std::max(score_error, (static_cast<double>(s.HS) + 3.0) * u32 * size);
        }
        const double greatest = *std::max_element(scores.begin(), scores.end());
        const double least = *std::min_element(scores.begin(), scores.end());
        double sum = 0.0;
        for (const double score : scores) sum += std::exp(score - greatest);
        lse = greatest + std::log(sum);
        for (const double score : scores) p.push_back(std::exp(score - lse));
        p_error = 2.0 * score_error + (std::min(87.0, greatest - least) + 3.0) * u32;
    }

    std::vector<double> scores, p;
    double lse = 0.0;
    double score_error = 0.0;
    double p_error = 0.0;  // relative
};

class CpuAttention : public testing::TestWithParam<Arithmetic> {
  protected:
    DType X = GetParam().dtype;
    double uX = roundoff(X);
    // When bf16 matrices are multiplied, probabilities and the scores' gradients are rounded to bf16 first.
    double u_factor = GetParam().native_bf16 ? uX : 0.0;

    Operations operations(const Sizes& s, int threads = 3) const {
        return Operations(WorkspaceRequest{s.B, s.T, s.NH * s.HS, s.NH, 1, 1, X}, GetParam().native_bf16,
                          threads);
    }

    void check_forward(const Sizes& s, const OwnedTensor& qkv) const {
        OwnedTensor out = garbage(X, s.out());
        OwnedTensor lse = garbage(DType::fp32, s.lse());
        operations(s)->attention_forward(out, lse, qkv);
        std::vector<double> reference(static_cast<std::size_t>(out->elements()));
        std::vector<double> bound(reference.size());
        std::vector<double> references_of_lse, lse_bound;
        for (std::int64_t b = 0; b < s.B; ++b) {
            for (std::int64_t h = 0; h < s.NH; ++h) {
                for (std::int64_t t = 0; t < s.T; ++t) {
                    const Query query(s, qkv, b, h, t);
                    const auto keys = static_cast<double>(t) + 1.0;
                    // Numerator and denominator are sums of t + 1 terms, rescaled once for each block of
                    // keys.
                    const double relative =
                        2.0 * query.p_error + (2.0 * keys + 4.0 * (keys / 128.0 + 2.0)) * u32;
                    references_of_lse.push_back(query.lse);
                    lse_bound.push_back(
                        relative +
                        3.0 * u32 * (std::fabs(query.lse) + std::log(keys) + query.score_error / u32));
                    for (std::int64_t c = 0; c < s.HS; ++c) {
                        double value = 0.0, size = 0.0;
                        for (std::int64_t j = 0; j <= t; ++j) {
                            const double term =
                                query.p[static_cast<std::size_t>(j)] * qkv.get(s.in_qkv(2, b, j, h, c));
                            value += term;
                            size += std::fabs(term);
                        }
                        const auto i = static_cast<std::size_t>(s.at(b, t, h, c));
                        reference[i] = value;
                        const double error = (relative + u_factor) * size;
                        bound[i] = error + uX * (std::fabs(value) + error);
                    }
                }
            }
        }
        expect_close(
            out, reference, [&](std::size_t i) { return bound[i]; }, "out");
        expect_close(
            lse, references_of_lse, [&](std::size_t i) { return lse_bound[i]; }, "lse");
    }
};

TEST_P(CpuAttention, Forward) {
    for (const Sizes& s : sizes) check_forward(s, normal(X, s.qkv(), "qkv"));
}

TEST_P(CpuAttention, ForwardOfExtremeScores) {
    // q . k / sqrt(HS) goes up to 1e4 and more, with both signs: almost all probabilities are 0 or 1.
    for (const Sizes& s : {Sizes{1, 40, 2, 16}, Sizes{1, 150, 1, 5}}) {
        OwnedTensor qkv = normal(X, s.qkv(), "qkv", 80.0);
        check_forward(s, qkv);
    }
}

TEST_P(CpuAttention, BackwardOverwrites) {
    for (const Sizes& s : sizes) {
        const OwnedTensor qkv = normal(X, s.qkv(), "qkv");
        const OwnedTensor dout = normal(X, s.out(), "dout");
        OwnedTensor out = garbage(X, s.out());
        OwnedTensor lse = garbage(DType::fp32, s.lse());
        OwnedTensor dqkv = garbage(X, s.qkv());
        Operations ops = operations(s);
        ops->attention_forward(out, lse, qkv);
        ops->attention_backward(dqkv, dout, qkv, out, lse);

        // `out` and lse are data here. Let e be the relative error of p, and E the error of a difference dout
        // . v - D: that of two sums of HS products. Then ds has the error |ds| (e + 2 u) + p E. p and ds may
        // be rounded to bf16. The sums over keys or queries add T + 3 roundings.
        std::vector<double> reference(static_cast<std::size_t>(qkv->elements()), 0.0);
        std::vector<double> error(reference.size(), 0.0);
        const auto head_size = static_cast<double>(s.HS);
        const double sums = (static_cast<double>(s.T) + 3.0) * u32;
        const auto add = [&](int part, std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t c,
                             double factor, double factor_error, double other) {
            const auto i = static_cast<std::size_t>(s.in_qkv(part, b, t, h, c));
            const double rounded = factor_error + u_factor * (std::fabs(factor) + factor_error);
            reference[i] += factor * other;
            error[i] += (rounded + sums * (std::fabs(factor) + rounded)) * std::fabs(other);
        };
        for (std::int64_t b = 0; b < s.B; ++b) {
            for (std::int64_t h = 0; h < s.NH; ++h) {
                for (std::int64_t t = 0; t < s.T; ++t) {
                    const Query query(s, qkv, b, h, t);
                    const double stored_lse = lse.get((b * s.NH + h) * s.T + t);
                    double D = 0.0, size_D = 0.0;
                    for (std::int64_t c = 0; c < s.HS; ++c) {
                        const double term = dout.get(s.at(b, t, h, c)) * out.get(s.at(b, t, h, c));
                        D += term;
                        size_D += std::fabs(term);
                    }
                    for (std::int64_t j = 0; j <= t; ++j) {
                        const double score = query.scores[static_cast<std::size_t>(j)];
                        const double p = std::exp(score - stored_lse);
                        double dp = 0.0, size_dp = 0.0;
                        for (std::int64_t c = 0; c < s.HS; ++c) {
                            const double term = dout.get(s.at(b, t, h, c)) * qkv.get(s.in_qkv(2, b, j, h, c));
                            dp += term;
                            size_dp += std::fabs(term);
                        }
                        const double ds = p * (dp - D);
                        const double ds_error = std::fabs(ds) * (query.p_error + 2.0 * u32) +
                                                p * (head_size + 2.0) * u32 * (size_dp + size_D);
                        for (std::int64_t c = 0; c < s.HS; ++c) {
                            const double root = std::sqrt(head_size);
                            add(0, b, t, h, c, ds, ds_error, qkv.get(s.in_qkv(1, b, j, h, c)) / root);
                            add(1, b, j, h, c, ds, ds_error, qkv.get(s.in_qkv(0, b, t, h, c)) / root);
                            add(2, b, j, h, c, p, p * query.p_error, dout.get(s.at(b, t, h, c)));
                        }
                    }
                }
            }
        }
        expect_close(
            dqkv, reference,
            [&](std::size_t i) { return error[i] + uX * (std::fabs(reference[i]) + error[i]); }, "dqkv");
    }
}

TEST_P(CpuAttention, AQuerySeesNoLaterKey) {
    const Sizes s{1, 45, 1, 8};
    OwnedTensor qkv = normal(X, s.qkv(), "qkv");
    OwnedTensor before = garbage(X, s.out());
    OwnedTensor lse = garbage(DType::fp32, s.lse());
    operations(s)->attention_forward(before, lse, qkv);
    const std::int64_t changed = 33;
    for (std::int64_t t = changed; t < s.T; ++t) {
        for (int part = 0; part < 3; ++part) {
            for (std::int64_t c = 0; c < s.HS; ++c) qkv.set(s.in_qkv(part, 0, t, 0, c), 1e4);
        }
    }
    OwnedTensor after = garbage(X, s.out());
    operations(s)->attention_forward(after, lse, qkv);
    for (std::int64_t i = 0; i < s.at(0, changed, 0, 0); ++i) ASSERT_EQ(before.get(i), after.get(i));
    EXPECT_NE(before.get(s.at(0, changed, 0, 0)), after.get(s.at(0, changed, 0, 0)));
}

TEST_P(CpuAttention, BitsDoNotDependOnThreads) {
    // With one head, threads divide the blocks of queries. With many heads, they divide the heads.
    for (const Sizes& s : {Sizes{1, 300, 1, 24}, Sizes{3, 70, 5, 8}}) {
        const OwnedTensor qkv = normal(X, s.qkv(), "qkv");
        const OwnedTensor dout = normal(X, s.out(), "dout");
        std::vector<std::vector<std::byte>> first;
        for (const int threads : {1, 3, 1, 2}) {
            Operations ops = operations(s, threads);
            OwnedTensor out = garbage(X, s.out());
            OwnedTensor lse = garbage(DType::fp32, s.lse());
            OwnedTensor dqkv = garbage(X, s.qkv());
            ops->attention_forward(out, lse, qkv);
            ops->attention_backward(dqkv, dout, qkv, out, lse);
            const std::vector bits = {out.bytes(), lse.bytes(), dqkv.bytes()};
            if (first.empty()) first = bits;
            EXPECT_TRUE(bits == first) << threads << " threads";
        }
    }
}

TEST_P(CpuAttention, WrongShapesAreRefused) {
    const Sizes s{2, 6, 2, 4};
    Operations ops = operations(s);
    const OwnedTensor qkv = normal(X, s.qkv(), "qkv");
    OwnedTensor out(X, s.out());
    OwnedTensor lse(DType::fp32, s.lse());
    EXPECT_NO_THROW(ops->attention_forward(out, lse, qkv));
    EXPECT_THROW(ops->attention_forward(out, OwnedTensor(DType::fp32, {2, 6, 2}), qkv), ProgrammingError);
    EXPECT_THROW(ops->attention_forward(OwnedTensor(X, {2, 2, 6, 4}), lse, qkv), ProgrammingError);
    EXPECT_THROW(ops->attention_forward(out, lse, OwnedTensor(X, {2, 6, 2, 2, 6})), ProgrammingError);
    EXPECT_THROW(ops->attention_backward(OwnedTensor(DType::fp32, {2, 6, 3, 4, 2}), out, qkv, out, lse),
                 ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuAttention, testing::ValuesIn(arithmetics()),
                         [](const auto& param) { return param.param.name(); });

}  // namespace

}  // namespace llmc::cpu_test
