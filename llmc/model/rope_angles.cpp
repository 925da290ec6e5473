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

std::vector<double> rope_frequencies(std::int64_t head_size, double theta,
                                     const std::optional<RopeScaling>& scaling) {
    check(head_size > 0 && head_size % 2 == 0, "rotary positions are for heads of pairs");
    std::vector<double> frequencies;
    for (std::int64_t i = 0; i < head_size / 2; ++i) {
        const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(head_size);
        const double frequency = std::pow(theta, exponent);
        frequencies.push_back(scaling ? scaled(frequency, *scaling) : frequency);
    }
    return frequencies;
}

void fill_angles(std::span<float> table, std::int64_t positions, std::int64_t head_size, double theta,
                 const std::optional<RopeScaling>& scaling) {
    check(positions >= 0 && table.size() == static_cast<std::size_t>(positions * head_size),
          "the table has D/2 pairs for each position");
    const std::vector<double> frequencies = rope_frequencies(head_size, theta, scaling);
    auto to = table.begin();
    for (std::int64_t t = 0; t < positions; ++t) {
        for (const double frequency : frequencies) {
            const double angle = static_cast<double>(t) * frequency;
            *to++ = static_cast<float>(std::cos(angle));
            *to++ = static_cast<float>(std::sin(angle));
        }
    }
}

}  // namespace llmc
