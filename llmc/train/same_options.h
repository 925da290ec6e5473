// Refuses a job whose processes were started with different options: they would train a mixture, or wait for each
// other.
#pragma once

#include "llmc/comm/communicator.h"
#include "llmc/train/options.h"

namespace llmc {

// Throws a UserError if a rank has another mode, such as --generate, or another value of a setting than most ranks. The
// error names that rank, the option and both values. `options` are those that parse_options() returned; null where it
// returned none. All ranks call it and throw together.
void require_same_options(Communicator& world, const Options* options);

}  // namespace llmc
