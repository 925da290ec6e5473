// Compares results without copying them: a number of 64 bits that depends on every bit. Plain C++, for host code.
#pragma once

#include <cstdint>

#include "llmc/device/cuda/launch.h"

namespace llmc::cuda {

// sum += the checksum of `bytes` bytes, a multiple of 16, in device memory aligned to 16 bytes. It is a sum of
// integers, so that the order in which blocks finish does not matter. The checksum of zeros is 0.
// `ignored` are bits of each 32 that do not count, such as signs.
void add_checksum(const LaunchContext& on, unsigned long long* sum, const void* data, std::int64_t bytes,
                  unsigned ignored = 0);

}  // namespace llmc::cuda
