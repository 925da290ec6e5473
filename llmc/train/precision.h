// --precision: levels that set the formats of numbers together.
#pragma once

#include "llmc/train/options.h"

namespace llmc {

// Sets what the level of --precision means, except for settings that were given beside it.
void take_precision(Options& options);

// The level and the settings given beside it, for a person; empty without --precision.
std::string precision_text(const Options& options);

}  // namespace llmc
