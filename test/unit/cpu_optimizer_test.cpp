// The CPU's gradient norm, exact sum and AdamW.
#include <bit>
#include <limits>
#include <optional>

#include "llmc/device/stochastic_rounding.h"
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

TEST(CpuNorm, PartialsAreSumsOfSquaresOfBlocks) {
    Operations ops;
    for (const std::int64_t blocks : {1, 5}) {
        const OwnedTensor x = normal(DType::fp32, {blocks * norm_block_elements}, "x");
        OwnedTensor partials = garbage(DType::fp32, {blocks});
        ops->global_norm_squared(partials, x);
        std::vector<double> reference(static_cast<std::size_t>(blocks), 0.0);
        for (std::int64_t i = 0; i < x->elements(); ++i) {
            reference[static_cast<std::size_t>(i / norm_block_elements)] += x.get(i) * x.get(i);
        }
        // 32 terms in a lane and a tree of 32 lanes: 38 roundings of positive numbers affect each term.
        expect_close(
            partials, reference, [&](std::size_t i) { return 38.0 * u32 * reference[i]; }, "partial");
    }
}

// Squares of bf16 numbers are exact in fp32, so every bit equals the sums of the same numbers in fp32.
TEST(CpuNorm, TakesGradientsInBf16) {
    const OwnedTensor x = normal(DType::bf16, {3 * norm_block_elements}, "x");
    OwnedTensor widened(DType::fp32, {3 * norm_block_elements});
    Operations ops;
    ops->cast(widened, x);
    OwnedTensor partials = garbage(DType::fp32, {3}), expected = garbage(DType::fp32, {3});
    ops->global_norm_squared(partials, x);
    ops->global_norm_squared(expected, widened);
    expect_same_bits(partials, expected, "partials");
}

TEST(CpuNorm, ABlocksSumDoesNotDependOnWhereItLies) {
    const OwnedTensor x = normal(DType::fp32, {4 * norm_block_elements}, "x");
    OwnedTensor together = garbage(DType::fp32, {4});
    Operations()->global_norm_squared(together, x);
    OwnedTensor alone = garbage(DType::fp32, {4});
    for (std::int64_t block = 0; block < 4; ++block) {
        Operations(1)->global_norm_squared(alone->slice(block, 1),
                                           x->slice(block * norm_block_elements, norm_block_elements));
    }
    expect_same_bits(together, alone, "partials");
    OwnedTensor wrong(DType::fp32, {1});
    EXPECT_THROW(Operations()->global_norm_squared(wrong, x->slice(0, 1000)), ProgrammingError);
}

TEST(CpuSum, AddsInDoublePrecision) {
    for (const std::int64_t n : {1, 63, 64, 1000, 100'003}) {
        // Numbers of very different sizes: sums round in fp64, and their order shows.
        OwnedTensor x = normal(DType::fp32, {n}, "x");
        for (std::int64_t i = 0; i < n; ++i) x.set(i, std::ldexp(x.get(i), static_cast<int>(i % 60)));
        OwnedTensor out = filled(DType::fp64, {1}, 3.0);
        long double reference = 3.0L, size = 3.0L;
        Operations ops;
        for (int call = 0; call < 2; ++call) {
            ops->sum(out, x);
            for (std::int64_t i = 0; i < n; ++i) {
                reference += x.get(i);
                size += std::fabs(x.get(i));
            }
        }
        // An element goes through n / (64 * 32) additions in its lane, then 5 + 64 + 1, and as many again in
        // the second call. All additions are in fp64.
        const double roundings = static_cast<double>(n) / 2048.0 + 72.0;
        EXPECT_LE(std::fabs(out.get(0) - static_cast<double>(reference)),
                  roundings * 0x1p-53 * static_cast<double>(size));
        for (const int threads : {1, 2}) {
            OwnedTensor again = filled(DType::fp64, {1}, 3.0);
            Operations other(threads);
            other->sum(again, x);
            other->sum(again, x);
            EXPECT_EQ(again.get(0), out.get(0)) << threads << " threads";
        }
    }
}

constexpr AdamWStep default_step = {3, 1e-2F, 0.9F, 0.95F, 1e-8F, 1.0F};

// A buffer of parameters with its optimizer state. In fp32, the parameters are the master copy.
struct State {
    State(DType dtype, std::int64_t n)
        : master(normal(DType::fp32, {n}, "master")),
          m(normal(DType::fp32, {n}, "m", 0.1)),
          v(normal(DType::fp32, {n}, "v", 0.1)),
          gradients(normal(DType::fp32, {n}, "gradients")),
          rounded(dtype == DType::fp32 ? OwnedTensor(dtype, {0}) : garbage(dtype, {n})) {
        for (std::int64_t i = 0; i < n; ++i) v.set(i, std::fabs(v.get(i)));
    }
    Tensor parameters() const { return rounded->elements() > 0 ? *rounded : *master; }
    Tensor parameters(std::int64_t begin, std::int64_t n) const { return parameters().slice(begin, n); }

    void step(double norm_squared, std::span<const AdamWSegment> segments, const AdamWStep& how,
              const std::optional<StochasticRounding>& rounding = {}, int threads = 3) {
        const OwnedTensor norm = filled(DType::fp64, {1}, norm_squared);
        Operations(threads)->adamw(parameters(), master, m, v, gradients, norm, segments, how, rounding);
    }
    std::vector<std::vector<std::byte>> bits() const {
        return {master.bytes(), m.bytes(), v.bytes(), gradients.bytes(), rounded.bytes()};
    }

    OwnedTensor master, m, v, gradients, rounded;
};

class CpuAdamW : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();

    void check_step(double norm_squared, const AdamWStep& how) const {
        const std::int64_t n = 9001;
        const std::vector<AdamWSegment> segments = {{0, 37, 0.0F}, {64, 5000, 0.1F}, {5000, 9000, 0.0F}};
        State state(X, n);
        const State before(X, n);
        state.step(norm_squared, segments, how);

        const double beta1 = how.beta1, beta2 = how.beta2, t = static_cast<double>(how.step);
        const double norm = std::sqrt(norm_squared);
        const double clip =
            how.max_grad_norm > 0.0F ? std::min(1.0, double{how.max_grad_norm} / (norm + 1e-6)) : 1.0;
        const double step_size = double{how.learning_rate} / (1.0 - std::pow(beta1, t));
        const double root = std::sqrt(1.0 - std::pow(beta2, t));
        std::vector<double> w = before.master.values(), m = before.m.values(), v = before.v.values();
        std::vector<double> w_bound(w.size(), 0x1p-1000), m_bound = w_bound, v_bound = w_bound;
        for (const AdamWSegment& segment : segments) {
            for (auto i = static_cast<std::size_t>(segment.begin); i < static_cast<std::size_t>(segment.end);
                 ++i) {
                // Each constant and each operation is rounded once. The terms of m have at most 4 roundings,
                // those of v 6. sqrt halves v's error, and the quotient has at most 8 roundings with its
                // constants.
                const double g = clip * before.gradients.get(static_cast<std::int64_t>(i));
                const double size_of_m = std::fabs(beta1 * m[i]) + std::fabs((1.0 - beta1) * g);
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
                const double denominator = std::sqrt(v[i]) / root + double{how.eps};
                const double decay = double{how.learning_rate} * double{segment.weight_decay};
                w[i] = w[i] * (1.0 - decay) - step_size * m[i] / denominator;
                m_bound[i] = 4.0 * u32 * size_of_m;
                v_bound[i] = 6.0 * u32 * v[i];
                w_bound[i] = 2.0 * u32 * (std::fabs(w[i]) + step_size * std::fabs(m[i]) / denominator) +
                             step_size / denominator * (m_bound[i] + 8.0 * u32 * std::fabs(m[i]));
            }
        }
        // Elements that no segment covers (37 to 63, and 9000) keep their old values: their bound is 0.
        expect_close(
            state.m, m, [&](std::size_t i) { return m_bound[i]; }, "m");
        expect_close(
            state.v, v, [&](std::size_t i) { return v_bound[i]; }, "v");
        expect_close(
            state.master, w, [&](std::size_t i) { return w_bound[i]; }, "master");
        expect_same_bits(state.gradients, before.gradients, "gradients");
        if (X == DType::fp32) return;
        for (const AdamWSegment& segment : segments) {
            for (std::int64_t i = segment.begin; i < segment.end; ++i) {
                const float master = static_cast<float>(state.master.get(i));
                with_dtype(X, [&](auto x) {
                    ASSERT_EQ(state.rounded.get(i), to_float(from_float<decltype(x)>(master))) << i;
                });
            }
        }
        EXPECT_TRUE(std::isnan(state.rounded.get(50))) << "padding is left alone";
    }
};

TEST_P(CpuAdamW, IsPyTorchsStep) {
    for (const std::int64_t step : {1, 3, 1000}) {
        AdamWStep how = default_step;
        how.step = step;
        check_step(9.0, how);   // clipped to a third
        check_step(0.25, how);  // below the limit: not clipped
        check_step(0.0, how);
        how.max_grad_norm = 0.0F;
        check_step(9.0, how);  // no limit
    }
}

TEST_P(CpuAdamW, ANormThatIsNotFiniteChangesNothing) {
    const AdamWSegment all{0, 100, 0.1F};
    for (const double norm : {static_cast<double>(INFINITY), static_cast<double>(NAN)}) {
        for (const float limit : {1.0F, 0.0F}) {
            State state(X, 100);
            AdamWStep how = default_step;
            how.max_grad_norm = limit;
            state.step(norm, {&all, 1}, how);
            EXPECT_TRUE(state.bits() == State(X, 100).bits());
        }
    }
    State state(X, 100);
    state.step(1.0, {&all, 1}, default_step);
    EXPECT_FALSE(state.bits() == State(X, 100).bits());
}

// A product with a power of two rounds as the number alone, so neither the norm nor the update depends on S.
TEST_P(CpuAdamW, BitsDoNotDependOnTheLossScale) {
    const std::int64_t n = 4 * norm_block_elements;
    const AdamWSegment all{0, n, 0.1F};
    const auto stepped = [&](double scale) {
        State state(X, n);
        // So small that no sum of squares overflows at the greatest scale.
        state.gradients = normal(DType::fp32, {n}, "gradients", 1e-3);
        for (std::int64_t i = 0; i < n; ++i) state.gradients.set(i, scale * state.gradients.get(i));
        OwnedTensor partials = garbage(DType::fp32, {4}), squared = filled(DType::fp64, {1}, 0);
        Operations ops;
        ops->global_norm_squared(partials, state.gradients);
        ops->sum(squared, partials);
        AdamWStep how = default_step;
        how.max_grad_norm = 0.01;  // the norm is about 0.06
        how.loss_scale = scale;
        state.step(squared.get(0), {&all, 1}, how);
        EXPECT_GT(squared.get(0) / (scale * scale), how.max_grad_norm * how.max_grad_norm);
        state.gradients = OwnedTensor(DType::fp32, {0});
        return std::pair(state.bits(), squared.get(0) / (scale * scale));
    };
    const auto expected = stepped(1);
    for (int exponent = 1; exponent <= 60; ++exponent)
        EXPECT_TRUE(stepped(std::ldexp(1, exponent)) == expected) << "2^" << exponent;
    EXPECT_FALSE(stepped(3) == expected) << "3 rounds";
}

TEST_P(CpuAdamW, BitsDoNotDependOnShards) {
    const std::int64_t n = 9001;
    const std::int64_t cut = 4321;  // not a multiple of anything
    const AdamWSegment all{0, n, 0.1F};
    State whole(X, n);
    whole.step(1.0, {&all, 1}, default_step);
    State parts(X, n);
    const OwnedTensor norm = filled(DType::fp64, {1}, 1.0);
    for (const auto& [begin, count] : {std::pair{std::int64_t{0}, cut}, {cut, n - cut}}) {
        const AdamWSegment segment{0, count, 0.1F};
        const auto part = [begin = begin, count = count](const OwnedTensor& t) {
            return t->slice(begin, count);
        };
        Operations(1)->adamw(parts.parameters(begin, count), part(parts.master), part(parts.m), part(parts.v),
                             part(parts.gradients), norm, {&segment, 1}, default_step);
    }
    EXPECT_TRUE(whole.bits() == parts.bits());
}

TEST_P(CpuAdamW, WrongArgumentsAreRefused) {
    State state(X, 100);
    const std::vector<AdamWSegment> overlapping = {{0, 50, 0.0F}, {40, 100, 0.0F}};
    const std::vector<AdamWSegment> outside = {{0, 101, 0.0F}};
    EXPECT_THROW(state.step(1.0, overlapping, default_step), ProgrammingError);
    EXPECT_THROW(state.step(1.0, outside, default_step), ProgrammingError);
    AdamWStep zeroth = default_step;
    zeroth.step = 0;
    EXPECT_THROW(state.step(1.0, {}, zeroth), ProgrammingError);
    const OwnedTensor norm = filled(DType::fp64, {1}, 1.0);
    const OwnedTensor apart = normal(DType::fp32, {100}, "apart");
    EXPECT_THROW(
        Operations()->adamw(apart, state.master, state.m, state.v, state.gradients, norm, {}, default_step),
        ProgrammingError)
        << "fp32 parameters are their own master copy";
}

TEST_P(CpuAdamW, TakesGradientsInX) {
    const std::int64_t n = 9001;
    const std::vector<AdamWSegment> segments = {{0, 37, 0.0F}, {64, 9000, 0.1F}};
    State state(X, n), expected(X, n);
    state.gradients = normal(X, {n}, "gradients");
    Operations()->cast(expected.gradients, state.gradients);
    state.step(9.0, segments, default_step);
    expected.step(9.0, segments, default_step);
    for (const auto& tensor : {&State::master, &State::m, &State::v, &State::rounded}) {
        expect_same_bits(state.*tensor, expected.*tensor, "state");
    }
    state.gradients = normal(X == DType::fp32 ? DType::bf16 : DType::fp64, {n}, "gradients");
    EXPECT_THROW(state.step(9.0, segments, default_step), ProgrammingError);
}

// ---- stochastic rounding: test/kernels/adamw_test.cpp compares its bits on a GPU

constexpr StochasticRounding from_a_high_place = {.seed = 7, .first_element = (std::int64_t{3} << 33) + 128};

TEST(CpuStochasticRounding, IsThatOfItsHeader) {
    const std::int64_t n = 9001;
    const std::vector<AdamWSegment> segments = {{0, 37, 0.0F}, {66, 5001, 0.1F}, {5001, 8999, 0.0F}};
    State state(DType::bf16, n), nearest(DType::bf16, n);
    state.step(9.0, segments, default_step, from_a_high_place);
    nearest.step(9.0, segments, default_step);
    expect_same_bits(state.master, nearest.master, "master");
    std::int64_t differ = 0;
    for (const AdamWSegment& segment : segments) {
        for (std::int64_t i = segment.begin; i < segment.end; ++i) {
            const RandomBits random =
                rounding_bits(from_a_high_place, static_cast<std::uint64_t>(default_step.step), i / 4 * 4);
            const bfloat16 expected = {
                round_stochastically(std::bit_cast<std::uint32_t>(static_cast<float>(state.master.get(i))),
                                     random[static_cast<std::size_t>(i % 4)])};
            ASSERT_EQ(state.rounded.get(i), to_float(expected)) << i;
            differ += state.rounded.get(i) != nearest.rounded.get(i) ? 1 : 0;
        }
    }
    // On average, a number is rounded the other way with a probability of 1/4. The tolerance is six standard
    // deviations.
    EXPECT_NEAR(static_cast<double>(differ), 8970 / 4.0, 6 * std::sqrt(8970 * 3.0 / 16));
    for (const std::int64_t padding : {37, 65, 8999, 9000})
        EXPECT_TRUE(std::isnan(state.rounded.get(padding)));
}

TEST(CpuStochasticRounding, DependsOnNeitherThreadsNorShards) {
    const std::int64_t n = 9004, cut = 4324;
    const AdamWSegment all{0, n, 0.1F};
    State whole(DType::bf16, n), alone(DType::bf16, n), parts(DType::bf16, n);
    whole.step(1.0, {&all, 1}, default_step, from_a_high_place);
    alone.step(1.0, {&all, 1}, default_step, from_a_high_place, 1);
    EXPECT_TRUE(whole.bits() == alone.bits());
    const OwnedTensor norm = filled(DType::fp64, {1}, 1.0);
    for (const auto& [begin, count] : {std::pair{std::int64_t{0}, cut}, {cut, n - cut}}) {
        const AdamWSegment segment{0, count, 0.1F};
        const auto part = [begin = begin, count = count](const OwnedTensor& t) {
            return t->slice(begin, count);
        };
        Operations()->adamw(
            parts.parameters(begin, count), part(parts.master), part(parts.m), part(parts.v),
            part(parts.gradients), norm, {&segment, 1}, default_step,
            StochasticRounding{from_a_high_place.seed, from_a_high_place.first_element + begin});
    }
    EXPECT_TRUE(whole.bits() == parts.bits());
}

// Moments in bf16 are those of fp32, rounded by random bits of their own; without a master copy, so is the weight.
TEST(CpuStochasticRounding, OfTheWholeStateIsThatOfItsHeader) {
    const std::int64_t n = 4500;
    const AdamWSegment all{3, n, 0.1F};
    const OwnedTensor norm = filled(DType::fp64, {1}, 9.0), gradients = normal(DType::fp32, {n}, "gradients");
    OwnedTensor w = normal(DType::bf16, {n}, "w"), m = normal(DType::bf16, {n}, "m", 0.1),
                v(DType::bf16, {n});
    for (std::int64_t i = 0; i < n; ++i) v.set(i, std::fabs(m.get(i)));
    OwnedTensor wide_w(DType::fp32, {n}), wide_m(DType::fp32, {n}), wide_v(DType::fp32, {n});
    Operations ops;
    ops->cast(wide_w, w);
    ops->cast(wide_m, m);
    ops->cast(wide_v, v);
    ops->adamw(w, w, m, v, gradients, norm, {&all, 1}, default_step, from_a_high_place, from_a_high_place);
    ops->adamw(wide_w, wide_w, wide_m, wide_v, gradients, norm, {&all, 1}, default_step);
    for (std::int64_t i = 3; i < n; ++i) {
        const auto rounded = [&](const OwnedTensor& wide, Rounded what) {
            const RandomBits random = rounding_bits(
                from_a_high_place, static_cast<std::uint64_t>(default_step.step), i / 4 * 4, what);
            return to_float(
                bfloat16{round_stochastically(std::bit_cast<std::uint32_t>(static_cast<float>(wide.get(i))),
                                              random[static_cast<std::size_t>(i % 4)])});
        };
        ASSERT_EQ(w.get(i), rounded(wide_w, Rounded::weight)) << i;
        ASSERT_EQ(m.get(i), rounded(wide_m, Rounded::first_moment)) << i;
        ASSERT_EQ(v.get(i), rounded(wide_v, Rounded::second_moment)) << i;
    }
    const auto bits = [](Rounded what) { return rounding_bits(from_a_high_place, 3, 0, what); };
    EXPECT_FALSE(bits(Rounded::weight) == bits(Rounded::first_moment));
    EXPECT_FALSE(bits(Rounded::weight) == bits(Rounded::second_moment));
    EXPECT_FALSE(bits(Rounded::first_moment) == bits(Rounded::second_moment));
    EXPECT_FALSE(bits(Rounded::gradient) == bits(Rounded::second_moment));
    EXPECT_THROW(ops->adamw(w, w, m, v, gradients, norm, {&all, 1}, default_step, from_a_high_place),
                 ProgrammingError);
    EXPECT_THROW(ops->adamw(w, w, wide_m, wide_v, gradients, norm, {&all, 1}, default_step),
                 ProgrammingError);
}

// Rounded to nearest, a second moment would never decay: a step changes it by less than half of bf16's 2^-8.
TEST(CpuStochasticRounding, LetsMomentsDecay) {
    constexpr std::int64_t n = 4096, steps = 500;
    const AdamWSegment all{0, n, 0.0F};
    const OwnedTensor norm = filled(DType::fp64, {1}, 1.0), gradients = filled(DType::fp32, {n}, 0.0);
    OwnedTensor w = filled(DType::fp32, {n}, 1.0), m = filled(DType::bf16, {n}, 0.0),
                v = filled(DType::bf16, {n}, 1.0);
    AdamWStep how = default_step;
    how.beta2 = 0.999;
    for (how.step = 1; how.step <= steps; ++how.step)
        Operations()->adamw(w, w, m, v, gradients, norm, {&all, 1}, how, {}, from_a_high_place);
    double sum = 0;
    for (std::int64_t i = 0; i < n; ++i) sum += v.get(i);
    // Each step's error has the mean 0 and at most the size of an ulp, 2^-8 of numbers below 1. The variance of their
    // sum is at most steps 2^-16 / 4, and the mean of n values has a standard deviation of 2^-9 sqrt(steps / n); six
    // of them.
    EXPECT_NEAR(sum / n, std::pow(0.999, steps), 6 * 0x1p-9 * std::sqrt(double{steps} / n));
}

// Over many steps, the mean of a weight's rounded values is the weight. This holds at every place of a quad,
// and for weights that rounding to nearest would never move.
TEST(CpuStochasticRounding, HasTheMeanOfTheWeight) {
    constexpr std::int64_t n = 4, steps = 40'000;
    constexpr float ulp = 0x1p-7F;  // distance between bf16 numbers in [1, 2)
    const std::vector<float> weights = {1 + 0.3F * ulp, -1 - ulp / 64, 1 + 0.97F * ulp, -1.5F - 0.5F * ulp};
    std::vector<double> sums(n, 0.0);
    for (std::int64_t step = 1; step <= steps; ++step) {
        std::vector<bfloat16> rounded(n);
        round_stochastically(rounded.data(), weights.data(), 0, n, from_a_high_place, step);
        for (std::size_t i = 0; i < n; ++i) {
            ASSERT_LT(std::fabs(to_float(rounded[i]) - weights[i]), ulp);
            sums[i] += to_float(rounded[i]);
        }
    }
    for (std::size_t i = 0; i < n; ++i) {
        const double below = std::floor(std::fabs(weights[i]) / ulp) * ulp;
        const double share = (std::fabs(weights[i]) - below) / ulp;
        // The standard deviation of the mean of yes-or-no draws. A mean is more than six of them away once in
        // 5e8.
        const double deviation = ulp * std::sqrt(share * (1 - share) / steps);
        EXPECT_NEAR(sums[i] / steps, weights[i], 6 * deviation) << weights[i];
    }
}

// A sum of gradients is added in fp32 and rounded once, on any number of threads, from any first element.
TEST(CpuStochasticRounding, OfSumsIsThatOfItsHeader) {
    constexpr std::int64_t count = std::int64_t{5} << 32 | 9;
    Operations ops;
    for (const std::int64_t n : {1, 13, 8192, 9001}) {
        for (const DType dtype : {DType::fp32, DType::bf16}) {
            // Terms of the size of one bf16 ulp of the other operand: rounding twice would show.
            const OwnedTensor before = normal(DType::bf16, {n}, "before"),
                              in = normal(dtype, {n}, "in", 0x1p-8);
            OwnedTensor sums = copy(before), expected(DType::bf16, {n});
            ops->accumulate(sums, in, from_a_high_place, count);
            for (std::int64_t i = 0; i < n; ++i) {
                const float sum = static_cast<float>(before.get(i)) + static_cast<float>(in.get(i));
                const RandomBits random =
                    rounding_bits(from_a_high_place, count, i / 4 * 4, Rounded::gradient);
                expected.set(
                    i, to_float(bfloat16{round_stochastically(std::bit_cast<std::uint32_t>(sum),
                                                              random[static_cast<std::size_t>(i % 4)])}));
            }
            expect_same_bits(sums, expected, "sums");
            const std::int64_t cut = n / 8 * 4;
            OwnedTensor parts = copy(before);
            ops->accumulate(parts->slice(0, cut), in->slice(0, cut), from_a_high_place, count);
            ops->accumulate(parts->slice(cut, n - cut), in->slice(cut, n - cut),
                            {from_a_high_place.seed, from_a_high_place.first_element + cut}, count);
            expect_same_bits(parts, expected, "sums of parts");
        }
    }
    const OwnedTensor sums = filled(DType::bf16, {4}, 0.0);
    for (const OwnedTensor& wrong : {filled(DType::fp32, {3}, 0.0), filled(DType::fp16, {4}, 0.0)})
        EXPECT_THROW(ops->accumulate(sums, wrong, from_a_high_place, 0), ProgrammingError);
    EXPECT_THROW(ops->accumulate(filled(DType::fp32, {4}, 0.0), sums, from_a_high_place, 0),
                 ProgrammingError);
    EXPECT_THROW(ops->accumulate(sums, sums, {.seed = 0, .first_element = 2}, 0), ProgrammingError);
}

// 4,096 equal terms: rounded to nearest, their sum would stop at 256 times a term.
TEST(CpuStochasticRounding, LetsSumsGrow) {
    constexpr std::int64_t n = 1024, terms = 4096;
    const OwnedTensor term = filled(DType::fp32, {n}, 0x1.5p-10), sums = filled(DType::bf16, {n}, 0.0);
    for (std::int64_t i = 0; i < terms; ++i) Operations()->accumulate(sums, term, from_a_high_place, i << 32);
    double mean = 0;
    for (std::int64_t i = 0; i < n; ++i) mean += sums.get(i) / n;
    // An ulp is at most 2^-7 of the sum so far, and an error's variance at most a quarter of its square: all in all
    // 2^-16 sum^2 terms / 3. The mean of n elements is within six of its standard deviations.
    const double sum = terms * 0x1.5p-10;
    EXPECT_NEAR(mean, sum, 6 * 0x1p-8 * sum * std::sqrt(terms / 3.0 / n));
}

TEST(CpuStochasticRounding, KeepsWhatNeedsNone) {
    for (const float exact :
         {0.0F, -0.0F, 1.0F, -1.5F, 0x1p-126F, 0x1p-133F, 0x1.fep127F, INFINITY, -INFINITY}) {
        for (const std::uint32_t random : {0U, 0x7fffffffU, 0xffffffffU}) {
            const std::uint32_t bits = std::bit_cast<std::uint32_t>(exact);
            EXPECT_EQ(round_stochastically(bits, random), bits >> 16) << exact;
        }
    }
    for (const std::uint32_t nan : {0x7fffffffU, 0xffffffffU, 0x7f800001U}) {
        EXPECT_TRUE(std::isnan(to_float(bfloat16{round_stochastically(nan, 0xffffffffU)})));
    }
}

TEST(CpuStochasticRounding, WrongArgumentsAreRefused) {
    State wide(DType::fp32, 100), state(DType::bf16, 100);
    const AdamWSegment all{0, 100, 0.1F};
    EXPECT_THROW(wide.step(1.0, {&all, 1}, default_step, from_a_high_place), ProgrammingError);
    EXPECT_THROW(state.step(1.0, {&all, 1}, default_step, StochasticRounding{1, 2}), ProgrammingError);
}

INSTANTIATE_TEST_SUITE_P(DTypes, CpuAdamW, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
