// The CPU's gradient norm, exact sum and AdamW.
#include <bit>
#include <limits>
#include <optional>

#include "llmc/device/stochastic_rounding.h"
#include "test/unit/cpu_test_support.h"

namespace llmc::cpu_test {

namespace {

TEST(CpuNorm, ABlocksSumDoesNotDependOnWhereItLies) {
    const OwnedTensor x = normal(DType::fp32, {4 * norm_block_elements}, "x");
    OwnedTensor together = garbage(DType::fp32, {4});
    Operations()->run(GlobalNormSquared{together, x});
    OwnedTensor alone = garbage(DType::fp32, {4});
    for (std::int64_t block = 0; block < 4; ++block) {
        Operations(1)->run(GlobalNormSquared{alone->slice(block, 1),
                                             x->slice(block * norm_block_elements, norm_block_elements)});
    }
    expect_same_bits(together, alone, "partials");
}

constexpr UpdateStep default_step = {3, 1e-2F, {0.9F, 0.95F, 1e-8F}, 1.0F};

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

    void step(double norm_squared, std::span<const UpdateSegment> segments, const UpdateStep& how,
              const std::optional<StochasticRounding>& rounding = {}, int threads = 3) {
        const OwnedTensor norm = filled(DType::fp64, {1}, norm_squared);
        Operations(threads)->run(OptimizerUpdate{OptimizerKind::adamw,
                                                 parameters(),
                                                 master,
                                                 gradients,
                                                 norm,
                                                 {{{m}, {v}}},
                                                 segments,
                                                 how,
                                                 rounding});
    }
    std::vector<std::vector<std::byte>> bits() const {
        return {master.bytes(), m.bytes(), v.bytes(), gradients.bytes(), rounded.bytes()};
    }

    OwnedTensor master, m, v, gradients, rounded;
};

class CpuAdamW : public testing::TestWithParam<DType> {
  protected:
    DType X = GetParam();
};

// A product with a power of two rounds as the number alone, so neither the norm nor the update depends on S.
TEST_P(CpuAdamW, BitsDoNotDependOnTheLossScale) {
    const std::int64_t n = 4 * norm_block_elements;
    const UpdateSegment all{0, n, 0.1F};
    const auto stepped = [&](double scale) {
        State state(X, n);
        // So small that no sum of squares overflows at the greatest scale.
        state.gradients = normal(DType::fp32, {n}, "gradients", 1e-3);
        for (std::int64_t i = 0; i < n; ++i) state.gradients.set(i, scale * state.gradients.get(i));
        OwnedTensor partials = garbage(DType::fp32, {4}), squared = filled(DType::fp64, {1}, 0);
        Operations ops;
        ops->run(GlobalNormSquared{partials, state.gradients});
        ops->run(Sum{squared, partials});
        UpdateStep how = default_step;
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
    const UpdateSegment all{0, n, 0.1F};
    State whole(X, n);
    whole.step(1.0, {&all, 1}, default_step);
    State parts(X, n);
    const OwnedTensor norm = filled(DType::fp64, {1}, 1.0);
    for (const auto& [begin, count] : {std::pair{std::int64_t{0}, cut}, {cut, n - cut}}) {
        const UpdateSegment segment{0, count, 0.1F};
        const auto part = [begin = begin, count = count](const OwnedTensor& t) {
            return t->slice(begin, count);
        };
        Operations(1)->run(OptimizerUpdate{OptimizerKind::adamw,
                                           parts.parameters(begin, count),
                                           part(parts.master),
                                           part(parts.gradients),
                                           norm,
                                           {{{part(parts.m)}, {part(parts.v)}}},
                                           {&segment, 1},
                                           default_step});
    }
    EXPECT_TRUE(whole.bits() == parts.bits());
}

// ---- stochastic rounding: test/kernels/adamw_test.cpp compares its bits on a GPU

constexpr StochasticRounding from_a_high_place = {.seed = 7, .first_element = (std::int64_t{3} << 33) + 128};

TEST(CpuStochasticRounding, IsThatOfItsHeader) {
    const std::int64_t n = 9001;
    const std::vector<UpdateSegment> segments = {{0, 37, 0.0F}, {66, 5001, 0.1F}, {5001, 8999, 0.0F}};
    State state(DType::bf16, n), nearest(DType::bf16, n);
    state.step(9.0, segments, default_step, from_a_high_place);
    nearest.step(9.0, segments, default_step);
    expect_same_bits(state.master, nearest.master, "master");
    std::int64_t differ = 0;
    for (const UpdateSegment& segment : segments) {
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
    const UpdateSegment all{0, n, 0.1F};
    State whole(DType::bf16, n), alone(DType::bf16, n), parts(DType::bf16, n);
    whole.step(1.0, {&all, 1}, default_step, from_a_high_place);
    alone.step(1.0, {&all, 1}, default_step, from_a_high_place, 1);
    EXPECT_TRUE(whole.bits() == alone.bits());
    const OwnedTensor norm = filled(DType::fp64, {1}, 1.0);
    for (const auto& [begin, count] : {std::pair{std::int64_t{0}, cut}, {cut, n - cut}}) {
        const UpdateSegment segment{0, count, 0.1F};
        const auto part = [begin = begin, count = count](const OwnedTensor& t) {
            return t->slice(begin, count);
        };
        Operations()->run(OptimizerUpdate{
            OptimizerKind::adamw,
            parts.parameters(begin, count),
            part(parts.master),
            part(parts.gradients),
            norm,
            {{{part(parts.m)}, {part(parts.v)}}},
            {&segment, 1},
            default_step,
            StochasticRounding{from_a_high_place.seed, from_a_high_place.first_element + begin}});
    }
    EXPECT_TRUE(whole.bits() == parts.bits());
}

// Moments in bf16 are those of fp32, rounded by random bits of their own; without a master copy, so is the weight.
TEST(CpuStochasticRounding, OfTheWholeStateIsThatOfItsHeader) {
    const std::int64_t n = 4500;
    const UpdateSegment all{3, n, 0.1F};
    const OwnedTensor norm = filled(DType::fp64, {1}, 9.0), gradients = normal(DType::fp32, {n}, "gradients");
    OwnedTensor w = normal(DType::bf16, {n}, "w"), m = normal(DType::bf16, {n}, "m", 0.1),
                v(DType::bf16, {n});
    for (std::int64_t i = 0; i < n; ++i) v.set(i, std::fabs(m.get(i)));
    OwnedTensor wide_w(DType::fp32, {n}), wide_m(DType::fp32, {n}), wide_v(DType::fp32, {n});
    Operations ops;
    ops->run(Cast{wide_w, w});
    ops->run(Cast{wide_m, m});
    ops->run(Cast{wide_v, v});
    ops->run(OptimizerUpdate{OptimizerKind::adamw,
                             w,
                             w,
                             gradients,
                             norm,
                             {{{m}, {v}}},
                             {&all, 1},
                             default_step,
                             from_a_high_place,
                             from_a_high_place});
    ops->run(OptimizerUpdate{OptimizerKind::adamw,
                             wide_w,
                             wide_w,
                             gradients,
                             norm,
                             {{{wide_m}, {wide_v}}},
                             {&all, 1},
                             default_step});
    for (std::int64_t i = 3; i < n; ++i) {
        const auto rounded = [&](const OwnedTensor& wide, Rounded what) {
            const RandomBits random = rounding_bits(
                from_a_high_place, static_cast<std::uint64_t>(default_step.step), i / 4 * 4, what);
            return to_float(
                bfloat16{round_stochastically(std::bit_cast<std::uint32_t>(static_cast<float>(wide.get(i))),
                                              random[static_cast<std::size_t>(i % 4)])});
        };
        ASSERT_EQ(w.get(i), rounded(wide_w, Rounded::weight)) << i;
        ASSERT_EQ(m.get(i), rounded(wide_m, Rounded::first_state)) << i;
        ASSERT_EQ(v.get(i), rounded(wide_v, Rounded::second_state)) << i;
    }
    const auto bits = [](Rounded what) { return rounding_bits(from_a_high_place, 3, 0, what); };
    EXPECT_FALSE(bits(Rounded::weight) == bits(Rounded::first_state));
    EXPECT_FALSE(bits(Rounded::weight) == bits(Rounded::second_state));
    EXPECT_FALSE(bits(Rounded::first_state) == bits(Rounded::second_state));
    EXPECT_FALSE(bits(Rounded::gradient) == bits(Rounded::second_state));
    EXPECT_THROW(ops->run(OptimizerUpdate{OptimizerKind::adamw,
                                          w,
                                          w,
                                          gradients,
                                          norm,
                                          {{{m}, {v}}},
                                          {&all, 1},
                                          default_step,
                                          from_a_high_place}),
                 ProgrammingError);
    EXPECT_THROW(
        ops->run(OptimizerUpdate{
            OptimizerKind::adamw, w, w, gradients, norm, {{{wide_m}, {wide_v}}}, {&all, 1}, default_step}),
        ProgrammingError);
}

// Rounded to nearest, a second moment would never decay: a step changes it by less than half of bf16's 2^-8.
TEST(CpuStochasticRounding, LetsMomentsDecay) {
    constexpr std::int64_t n = 4096, steps = 500;
    const UpdateSegment all{0, n, 0.0F};
    const OwnedTensor norm = filled(DType::fp64, {1}, 1.0), gradients = filled(DType::fp32, {n}, 0.0);
    OwnedTensor w = filled(DType::fp32, {n}, 1.0), m = filled(DType::bf16, {n}, 0.0),
                v = filled(DType::bf16, {n}, 1.0);
    UpdateStep how = default_step;
    how.numbers[1] = 0.999;
    for (how.step = 1; how.step <= steps; ++how.step)
        Operations()->run(OptimizerUpdate{OptimizerKind::adamw,
                                          w,
                                          w,
                                          gradients,
                                          norm,
                                          {{{m}, {v}}},
                                          {&all, 1},
                                          how,
                                          {},
                                          from_a_high_place});
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
            ops->run(Accumulate{sums, in, from_a_high_place, count});
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
            ops->run(Accumulate{parts->slice(0, cut), in->slice(0, cut), from_a_high_place, count});
            ops->run(Accumulate{parts->slice(cut, n - cut),
                                in->slice(cut, n - cut),
                                {from_a_high_place.seed, from_a_high_place.first_element + cut},
                                count});
            expect_same_bits(parts, expected, "sums of parts");
        }
    }
    const OwnedTensor sums = filled(DType::bf16, {4}, 0.0);
    for (const OwnedTensor& wrong : {filled(DType::fp32, {3}, 0.0), filled(DType::fp16, {4}, 0.0)})
        EXPECT_THROW(ops->run(Accumulate{sums, wrong, from_a_high_place, 0}), ProgrammingError);
    EXPECT_THROW(ops->run(Accumulate{filled(DType::fp32, {4}, 0.0), sums, from_a_high_place, 0}),
                 ProgrammingError);
    EXPECT_THROW(ops->run(Accumulate{sums, sums, {.seed = 0, .first_element = 2}, 0}), ProgrammingError);
}

// 4,096 equal terms: rounded to nearest, their sum would stop at 256 times a term.
TEST(CpuStochasticRounding, LetsSumsGrow) {
    constexpr std::int64_t n = 1024, terms = 4096;
    const OwnedTensor term = filled(DType::fp32, {n}, 0x1.5p-10), sums = filled(DType::bf16, {n}, 0.0);
    for (std::int64_t i = 0; i < terms; ++i)
        Operations()->run(Accumulate{sums, term, from_a_high_place, i << 32});
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

INSTANTIATE_TEST_SUITE_P(DTypes, CpuAdamW, testing::Values(DType::fp32, DType::bf16, DType::fp16),
                         [](const auto& param) { return std::string(name_of(param.param)); });

}  // namespace

}  // namespace llmc::cpu_test
