// The table of rotary angles. The expected numbers were computed with 60 decimal digits by Python's decimal
// module.
#include "llmc/model/rope_angles.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "llmc/core/error.h"

namespace llmc {

namespace {

constexpr RopeScaling llama_3_1{
    .factor = 8.0, .low_frequency_factor = 1.0, .high_frequency_factor = 4.0, .original_positions = 8192};
constexpr std::int64_t longest = 131'072;  // positions of Llama 3.1

struct Angle {
    std::int64_t position, i;
    double cos, sin;
};

// The distance of two neighboring floats near x.
double ulp(double x) {
    const float magnitude = std::fabs(static_cast<float>(x));
    return double{std::nextafter(magnitude, INFINITY)} - double{magnitude};
}

void expect_angles(std::int64_t head_size, double theta, const std::optional<RopeScaling>& scaling,
                   const std::vector<Angle>& angles) {
    std::vector<float> table(static_cast<std::size_t>(longest * head_size), NAN);
    fill_angles(table, {longest, head_size, theta, scaling});
    for (const Angle& angle : angles) {
        const auto at = static_cast<std::size_t>(angle.position * head_size + 2 * angle.i);
        EXPECT_LE(std::fabs(table[at] - angle.cos), ulp(angle.cos)) << angle.position << ", " << angle.i;
        EXPECT_LE(std::fabs(table[at + 1] - angle.sin), ulp(angle.sin)) << angle.position << ", " << angle.i;
    }
    for (std::int64_t i = 0; i < head_size; i += 2) {  // position 0
        EXPECT_EQ(table[static_cast<std::size_t>(i)], 1.0F);
        EXPECT_EQ(table[static_cast<std::size_t>(i + 1)], 0.0F);
    }
}

TEST(RopeAngles, OfLlama31) {
    expect_angles(128, 5e5, llama_3_1,
                  {{1, 0, 0.54030230586813971740, 0.84147098480789650665},
                   {1, 63, 0.99999999999995290847, 0.00000030689259889145},
                   {7, 32, 0.99999325115201980030, 0.00367391486203073919},
                   {4095, 3, -0.41431453795079906307, 0.91013376140137548625},
                   {131071, 0, -0.81798349938794908071, -0.57524168375478937114},
                   {131071, 1, -0.81731615002386427279, 0.57618947483459656553},
                   {131071, 5, -0.46417888920901598244, 0.88574147402765558087},
                   {131071, 20, -0.96963027557712368385, 0.24457540490456349667},
                   {131071, 29, 0.33305207599903164853, 0.94290843387506893534},
                   {131071, 32, 0.94831054976305878577, -0.31734382175817635779},
                   {131071, 63, 0.99919109503539745081, 0.04021387325244037886}});
}

TEST(RopeAngles, WithoutScaling) {
    expect_angles(64, 1e4, {},
                  {{1, 31, 0.99999999110860296298, 0.00013335214282110345},
                   {7, 16, 0.99755100025327957462, 0.06994284733753276398},
                   {4095, 3, 0.51586613593589821377, -0.85666920675052011907},
                   {131071, 1, 0.05461793093792512264, 0.99850732677334924087},
                   {131071, 5, 0.46654378339617668568, -0.88449810524069601960},
                   {131071, 17, -0.91117826804366800600, 0.41201233457864037574},
                   {131071, 25, -0.62160084236758107708, -0.78333415141171626428},
                   {131071, 31, 0.19851170290724631789, -0.98009851739958528201}});
}

TEST(RopeAngles, Llama31ScalesLowFrequenciesAlone) {
    const std::vector<double> plain = rope_frequencies({longest, 128, 5e5});
    const std::vector<double> scaled = rope_frequencies({longest, 128, 5e5, llama_3_1});
    ASSERT_EQ(plain.size(), 64U);
    ASSERT_EQ(scaled.size(), 64U);
    for (std::size_t i = 0; i < 64; ++i) {
        if (i >= 29 && i < 35) continue;  // the 6 between them, below
        EXPECT_EQ(scaled[i], i < 29 ? plain[i] : plain[i] / 8.0) << i;
    }
    // Errors of double in 10 operations are below 1e-14.
    constexpr std::array between = {2.16657076350335860934e-3, 1.37189356776113816040e-3,
                                    8.56751412919632081074e-4, 5.24846160992954669727e-4,
                                    3.12693750384065132216e-4, 1.78507812767996418524e-4};
    for (std::size_t i = 0; i < between.size(); ++i) {
        EXPECT_NEAR(scaled[29 + i] / between[i], 1.0, 1e-14) << i;
        EXPECT_LT(scaled[29 + i], plain[29 + i]);
        EXPECT_GT(scaled[29 + i], plain[29 + i] / 8.0);
    }
}

// Low 2 and high 8, where Llama 3.1 has 1 and 4: the second frequency has 5.7 waves in the original positions, and
// the fourth one 1.8.
TEST(RopeAngles, OtherFactorsThanLlama31s) {
    const std::vector<double> scaled = rope_frequencies({64, 32, 1e4, RopeScaling{8.0, 2.0, 8.0, 64}});
    constexpr std::array expected = {
        1.0,    0.37601575877682081361, 0.09583998588296265785, 0.02222849262548653502,
        0.0125, 0.00702926656487936350, 0.00395284707521047416, 0.00222284926254865350};
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(scaled[i] / expected[i], 1.0, 1e-14) << i;
}

TEST(RopeAngles, WrongSizesAreRefused) {
    std::vector<float> table(24);
    EXPECT_NO_THROW(fill_angles(table, {3, 8, 1e4}));
    EXPECT_THROW(fill_angles(table, {4, 8, 1e4}), ProgrammingError);
    EXPECT_THROW(fill_angles(table, {8, 3, 1e4}), ProgrammingError);
}

}  // namespace

}  // namespace llmc
