// Initial weights: a pure function of (seed, tensor name, element index), so that any mesh starts from the
// same model.
#pragma once

#include <cstdint>
#include <span>

#include "llmc/model/units.h"

namespace llmc {

// Fills `values` with fp32 initial weights of the unit's flat buffer from the element `begin` on. Padding is
// zero.
void initialize_unit(std::span<float> values, std::int64_t begin, const UnitLayout& unit, std::uint64_t seed);

}  // namespace llmc
