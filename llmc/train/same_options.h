// Refuses a job whose processes were started with different options: they would train a mixture, or wait for each
// other.
#pragma once

#include "llmc/comm/communicator.h"
#include "llmc/train/options.h"

namespace llmc {

// Throws a UserError if a rank was given another option, or another value, than most ranks. The error names that
// rank, the option and both values. `options` are those that parse_options() returned; null where it returned
// none. All ranks call it and throw together.
//
// What is compared is what was given, on the command line or in a configuration file: settings as the values that they
// have, and modes such as --generate. The value of an option that was not given may follow from a checkpoint, which
// another process may just be writing, or from other options, which are compared themselves. So an option that gives
// the default differs from none.
void require_same_options(Communicator& world, const Options* options);

}  // namespace llmc
