// Initial weights: a pure function of (seed, tensor name, element index), so that any mesh starts from the
// same model.
#pragma once

#include <cstdint>
#include <span>

#include "llmc/model/units.h"

namespace llmc {

// Fills `values`, the unit's whole flat buffer in fp32, padding zero.
void initialize_unit(std::span<float> values, const UnitLayout& unit, std::uint64_t seed);

}  // namespace llmc
