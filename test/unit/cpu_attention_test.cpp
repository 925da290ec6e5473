// The CPU's causal attention against plain loops in double precision.
#include "llmc/device/heads.h"
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

// B sequences of T rows, NH query heads of HS elements, K key heads, and a window of W keys (0: none). A row
// of qkv has the query heads, the key heads and the heads of values.
struct Sizes {
    std::int64_t B, T, NH, HS;
    std::int64_t K = NH, W = 0;

    std::int64_t row() const { return (NH + 2 * K) * HS; }
    Shape qkv() const { return {B, T, row()}; }
    Shape out() const { return {B, T, NH, HS}; }
    Shape lse() const { return {B, NH, T}; }
    std::int64_t at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t c) const {
        return ((b * T + t) * NH + h) * HS + c;
    }
    // The query head h (part 0), or the key head or values that it shares with others.
    std::int64_t in_qkv(int part, std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t c) const {
        const std::int64_t head = part == 0 ? h : NH + (part - 1) * K + h * K / NH;
        return (b * T + t) * row() + head * HS + c;
    }
    std::int64_t first_key(std::int64_t t) const { return W == 0 ? 0 : std::max(std::int64_t{0}, t - W + 1); }
    PackedHeads parts(const OwnedTensor& qkv) const { return packed_heads(qkv, NH, K, HS); }

    void forward(Operations& ops, const OwnedTensor& out, const OwnedTensor& lse,
                 const OwnedTensor& qkv) const {
        const auto [q, k, v] = parts(qkv);
        ops->attention_forward(out, lse, q, k, v, W);
    }
    void backward(Operations& ops, const OwnedTensor& dqkv, const OwnedTensor& dout, const OwnedTensor& qkv,
                  const OwnedTensor& out, const OwnedTensor& lse) const {
        const auto [dq, dk, dv] = parts(dqkv);
        const auto [q, k, v] = parts(qkv);
        ops->attention_backward(dq, dk, dv, dout, q, k, v, out, lse, W);
    }
};

// One position, odd sizes, head sizes that are not multiples of 16, and more than one block of queries (32)
// and of keys (128). One key head, two, and as many as query heads; windows of one key, within a block,
// across blocks, and longer than the sequence.
constexpr std::array sizes = {
    Sizes{1, 1, 1, 5},          Sizes{2, 13, 3, 5},        Sizes{3, 33, 2, 24},
    Sizes{1, 64, 2, 64},        Sizes{1, 70, 3, 40},       Sizes{2, 130, 1, 16},
    Sizes{1, 300, 1, 8},        Sizes{2, 37, 4, 24, 1},    Sizes{1, 70, 4, 16, 2},
    Sizes{1, 45, 2, 8, 2, 1},   Sizes{1, 70, 4, 8, 2, 19}, Sizes{1, 300, 2, 8, 1, 131},
    Sizes{1, 40, 2, 16, 2, 90}, Sizes{1, 33, 2, 8, 1, 33}};

// The scores, probabilities and their bounds for one query.
//
// A score is a sum of HS products times 1/sqrt(HS). Its error is at most e = (HS + 3) u sum|q k| / sqrt(HS).
// The relative error of an exponential exp(s - m) is 2 e + (|s - m| + 3) u. It consists of the errors of both
// numbers, the rounding of their difference, and 2.2 u. Here m is the greatest score or lse. A difference of
// more than 87 gives zero instead of 2^-125.
struct Query {
    Query(const Sizes& s, const OwnedTensor& qkv, std::int64_t b, std::int64_t h, std::int64_t t) {
        const double root = std::sqrt(static_cast<double>(s.HS));
        for (std::int64_t j = s.first_key(t); j <= t; ++j) {
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

    std::vector<double> scores, p;  // from first_key on
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
        Operations ops = operations(s);
        s.forward(ops, out, lse, qkv);
        std::vector<double> reference(static_cast<std::size_t>(out->elements()));
        std::vector<double> bound(reference.size());
        std::vector<double> references_of_lse, lse_bound;
        for (std::int64_t b = 0; b < s.B; ++b) {
            for (std::int64_t h = 0; h < s.NH; ++h) {
                for (std::int64_t t = 0; t < s.T; ++t) {
                    const Query query(s, qkv, b, h, t);
                    const std::int64_t first = s.first_key(t);
                    const auto keys = static_cast<double>(t - first) + 1.0;
                    // Numerator and denominator are sums of `keys` terms, rescaled once for each block of
                    // keys.
                    const double relative =
                        2.0 * query.p_error + (2.0 * keys + 4.0 * (keys / 128.0 + 2.0)) * u32;
                    references_of_lse.push_back(query.lse);
                    lse_bound.push_back(
                        relative +
                        3.0 * u32 * (std::fabs(query.lse) + std::log(keys) + query.score_error / u32));
                    for (std::int64_t c = 0; c < s.HS; ++c) {
                        double value = 0.0, size = 0.0;
                        for (std::int64_t j = first; j <= t; ++j) {
                            const double term = query.p[static_cast<std::size_t>(j - first)] *
                                                qkv.get(s.in_qkv(2, b, j, h, c));
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
        s.forward(ops, out, lse, qkv);
        s.backward(ops, dqkv, dout, qkv, out, lse);

        // `out` and lse are data here. Let e be the relative error of p, and E the error of a difference dout
        // . v - D: that of two sums of HS products. Then ds has the error |ds| (e + 2 u) + p E. p and ds may
        // be rounded to bf16. The sums over keys, or over the queries of a group of heads, add T NH/K + 3
        // roundings.
        std::vector<double> reference(static_cast<std::size_t>(qkv->elements()), 0.0);
        std::vector<double> error(reference.size(), 0.0);
        const auto head_size = static_cast<double>(s.HS);
        const std::int64_t addends = s.T * s.NH / s.K;
        const double sums = (static_cast<double>(addends) + 3.0) * u32;
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
                    const std::int64_t first = s.first_key(t);
                    for (std::int64_t j = first; j <= t; ++j) {
                        const double score = query.scores[static_cast<std::size_t>(j - first)];
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
    Operations ops = operations(s);
    s.forward(ops, before, lse, qkv);
    const std::int64_t changed = 33;
    for (std::int64_t t = changed; t < s.T; ++t) {
        for (int part = 0; part < 3; ++part) {
            for (std::int64_t c = 0; c < s.HS; ++c) qkv.set(s.in_qkv(part, 0, t, 0, c), 1e4);
        }
    }
    OwnedTensor after = garbage(X, s.out());
    s.forward(ops, after, lse, qkv);
    for (std::int64_t i = 0; i < s.at(0, changed, 0, 0); ++i) ASSERT_EQ(before.get(i), after.get(i));
    EXPECT_NE(before.get(s.at(0, changed, 0, 0)), after.get(s.at(0, changed, 0, 0)));
}

TEST_P(CpuAttention, BitsDoNotDependOnThreads) {
    // With one head, threads divide the blocks of queries. With many heads, they divide the heads.
    for (const Sizes& s : {Sizes{1, 300, 1, 24}, Sizes{3, 70, 5, 8}, Sizes{1, 300, 4, 8, 2, 100}}) {
        const OwnedTensor qkv = normal(X, s.qkv(), "qkv");
        const OwnedTensor dout = normal(X, s.out(), "dout");
        std::vector<std::vector<std::byte>> first;
        for (const int threads : {1, 3, 1, 2}) {
            Operations ops = operations(s, threads);
            OwnedTensor out = garbage(X, s.out());
            OwnedTensor lse = garbage(DType::fp32, s.lse());
            OwnedTensor dqkv = garbage(X, s.qkv());
            s.forward(ops, out, lse, qkv);
            s.backward(ops, dqkv, dout, qkv, out, lse);
            const std::vector bits = {out.bytes(), lse.bytes(), dqkv.bytes()};
            if (first.empty()) first = bits;
            EXPECT_TRUE(bits == first) << threads << " threads";
        }
    }
}

// A tensor of rows with `before` and `after` elements beside the heads. They must not change.
struct Apart {
    Apart(const Heads& like, std::int64_t before, std::int64_t behind)
        : rows(like.rows.dtype, {rows_in(like), before + like.count * like.size + behind}),
          heads{rows, before, like.count, like.size},
          after(behind) {
        for (std::int64_t i = 0; i < rows->elements(); ++i) rows.set(i, beside);
    }
    // Copies the heads of `from`, or to `to`.
    void take(const Heads& from) { copy_heads(heads, from); }
    void give(const Heads& to) const { copy_heads(to, heads); }
    bool is_whole() const {
        const std::int64_t row = rows->shape[1];
        for (std::int64_t i = 0; i < rows->elements(); ++i) {
            const std::int64_t at = i % row;
            if ((at < heads.first || at >= row - after) && rows.get(i) != beside) return false;
        }
        return true;
    }

    static std::int64_t rows_in(const Heads& heads) { return heads.rows.elements() / row_elements(heads); }
    static void copy_heads(const Heads& to, const Heads& from) {
        const std::size_t size = size_of(from.rows.dtype);
        const auto bytes = static_cast<std::size_t>(from.count * from.size) * size;
        const auto place = [&](const Heads& heads, std::int64_t n) {
            return heads.rows.data +
                   static_cast<std::size_t>(n * heads.rows.shape.last() + heads.first) * size;
        };
        for (std::int64_t n = 0; n < rows_in(from); ++n) std::memcpy(place(to, n), place(from, n), bytes);
    }

    static constexpr double beside = 77.0;
    OwnedTensor rows;
    Heads heads;
    std::int64_t after;
};

TEST_P(CpuAttention, HeadsMayLieAnywhere) {
    for (const Sizes& s : {Sizes{2, 37, 4, 8, 2, 20}, Sizes{1, 50, 2, 24}}) {
        const OwnedTensor qkv = normal(X, s.qkv(), "qkv"), dout = normal(X, s.out(), "dout");
        OwnedTensor out = garbage(X, s.out()), dqkv = garbage(X, s.qkv());
        OwnedTensor lse = garbage(DType::fp32, s.lse());
        Operations ops = operations(s);
        s.forward(ops, out, lse, qkv);
        s.backward(ops, dqkv, dout, qkv, out, lse);

        const auto [q, k, v] = s.parts(qkv);
        Apart apart_q(q, 3, 0), apart_k(k, 0, 5), apart_v(v, 8, 16);
        Apart dq(q, 1, 2), dk(k, 4, 0), dv(v, 0, 0);
        apart_q.take(q);
        apart_k.take(k);
        apart_v.take(v);
        OwnedTensor out_apart = garbage(X, s.out()), dqkv_apart = garbage(X, s.qkv());
        OwnedTensor lse_apart = garbage(DType::fp32, s.lse());
        ops->attention_forward(out_apart, lse_apart, apart_q.heads, apart_k.heads, apart_v.heads, s.W);
        ops->attention_backward(dq.heads, dk.heads, dv.heads, dout, apart_q.heads, apart_k.heads,
                                apart_v.heads, out_apart, lse_apart, s.W);
        const auto [dq_of_row, dk_of_row, dv_of_row] = s.parts(dqkv_apart);
        dq.give(dq_of_row);
        dk.give(dk_of_row);
        dv.give(dv_of_row);
        EXPECT_TRUE(out.bytes() == out_apart.bytes() && lse.bytes() == lse_apart.bytes());
        EXPECT_TRUE(dqkv.bytes() == dqkv_apart.bytes());
        EXPECT_TRUE(dq.is_whole() && dk.is_whole());
    }
}

// With a cache, a row has the same output as in a whole sequence.
TEST_P(CpuAttention, CachedRowsAreThoseOfTheSequence) {
    for (const Sizes& s : {Sizes{1, 70, 4, 24, 2}, Sizes{1, 70, 4, 8, 1, 19}, Sizes{1, 20, 2, 8, 2, 1},
                           Sizes{1, 20, 2, 8, 1, 50}}) {
        const OwnedTensor qkv = normal(X, s.qkv(), "qkv");
        OwnedTensor out = garbage(X, s.out()), lse = garbage(DType::fp32, s.lse());
        OwnedTensor cache = garbage(X, {s.T, 2, s.K, s.HS}), rows = garbage(X, s.out());
        Operations ops = operations(s);
        s.forward(ops, out, lse, qkv);
        std::int64_t position = 0;
        for (const std::int64_t count : {s.T - 9, std::int64_t{1}, std::int64_t{8}}) {
            const auto [q, k, v] =
                packed_heads(qkv->view({s.T, s.row()}).slice(position, count), s.NH, s.K, s.HS);
            const Tensor made = rows->view({s.T, s.NH, s.HS}).slice(position, count);
            ops->attention_cached_forward(made, cache, q, k, v, position, s.W);
            position += count;
        }
        const auto largest = [&](std::int64_t h, std::int64_t c) {
            double value = 0.0;
            for (std::int64_t t = 0; t < s.T; ++t)
                value = std::max(value, std::fabs(qkv.get(s.in_qkv(2, 0, t, h, c))));
            return value;
        };
        for (std::int64_t t = 0; t < s.T; ++t) {
            for (std::int64_t h = 0; h < s.NH; ++h) {
                const Query query(s, qkv, 0, h, t);
                const double keys = static_cast<double>(t) + 1.0;
                const double relative =
                    2.0 * query.p_error + (2.0 * keys + 4.0 * (keys / 128.0 + 2.0)) * u32 + u_factor;
                for (std::int64_t c = 0; c < s.HS; ++c) {
                    // Both have the error of check_forward(); the weights sum to 1.
                    const std::int64_t i = s.at(0, t, h, c);
                    const double error = relative * largest(h, c);
                    ASSERT_NEAR(rows.get(i), out.get(i), 2.0 * (error + uX * (std::fabs(out.get(i)) + error)))
                        << "row " << t << " of " << s.T << ", head " << h << ", window " << s.W;
                }
            }
        }
    }
}

TEST_P(CpuAttention, WrongShapesAreRefused) {
    const Sizes s{2, 6, 4, 4, 2};
    Operations ops = operations(s);
    const OwnedTensor qkv = normal(X, s.qkv(), "qkv");
    OwnedTensor out(X, s.out());
    OwnedTensor lse(DType::fp32, s.lse());
    const auto [q, k, v] = s.parts(qkv);
    EXPECT_NO_THROW(ops->attention_forward(out, lse, q, k, v));
    const auto refused = [&](const Tensor& o, const Tensor& l, const Heads& a, const Heads& b, const Heads& c,
                             std::int64_t window = 0) {
        EXPECT_THROW(ops->attention_forward(o, l, a, b, c, window), ProgrammingError);
    };
    refused(out, OwnedTensor(DType::fp32, {2, 6, 4}), q, k, v);
    refused(OwnedTensor(X, {2, 4, 6, 4}), lse, q, k, v);
    refused(OwnedTensor(X == DType::fp32 ? DType::bf16 : DType::fp32, s.out()), lse, q, k, v);
    refused(out, lse, {q.rows, 0, 2, 8}, k, v);
    refused(out, lse, q, {k.rows, 16, 3, 4}, {v.rows, 16, 3, 4});
    refused(out, lse, q, k, {v.rows, 24, 1, 4});
    refused(out, lse, q, k, {v.rows, 25, 2, 4});
    refused(out, lse, q, k, {v.rows, -1, 2, 4});
    refused(out, lse, q, k, {qkv->view({2, 6, 32}).slice(0, 1), 24, 2, 4});
    refused(out, lse, q, k, v, -1);
    OwnedTensor dqkv(X, s.qkv());
    const auto [dq, dk, dv] = s.parts(dqkv);
    EXPECT_NO_THROW(ops->attention_backward(dq, dk, dv, out, q, k, v, out, lse));
    EXPECT_THROW(ops->attention_backward(dq, dk, {dv.rows, 20, 2, 4}, out, q, k, v, out, lse),
                 ProgrammingError);
    EXPECT_THROW(ops->attention_backward(dq, {dk.rows, 12, 2, 4}, dv, out, q, k, v, out, lse),
                 ProgrammingError);
    EXPECT_THROW(ops->attention_backward(dq, dk, dv, lse, q, k, v, out, lse), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuAttention, testing::ValuesIn(arithmetics()),
                         [](const auto& param) { return param.param.name(); });

}  // namespace

}  // namespace llmc::cpu_test
