// What this machine can do at best, measured in the same run as what is compared with it.
#pragma once

#include "llmc/core/dtype.h"

namespace llmc::bench {

// oneDNN's fastest product of large matrices, the operands in the layout that it likes best and already in
// it: floating-point operations a second with this many threads, best of several tries.
double product_ceiling(DType dtype, int threads);

// Bytes read and written a second by a copy between arrays far larger than any cache.
double memory_ceiling(int threads);

}  // namespace llmc::bench
