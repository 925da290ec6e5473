// A device whose operations are timed: it passes every call on to another device and keeps, for each operation
// and shape, the seconds it took and the work it had to do (floating-point operations, and bytes of operands
// each counted once), from which a roofline follows.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "dev/cpu/device_with_ops.h"

namespace llmc::bench {

struct Work {
    std::int64_t calls = 0;
    double seconds = 0;
    double flops = 0;
    double bytes = 0;
    // The dtype its arithmetic could use at best.
    DType dtype = DType::fp32;
};

// By name: "matmul_forward 384 -> 1536".
using WorkByOperation = std::map<std::string, Work>;

class TimedDevice final : public DeviceWithOps {
  public:
    explicit TimedDevice(Device& device);

    // What has been done since the last call.
    WorkByOperation take_work();
};

}  // namespace llmc::bench
