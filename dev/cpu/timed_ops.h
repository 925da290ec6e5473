// A device that times its operations. It passes every call to another device. For each operation and shape it
// records the seconds and the work (OpCost), which give a roofline.
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
    // The dtype of its arithmetic in the best case.
    DType dtype = DType::fp32;
};

// By name, such as "matmul_forward 384 -> 1536".
using WorkByOperation = std::map<std::string, Work>;

class TimedDevice final : public DeviceWithOps {
  public:
    explicit TimedDevice(Device& device);

    // The work since the last call.
    WorkByOperation take_work();
};

}  // namespace llmc::bench
