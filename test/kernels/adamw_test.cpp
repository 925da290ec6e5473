// AdamW's kernel: it has the bits of the CPU device, leaves padding unchanged, and rounds at random.
#include "llmc/device/cuda/adamw.cuh"
#include "llmc/device/cuda/adamw_8bit.cuh"

#include <algorithm>
#include <bit>
#include <cstring>
#include <optional>

#include "test/kernels/kernel_test.h"

namespace kernel_test {
namespace {

using llmc::AdamWCoefficients;
using llmc::AdamWSegment;
using llmc::AdamWStep;
using llmc::StochasticRounding;

// The contexts of all tests, and one with a single multiprocessor, whose blocks go over many tiles.
std::vector<LaunchContext> contexts() {
    auto all = launch_contexts();
    all.push_back(all.front());
    all.back().chip.multiprocessors = 1;
    return all;
}

// Tensors that begin at multiples of 128 elements, as in a unit, and end at any whole quad. The buffer
// continues after the last.
const std::vector<std::vector<AdamWSegment>> layouts = {
    {{0, 8, 0}, {128, 260, 0.1}},
    {{0, 4, 0.1}},
    {{128, 131072, 0.01}},
    {{0, 40, 0},
     {128, 168, 0},
     {256, 5056, 0.1},
     {5120, 5240, 0},
     {5248, 6848, 0.1},
     {6912, 6912, 0.1},
     {6912, 6952, 0},
     {7040, 20000, 0.3}},
};
// Two blocks; the first tensor ends in one of them.
const std::vector<std::vector<AdamWSegment>> layouts_for_races = {{{0, 40, 0}, {128, 2200, 0.1}}};

const AdamWStep ordinary_step{
    .step = 3, .learning_rate = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .max_grad_norm = 1};

struct Launches : llmc::cuda::LaunchObserver {
    void launched(const llmc::cuda::LaunchRecord&) override { ++count; }
    int count = 0;
};

template <class X, class Gradient = float, class Moment = float, class Master = float>
struct Unit {
    // In bf16, moments and weights without a master copy are always rounded at random.
    static constexpr bool rounds_moments = !std::is_same_v<Moment, float>,
                          has_master = !std::is_same_v<X, Master>;

    explicit Unit(std::int64_t n)
        : elements(n), parameters(n), w(n), m(n), v(n), gradients(n), norm_squared(1), coefficients(1) {}

    void draw(std::uint64_t from) {
        Draw draw(from);
        draw.normal(w, 0.02);
        draw.normal(m, 0.1);
        draw.normal(v, 0.1);
        for (std::int64_t i = 0; i < elements; ++i)
            v[i] = llmc::cuda::from_float<Moment>(to_float(v[i]) * to_float(v[i]));
        draw.normal(gradients, 1);
        for (std::int64_t i = 0; i < elements; ++i) parameters[i] = llmc::cuda::from_float<X>(to_float(w[i]));
        norm_squared[0] = 7.5;
    }

    void update(LaunchContext on, const std::vector<AdamWSegment>& segments, const AdamWStep& step,
                const std::optional<StochasticRounding>& rounding = {}) {
        Launches launches;
        on.observer = &launches;
        llmc::cuda::store_coefficients(on, coefficients.data(), step);
        const llmc::cuda::AdamWBuffers<X, Master, Moment, Gradient> buffers{
            parameters.data(), w.data(), m.data(), v.data(), gradients.data()};
        llmc::cuda::adamw(on, buffers, norm_squared.data(), coefficients.data(), segments,
                          of_weights(rounding), of_moments());
        synchronize();
        // A launch for the coefficients, and one for all tensors if they have elements.
        const bool any =
            std::ranges::any_of(segments, [](const auto& each) { return each.end > each.begin; });
        EXPECT_EQ(launches.count, any ? 2 : 1);
        if constexpr (!has_master) parameters.copy_from(w);
    }

    void update_on_cpu(const std::vector<AdamWSegment>& segments, const AdamWStep& step,
                       const std::optional<StochasticRounding>& rounding = {}) {
        const llmc::Tensor master = tensor(w, {elements});
        cpu().run(llmc::AdamW{has_master ? tensor(parameters, {elements}) : master, master,
                              tensor(m, {elements}), tensor(v, {elements}), tensor(gradients, {elements}),
                              tensor(norm_squared, {1}), segments, step, of_weights(rounding), of_moments()});
        if constexpr (!has_master) parameters.copy_from(w);
    }

    static std::optional<StochasticRounding> of_weights(const std::optional<StochasticRounding>& rounding) {
        return !has_master && !std::is_same_v<X, float> && !rounding ? StochasticRounding{seed(), 128}
                                                                     : rounding;
    }
    static std::optional<StochasticRounding> of_moments() {
        return rounds_moments ? std::optional(StochasticRounding{seed(), std::int64_t{128} << 31})
                              : std::nullopt;
    }

    // Compares bits.
    void expect_same(const Unit& other) const {
        Comparison comparison;
        for (std::int64_t i = 0; i < elements; ++i) {
            comparison.see_equal("m", i, to_float(m[i]), to_float(other.m[i]));
            comparison.see_equal("v", i, to_float(v[i]), to_float(other.v[i]));
            comparison.see_equal("w", i, to_float(w[i]), to_float(other.w[i]));
            comparison.see_equal("parameters", i, to_float(parameters[i]), to_float(other.parameters[i]));
        }
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }

    std::int64_t elements;
    Array<X> parameters;
    Array<Master> w;
    Array<Moment> m, v;
    Array<Gradient> gradients;
    Array<double> norm_squared;
    Array<AdamWCoefficients> coefficients;
};

// Parameters in fp32, bf16 and fp16; gradients in bf16; moments in bf16; no master copy.
template <class U>
class AdamW : public testing::Test {};
using Units = testing::Types<Unit<float>, Unit<bf16>, Unit<fp16>, Unit<bf16, bf16>, Unit<float, float, bf16>,
                             Unit<bf16, float, bf16>, Unit<fp16, float, bf16>, Unit<bf16, bf16, bf16>,
                             Unit<bf16, float, float, bf16>, Unit<bf16, bf16, float, bf16>,
                             Unit<bf16, float, bf16, bf16>, Unit<bf16, bf16, bf16, bf16>>;
TYPED_TEST_SUITE(AdamW, Units);

TYPED_TEST(AdamW, GivesTheBitsOfTheCpu) {
    for (const auto& on : contexts()) {
        for (const auto& segments : shapes(layouts, layouts_for_races)) {
            const std::int64_t elements = segments.back().end + 128;
            TypeParam unit(elements), expected(elements);
            unit.draw(seed());
            expected.draw(seed());
            // The first step divides by the smallest corrections. The second is without clipping. At the late
            // step the corrections are 1. The last gradients are scaled.
            for (const auto& [step, max_grad_norm] :
                 {std::pair{1, 1.0}, {2, 0.0}, {100000, 2.0}, {3, 0x1p-10}}) {
                AdamWStep at = ordinary_step;
                if (step == 3) at.loss_scale = 0x1p10;
                at.step = step;
                at.max_grad_norm = max_grad_norm;
                unit.update(on, segments, at);
                expected.update_on_cpu(segments, at);
            }
            unit.expect_same(expected);
        }
    }
}

// There is nothing to update, and only the coefficients are launched.
TYPED_TEST(AdamW, WithoutElements) {
    for (const std::vector<AdamWSegment>& segments : {std::vector<AdamWSegment>{}, {{0, 0, 0.1}}}) {
        TypeParam unit(512), before(512);
        unit.draw(seed());
        before.draw(seed());
        unit.update(launch_contexts().front(), segments, ordinary_step);
        unit.expect_same(before);
    }
}

TYPED_TEST(AdamW, LeavesAllAloneIfTheNormIsNotFinite) {
    for (const double norm_squared : {HUGE_VAL, std::nan("")}) {
        TypeParam unit(512), before(512);
        unit.draw(seed());
        before.draw(seed());
        unit.norm_squared[0] = norm_squared;
        unit.update(launch_contexts().front(), {{0, 512, 0.1}}, ordinary_step);
        unit.expect_same(before);
    }
}

TYPED_TEST(AdamW, GivesTheSameBitsTwice) {
    TypeParam unit(4096), again(4096);
    for (TypeParam* each : {&unit, &again}) {
        each->draw(seed());
        each->update(launch_contexts().back(), {{0, 4096, 0.1}}, ordinary_step);
    }
    unit.expect_same(again);
}

// ---- random rounding ----

// Philox4x32-10 from its paper: ten rounds of two products. Their halves are crossed and mixed with a key, to
// which each round adds the golden ratio and sqrt(3) - 1.
std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = std::uint64_t{0xD2511F53} * counter[0];
        const std::uint64_t b = std::uint64_t{0xCD9E8D57} * counter[2];
        counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(b),
                   static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(a)};
        key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
    }
    return counter;
}

// The reference rounding: adds random bits to bits 0 ... 15, then cuts these off.
float rounded_at_random(float x, const StochasticRounding& rounding, std::uint64_t step, std::int64_t i) {
    const auto element = static_cast<std::uint64_t>(rounding.first_element + i);
    const auto random =
        philox({static_cast<std::uint32_t>(element / 4), static_cast<std::uint32_t>(element / 4 >> 32),
                static_cast<std::uint32_t>(step), static_cast<std::uint32_t>(step >> 32)},
               {static_cast<std::uint32_t>(rounding.seed),
                static_cast<std::uint32_t>(rounding.seed >> 32)})[element % 4];
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits + (random >> 16)) & 0xffff0000u;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

TEST(AdamWRounding, IsPhiloxOfSeedStepAndElement) {
    const std::vector<AdamWSegment> segments = {{0, 8, 0}, {128, 1028, 0.1}};
    for (const auto& on : launch_contexts()) {
        const StochasticRounding rounding{seed() * 0x9E3779B97F4A7C15u, (std::int64_t{5} << 33) + 1024};
        AdamWStep step = ordinary_step;
        step.step = (std::int64_t{1} << 32) + 7;
        Unit<bf16> unit(1152), expected(1152);
        unit.draw(seed());
        expected.draw(seed());
        unit.update(on, segments, step, rounding);
        expected.update_on_cpu(segments, step);
        for (const AdamWSegment& segment : segments) {
            for (std::int64_t i = segment.begin; i < segment.end; ++i) {
                expected.parameters[i] = llmc::cuda::from_float<bf16>(
                    rounded_at_random(expected.w[i], rounding, static_cast<std::uint64_t>(step.step), i));
            }
        }
        unit.expect_same(expected);
    }
}

// Both devices round to the same bits, wherever the unit begins in the model.
template <class U>
void expect_bits_of_the_cpu() {
    for (const auto& on : contexts()) {
        for (const auto& segments : shapes(layouts, layouts_for_races)) {
            const std::int64_t elements = segments.back().end + 128;
            U unit(elements), expected(elements);
            unit.draw(seed());
            expected.draw(seed());
            const StochasticRounding rounding{seed(), std::int64_t{128} << 30};
            for (const std::int64_t step : {1, 2, 100000}) {
                AdamWStep at = ordinary_step;
                at.step = step;
                unit.update(on, segments, at, rounding);
                expected.update_on_cpu(segments, at, rounding);
            }
            unit.expect_same(expected);
        }
    }
}
TEST(AdamWRounding, GivesTheBitsOfTheCpu) { expect_bits_of_the_cpu<Unit<bf16>>(); }
TEST(AdamWRounding, GivesTheBitsOfTheCpuWithGradientsInBf16) { expect_bits_of_the_cpu<Unit<bf16, bf16>>(); }
TEST(AdamWRounding, GivesTheBitsOfTheCpuWithMomentsInBf16) {
    expect_bits_of_the_cpu<Unit<bf16, float, bf16>>();
    expect_bits_of_the_cpu<Unit<bf16, bf16, bf16>>();
}

// A rank that holds a shard rounds it in the same way as a rank that holds everything.
TEST(AdamWRounding, DoesNotDependOnShards) {
    const auto on = launch_contexts().front();
    Unit<bf16> whole(2048), upper(1024);
    whole.draw(seed());
    for (std::int64_t i = 0; i < 1024; ++i) {
        upper.w[i] = whole.w[1024 + i];
        upper.m[i] = whole.m[1024 + i];
        upper.v[i] = whole.v[1024 + i];
        upper.gradients[i] = whole.gradients[1024 + i];
    }
    upper.norm_squared[0] = whole.norm_squared[0];
    whole.update(on, {{0, 2048, 0.1}}, ordinary_step, StochasticRounding{seed(), 4096});
    upper.update(on, {{0, 1024, 0.1}}, ordinary_step, StochasticRounding{seed(), 4096 + 1024});
    for (std::int64_t i = 0; i < 1024; ++i) {
        EXPECT_EQ(to_float(upper.parameters[i]), to_float(whole.parameters[1024 + i])) << i;
    }
}

// An update that does not change the weights, so that only the rounding has an effect. Uses few threads: at
// most 1024.
void round_weights(Unit<bf16>& unit, std::int64_t step, std::uint64_t from) {
    unit.m.fill(0);
    unit.v.fill(1);
    unit.gradients.fill(0);
    unit.norm_squared[0] = 1;
    AdamWStep at = ordinary_step;
    at.step = step;
    unit.update(contexts().back(), {{0, unit.elements, 0}}, at, StochasticRounding{from, 0});
}

TEST(AdamWRounding, IsUnbiased) {
    constexpr std::int64_t elements = 1 << 16;
    constexpr float ulp = 0x1p-7f;  // distance between bf16 numbers in [1, 2)
    const std::vector<float> weights = {1 + 0.3f * ulp, 1 + ulp / 32, 1 + ulp / 2, 1 + 0.9f * ulp,
                                        -1 - 0.3f * ulp};
    for (const float weight : shapes(weights)) {
        const float base = std::copysign(1.0f, weight);
        Unit<bf16> unit(elements);
        unit.w.fill(weight);
        round_weights(unit, 1, seed());
        double away = 0;
        for (std::int64_t i = 0; i < elements; ++i) {
            const float rounded = to_float(unit.parameters[i]);
            ASSERT_TRUE(rounded == base || rounded == base * (1 + ulp)) << rounded;
            away += rounded != base;
        }
        // The standard deviation of a mean of n yes-or-no draws. Six of these are exceeded once in 5e8 draws.
        const double exact = (std::fabs(weight) - 1) / ulp;
        EXPECT_NEAR(away / elements, exact, 6 * std::sqrt(exact * (1 - exact) / elements)) << weight;
    }
}

TEST(AdamWRounding, ChangesWithSeedAndStep) {
    constexpr std::int64_t elements = 512;
    const auto rounded = [&](std::int64_t step, std::uint64_t from) {
        Unit<bf16> unit(elements);
        unit.w.fill(1 + 0.5f * 0x1p-7f);
        round_weights(unit, step, from);
        std::vector<float> values;
        for (std::int64_t i = 0; i < elements; ++i) values.push_back(to_float(unit.parameters[i]));
        return values;
    };
    const auto first = rounded(1, seed());
    EXPECT_EQ(rounded(1, seed()), first);
    EXPECT_NE(rounded(2, seed()), first);
    EXPECT_NE(rounded(1, seed() + 1), first);
}

TEST(AdamWRounding, KeepsWhatNeedsNone) {
    Unit<bf16> unit(16);
    const float values[] = {0.0f, -0.0f, 1.0f, -1.5f, 0x1p-126f, 0x1.fep127f, INFINITY, -INFINITY};
    for (int i = 0; i < 16; ++i) unit.w[i] = values[i % 8];
    unit.w[15] = std::bit_cast<float>(0x7fffffffu);  // a GPU's NaN: adding to it would carry into the sign
    round_weights(unit, 1, seed());
    for (int i = 0; i < 15; ++i) EXPECT_EQ(to_float(unit.parameters[i]), values[i % 8]) << i;
    EXPECT_TRUE(std::isnan(to_float(unit.parameters[15])));
}

TEST(AdamWRounding, RefusesWhatItCannotDo) {
    Unit<bf16> unit(64);
    unit.draw(seed());
    const auto on = launch_contexts().front();
    EXPECT_THROW(unit.update(on, {{0, 6, 0}}, ordinary_step), llmc::ProgrammingError);
    EXPECT_THROW(unit.update(on, {{8, 16, 0}, {0, 8, 0}}, ordinary_step), llmc::ProgrammingError);
    EXPECT_THROW(unit.update(on, std::vector<AdamWSegment>(17, {0, 0, 0}), ordinary_step),
                 llmc::ProgrammingError);
    EXPECT_THROW(unit.update(on, {{0, 64, 0}}, ordinary_step, StochasticRounding{1, 2}),
                 llmc::ProgrammingError);
}

// ---- moments in 8 bits ----

// A unit whose moments are in 8 bits, with those of its small tensors beside them.
template <class X, class Master = float, class Gradient = float>
struct EightBitUnit {
    static constexpr bool has_master = !std::is_same_v<X, Master>;

    explicit EightBitUnit(std::int64_t n)
        : elements(n),
          parameters(n),
          w(n),
          m(n),
          v(n),
          m_amax(n / 256),
          v_amax(n / 256),
          small_m(n),
          small_v(n),
          gradients(n),
          norm_squared(1),
          coefficients(1) {}

    void draw(std::uint64_t from) {
        Draw draw(from);
        draw.normal(w, 0.02);
        draw.normal(gradients, 1);
        for (Array<float>* each : {&m_amax, &v_amax, &small_m, &small_v}) {
            draw.normal(*each, 0.1);
            for (std::int64_t i = 0; i < each->size(); ++i) (*each)[i] = std::fabs((*each)[i]);
        }
        for (Array<std::uint8_t>* each : {&m, &v}) {
            for (std::int64_t i = 0; i < elements; ++i)
                (*each)[i] = static_cast<std::uint8_t>(draw.below(256));
        }
        for (std::int64_t i = 0; i < elements; ++i) parameters[i] = llmc::cuda::from_float<X>(to_float(w[i]));
        // Second moments that are positive, but nearer to 0 than to any other entry.
        for (std::int64_t i = 0; i < elements; i += 7) {
            v[i] = 0;
            gradients[i] = llmc::cuda::from_float<Gradient>(std::ldexp(to_float(gradients[i]), -14));
        }
        norm_squared[0] = 7.5;
    }

    static std::optional<StochasticRounding> rounding(bool is_random) {
        const bool must = !has_master && !std::is_same_v<X, float>;
        return is_random || must ? std::optional(StochasticRounding{seed(), 256}) : std::nullopt;
    }

    void update(const LaunchContext& on, const std::vector<AdamWSegment>& segments, const AdamWStep& step,
                bool is_random) {
        llmc::cuda::store_coefficients(on, coefficients.data(), step);
        const llmc::cuda::EightBitBuffers<X, Master, Gradient> buffers{
            parameters.data(), w.data(),       m.data(),       v.data(),        m_amax.data(),
            v_amax.data(),     small_m.data(), small_v.data(), gradients.data()};
        llmc::cuda::adamw_8bit(on, buffers, elements, norm_squared.data(), coefficients.data(), segments,
                               rounding(is_random));
        synchronize();
        if constexpr (!has_master) parameters.copy_from(w);
    }

    void update_on_cpu(const std::vector<AdamWSegment>& segments, const AdamWStep& step, bool is_random) {
        const auto bytes = [&](Array<std::uint8_t>& array) {
            return llmc::Tensor{
                reinterpret_cast<std::byte*>(array.data()), llmc::DType::uint8, {array.size()}};
        };
        const auto all = [](auto& array) { return tensor(array, {array.size()}); };
        const llmc::Tensor master = all(w);
        cpu().run(llmc::AdamW{has_master ? all(parameters) : master,
                              master,
                              bytes(m),
                              bytes(v),
                              all(gradients),
                              all(norm_squared),
                              segments,
                              step,
                              rounding(is_random),
                              {},
                              {all(m_amax), all(v_amax), all(small_m), all(small_v)}});
        if constexpr (!has_master) parameters.copy_from(w);
    }

    void expect_same(const EightBitUnit& other) const {
        Comparison comparison;
        for (std::int64_t i = 0; i < elements; ++i) {
            comparison.see_equal("m", i, m[i], other.m[i]);
            comparison.see_equal("v", i, v[i], other.v[i]);
            comparison.see_equal("small m", i, small_m[i], other.small_m[i]);
            comparison.see_equal("small v", i, small_v[i], other.small_v[i]);
            comparison.see_equal("w", i, to_float(w[i]), to_float(other.w[i]));
            comparison.see_equal("parameters", i, to_float(parameters[i]), to_float(other.parameters[i]));
        }
        for (std::int64_t i = 0; i < m_amax.size(); ++i) {
            comparison.see_equal("amax of m", i, m_amax[i], other.m_amax[i]);
            comparison.see_equal("amax of v", i, v_amax[i], other.v_amax[i]);
        }
        EXPECT_TRUE(comparison.good()) << comparison.first_failure();
    }

    std::int64_t elements;
    Array<X> parameters;
    Array<Master> w;
    Array<std::uint8_t> m, v;
    Array<float> m_amax, v_amax, small_m, small_v;
    Array<Gradient> gradients;
    Array<double> norm_squared;
    Array<AdamWCoefficients> coefficients;
};

template <class U>
class AdamW8Bit : public testing::Test {};
using EightBitUnits =
    testing::Types<EightBitUnit<float>, EightBitUnit<fp16>, EightBitUnit<bf16>,
                   EightBitUnit<bf16, float, bf16>, EightBitUnit<bf16, bf16>, EightBitUnit<bf16, bf16, bf16>>;
TYPED_TEST_SUITE(AdamW8Bit, EightBitUnits);

TYPED_TEST(AdamW8Bit, GivesTheBitsOfTheCpu) {
    // The first tensors share blocks with small ones and with padding.
    const std::vector<AdamWSegment> segments = {
        {0, 300, 0}, {384, 424, 0.1, 8}, {512, 5056, 0.1}, {5120, 5240, 0, 1000}, {5248, 10000, 0.3}};
    const bool has_bf16 = std::is_same_v<decltype(TypeParam::parameters), Array<bf16>>;
    for (const auto& on : contexts()) {
        for (const bool is_random : has_bf16 ? std::vector{false, true} : std::vector{false}) {
            TypeParam unit(40 * 256), expected(40 * 256);
            unit.draw(seed());
            expected.draw(seed());
            for (const std::int64_t step : {1, 2, 100000}) {
                AdamWStep at = ordinary_step;
                at.step = step;
                unit.update(on, segments, at, is_random);
                expected.update_on_cpu(segments, at, is_random);
            }
            unit.expect_same(expected);
        }
    }
}

TYPED_TEST(AdamW8Bit, LeavesAllAloneIfTheNormIsNotFinite) {
    TypeParam unit(512), before(512);
    unit.draw(seed());
    before.draw(seed());
    unit.norm_squared[0] = HUGE_VAL;
    unit.update(launch_contexts().front(), {{0, 512, 0.1}}, ordinary_step, false);
    unit.expect_same(before);
}

}  // namespace
}  // namespace kernel_test
