// Numbers rounded to 8 bits, against the definition of the formats, and the CPU's operations that round them.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "cpu_test_support.h"
#include "llmc/device/device.h"
#include "llmc/device/fp8.h"

namespace llmc {
namespace {

// All finite magnitudes of a format in order, from its definition: sign, exponent bits with this bias, significand.
// E4M3 has no infinity: only the last pattern is NaN. E5M2 has IEEE's.
std::vector<double> magnitudes_of(Fp8 format) {
    const int bits = format == Fp8::e4m3 ? 3 : 2, bias = format == Fp8::e4m3 ? 7 : 15;
    const int patterns = format == Fp8::e4m3 ? 0x7f : 0x7c;
    std::vector<double> all;
    for (int pattern = 0; pattern < patterns; ++pattern) {
        const int exponent = pattern >> bits, significand = pattern & ((1 << bits) - 1);
        all.push_back(exponent == 0 ? std::ldexp(significand, 1 - bias - bits)
                                    : std::ldexp((1 << bits) + significand, exponent - bias - bits));
    }
    return all;
}

// The nearest of them; of two, the one with an even pattern; the largest beyond it.
double nearest(const std::vector<double>& all, double magnitude) {
    const auto above = std::ranges::lower_bound(all, magnitude);
    if (above == all.end()) return all.back();
    if (above == all.begin() || *above == magnitude) return *above;
    const double low = *(above - 1), high = *above, middle = (low + high) / 2;
    if (magnitude != middle) return magnitude < middle ? low : high;
    return (above - all.begin()) % 2 == 0 ? high : low;
}

float rounded(Fp8 format, float x) {
    return format == Fp8::e4m3 ? rounded_to_fp8<Fp8::e4m3>(x) : rounded_to_fp8<Fp8::e5m2>(x);
}

TEST(Fp8, RoundsEveryBf16AndAroundEveryMidpoint) {
    for (const Fp8 format : {Fp8::e4m3, Fp8::e5m2}) {
        const std::vector<double> all = magnitudes_of(format);
        EXPECT_EQ(all.back(), format_of(format).largest);
        std::vector<float> numbers;
        for (int bits = 0; bits < 1 << 16; ++bits)
            numbers.push_back(to_float(bfloat16{static_cast<std::uint16_t>(bits)}));
        for (std::size_t i = 0; i + 1 < all.size(); ++i) {
            const auto middle = static_cast<float>((all[i] + all[i + 1]) / 2);
            for (const float sign : {1.0F, -1.0F}) {
                for (const float x : {middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1e9F)})
                    numbers.push_back(sign * x);
            }
        }
        for (const float x : numbers) {
            if (std::isnan(x)) continue;
            const auto wanted = static_cast<float>(std::copysign(nearest(all, std::fabs(double{x})), x));
            ASSERT_EQ(std::bit_cast<std::uint32_t>(rounded(format, x)), std::bit_cast<std::uint32_t>(wanted))
                << x;
        }
    }
}

// The greatest power of two that keeps the greatest number in range.
TEST(Fp8, ScalesIntoTheGreatestBinade) {
    for (const Fp8 format : {Fp8::e4m3, Fp8::e5m2}) {
        const float largest = format_of(format).largest;
        for (int i = -1600; i < 1600; ++i) {
            const float amax = std::exp2(static_cast<float>(i) / 20);
            const float scale = fp8_scale(format, amax);
            EXPECT_TRUE(amax * scale <= largest && 2 * amax * scale > largest) << amax;
            EXPECT_EQ(std::exp2(std::round(std::log2(scale))), scale);
        }
        EXPECT_EQ(fp8_scale(format, largest), 1);
        EXPECT_EQ(fp8_scale(format, std::nextafter(largest, 1e9F)), 0.5F);
        EXPECT_EQ(fp8_scale(format, 0x1p-126F), 0x1p100F);
        EXPECT_EQ(fp8_scale(format, 0x1p120F), 0x1p-100F);
        for (const float none : {0.0F, HUGE_VALF, std::numeric_limits<float>::quiet_NaN()})
            EXPECT_EQ(fp8_scale(format, none), 1);
    }
}

class CpuFp8 : public testing::Test {
  protected:
    CpuFp8() : device_(make_cpu_device(2)), ops_(device_->ops()) {}

    // Of numbers with a wide range of magnitudes; the greatest is 1.5.
    std::vector<bfloat16> drawn() const {
        const RandomStream random(1, "fp8");
        std::vector<bfloat16> numbers;
        for (std::uint64_t i = 0; i < 10007; ++i)
            numbers.push_back(to_bfloat16(
                static_cast<float>(random.normal(2 * i) * std::exp2(-24 * random.uniform(2 * i + 1)) / 8)));
        numbers[5003] = to_bfloat16(-1.5F);
        return numbers;
    }
    Tensor tensor(std::vector<bfloat16>& values) {
        return {reinterpret_cast<std::byte*>(values.data()), DType::bf16, {std::ssize(values)}};
    }
    Tensor tensor(float& value) { return {reinterpret_cast<std::byte*>(&value), DType::fp32, {1}}; }

    std::unique_ptr<Device> device_;
    Ops& ops_;
};

TEST_F(CpuFp8, AmaxIsTheGreatestMagnitudeSoFar) {
    std::vector<bfloat16> x = drawn();
    float greatest = 0;
    ops_.amax(tensor(greatest), tensor(x));
    EXPECT_EQ(greatest, 1.5F);
    greatest = 3;
    ops_.amax(tensor(greatest), tensor(x));
    EXPECT_EQ(greatest, 3);
    for (const float other : {HUGE_VALF, std::numeric_limits<float>::quiet_NaN()}) {
        x[17] = to_bfloat16(-other);
        ops_.amax(tensor(greatest), tensor(x));
        EXPECT_TRUE(std::isinf(other) ? std::isinf(greatest) : std::isnan(greatest));
    }
}

// Each is within half a unit in the last place of the format, scaled; those below half its smallest number become 0.
TEST_F(CpuFp8, QuantisesWithTheScaleOfAmax) {
    std::vector<bfloat16> x = drawn(), y(x.size());
    x[1] = to_bfloat16(HUGE_VALF);
    x[2] = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
    for (const Fp8 format : {Fp8::e4m3, Fp8::e5m2}) {
        const std::vector<double> all = magnitudes_of(format);
        for (float amax : {1.5F, 1.0F / 64}) {
            ops_.quantise(tensor(y), tensor(x), tensor(amax), format);
            const double scale = fp8_scale(format, amax);
            int flushed = 0, saturated = 0;
            for (std::size_t i = 0; i < x.size(); ++i) {
                const double from = to_float(x[i]), to = to_float(y[i]);
                if (!std::isfinite(from)) {
                    EXPECT_TRUE(std::isnan(to));
                    continue;
                }
                ASSERT_EQ(to, std::copysign(nearest(all, std::fabs(from * scale)), from) / scale) << from;
                flushed += to == 0 && from != 0 ? 1 : 0;
                saturated += std::fabs(from * scale) > all.back() ? 1 : 0;
            }
            // With the greatest number's own scale, E4M3 has 2^-9 to 384 for it, or 17.6 binades, of 24 that are drawn.
            if (amax == 1.5F) {
                EXPECT_TRUE(format == Fp8::e4m3 ? flushed > 500 && flushed < 5000 : flushed < 500) << flushed;
            }
            EXPECT_EQ(saturated > 0, amax < 1);
        }
    }
}

}  // namespace
}  // namespace llmc
