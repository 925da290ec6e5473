// The Makefile defines LLMC_VERSION and LLMC_COMMIT for this file alone, so that a commit compiles only it.
#include "llmc/core/version.h"

#ifndef LLMC_VERSION
#define LLMC_VERSION "unknown"
#endif
#ifndef LLMC_COMMIT
#define LLMC_COMMIT "unknown"
#endif

namespace llmc {

std::string_view version() { return LLMC_VERSION; }
std::string_view commit() { return LLMC_COMMIT; }

}  // namespace llmc
