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

}  // namespace
}  // namespace llmc
