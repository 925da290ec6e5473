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
};

// f_i = theta^(-2i/D) for i < D/2, scaled if that is asked for. head_size D is even.
std::vector<double> rope_frequencies(std::int64_t head_size, double theta,
                                     const std::optional<RopeScaling>& scaling);

// table (positions, D/2, 2) = cos(t f_i), sin(t f_i) for each position t, computed in double and rounded once
void fill_angles(std::span<float> table, std::int64_t positions, std::int64_t head_size, double theta,
                 const std::optional<RopeScaling>& scaling);

}  // namespace llmc
