// fp16 on the host against the compiler's own type.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>

#include "llmc/core/dtype.h"

namespace llmc {
namespace {

#if defined(__FLT16_MAX__)

void expect_rounds_alike(float x) {
    const auto expected = std::bit_cast<std::uint16_t>(static_cast<_Float16>(x));
    const std::uint16_t found = to_float16(x).bits;
    if (std::isnan(x)) {
        EXPECT_TRUE(std::isnan(to_float(float16{found})));
    } else {
        EXPECT_EQ(found, expected) << x;
    }
}

TEST(Float16, EveryValueIsExactInFp32) {
    for (std::uint32_t bits = 0; bits < 1U << 16; ++bits) {
        const float16 half{static_cast<std::uint16_t>(bits)};
        const auto expected = static_cast<float>(std::bit_cast<_Float16>(half.bits));
        if (std::isnan(expected)) {
            EXPECT_TRUE(std::isnan(to_float(half)));
            EXPECT_TRUE(std::isnan(to_float(to_float16(to_float(half)))));
        } else {
            EXPECT_EQ(std::bit_cast<std::uint32_t>(to_float(half)), std::bit_cast<std::uint32_t>(expected))
                << bits;
            EXPECT_EQ(to_float16(to_float(half)).bits, half.bits);
        }
    }
}

// Every bf16, and the floats around each midpoint of two neighbouring fp16.
TEST(Float16, RoundsToNearestEven) {
    for (std::uint32_t bits = 0; bits < 1U << 16; ++bits)
        expect_rounds_alike(to_float(bfloat16{static_cast<std::uint16_t>(bits)}));
    for (std::uint16_t bits = 0; bits < 0x7c00; ++bits) {
        const float low = to_float(float16{bits});
        const float high =
            bits == 0x7bff ? 65536.0F : to_float(float16{static_cast<std::uint16_t>(bits + 1)});
        const float middle = low + (high - low) / 2;
        for (const float x : {std::nextafter(middle, 0.0F), middle, std::nextafter(middle, 1e30F)}) {
            expect_rounds_alike(x);
            expect_rounds_alike(-x);
        }
    }
}

#endif

}  // namespace
}  // namespace llmc
