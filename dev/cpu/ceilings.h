// The limits of this machine, measured in the same run as the results that are compared with them.
#pragma once

#include "llmc/core/dtype.h"

namespace llmc::bench {

// The floating-point operations per second of oneDNN's fastest product of large matrices, with this many
// threads. The operands already have the layout that oneDNN prefers. The best of several tries.
double product_ceiling(DType dtype, int threads);

// The bytes read and written per second by a copy between arrays much larger than any cache.
double memory_ceiling(int threads);

// The bytes read per second from such an array, in the memory that the device uses.
double read_ceiling(int threads);

}  // namespace llmc::bench
