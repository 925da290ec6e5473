// The Makefile defines LLMC_VERSION, LLMC_COMMIT and LLMC_GPU_PART for this file alone, so that a new commit
// recompiles only this file.
#include "llmc/core/version.h"

#ifndef LLMC_VERSION
#define LLMC_VERSION "unknown"
#endif
#ifndef LLMC_COMMIT
#define LLMC_COMMIT "unknown"
#endif
#ifndef LLMC_GPU_PART
#define LLMC_GPU_PART "unknown"
#endif

namespace llmc {

std::string_view version() { return LLMC_VERSION; }
std::string_view commit() { return LLMC_COMMIT; }
std::string_view gpu_part() { return LLMC_GPU_PART; }

}  // namespace llmc
