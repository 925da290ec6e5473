#include "llmc/model/rope_angles.h"

#include <cmath>
#include <numbers>

#include "llmc/core/error.h"

namespace llmc {

namespace {

double scaled(double frequency, const RopeScaling& s) {
    // How many wavelengths the original positions have.
    const double waves = static_cast<double>(s.original_positions) * frequency / (2.0 * std::numbers::pi);
    if (waves >= s.high_frequency_factor) return frequency;
    if (waves < s.low_frequency_factor) return frequency / s.factor;
    const double kept = (waves - s.low_frequency_factor) / (s.high_frequency_factor - s.low_frequency_factor);
    return frequency * (kept + (1.0 - kept) / s.factor);
}

}  // namespace

std::vector<double> rope_frequencies(const RopeAngles& angles) {
    const std::int64_t D = angles.head_size;
    check(D > 0 && D % 2 == 0, "rotary positions are for heads of pairs");
    std::vector<double> frequencies;
    for (std::int64_t i = 0; i < D / 2; ++i) {
        const double frequency =
            std::pow(angles.theta, -2.0 * static_cast<double>(i) / static_cast<double>(D));
        frequencies.push_back(angles.scaling ? scaled(frequency, *angles.scaling) : frequency);
    }
    return frequencies;
}

void fill_angles(std::span<float> table, const RopeAngles& angles) {
    check(table.size() == static_cast<std::size_t>(angles.positions * angles.head_size),
          "the table has D/2 pairs for each position");
    const std::vector<double> frequencies = rope_frequencies(angles);
    auto to = table.begin();
    for (std::int64_t t = 0; t < angles.positions; ++t) {
        for (const double frequency : frequencies) {
            const double angle = static_cast<double>(t) * frequency;
            *to++ = static_cast<float>(std::cos(angle));
            *to++ = static_cast<float>(std::sin(angle));
        }
    }
}

}  // namespace llmc
