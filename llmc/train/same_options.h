// Refuses a job whose processes were started with different options: they would train a mixture, or wait for each
// other.
#pragma once

#include "llmc/comm/communicator.h"
#include "llmc/train/options.h"

namespace llmc {

// Throws a UserError if a rank has another mode, such as --generate, or another value of a setting than most ranks. The
// error names that rank, the option and both values. `options` are those that parse_options() returned; null where it
// returned none. A run that resumes calls it again once its ranks have found a checkpoint of the same step, whose
// settings are then compared too. All ranks call it and throw together.
void require_same_options(Communicator& world, const Options* options, bool has_checkpoint = false);

}  // namespace llmc
