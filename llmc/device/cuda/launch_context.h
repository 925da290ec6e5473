// The context in which kernels are launched, and the observer of launches. Plain C++, for the device's host
// code and for kernels.
#pragma once

#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>

#include "llmc/device/cuda/chip.h"

namespace llmc::cuda {

// The parameters of a launch. The kernel lab computes the occupancy from them, and --cuda-sync waits for the
// kernel.
struct LaunchRecord {
    const void* kernel;
    dim3 grid, block;
    std::size_t dynamic_shared_bytes;
};

class LaunchObserver {
  public:
    virtual ~LaunchObserver() = default;
    virtual void launched(const LaunchRecord& record) = 0;
};

struct LaunchContext {
    Chip chip;
    cudaStream_t stream = nullptr;
    LaunchObserver* observer = nullptr;
};

}  // namespace llmc::cuda
