// The angles of rotary positions: the table that the operation rope (device/ops.h) reads.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace llmc {

// Llama 3.1's change of the frequencies f, for contexts longer than those of `original_positions` that a
// model saw first. A wavelength is l = 2 pi / f. The frequency stays if l < original_positions /
// high_frequency_factor. It is divided by `factor` if l > original_positions / low_frequency_factor. Between
// them, it goes from one to the other.
struct RopeScaling {
    double factor;
    double low_frequency_factor;
    double high_frequency_factor;
    std::int64_t original_positions;
    bool operator==(const RopeScaling&) const = default;
};

// The table of the angles of all positions of a sequence: fp32 (positions, D/2, 2).
struct RopeAngles {
    std::int64_t positions, head_size;  // head_size D is even
    double theta;
    std::optional<RopeScaling> scaling{};
    bool operator==(const RopeAngles&) const = default;
};

// f_i = theta^(-2i/D) for i < D/2, scaled if that is asked for.
std::vector<double> rope_frequencies(const RopeAngles& angles);

// table[t,i] = cos(t f_i), sin(t f_i) for each position t, computed in double and rounded once
void fill_angles(std::span<float> table, const RopeAngles& angles);

}  // namespace llmc
