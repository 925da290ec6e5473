// The CPU device with operations of a test, which watch or change what CpuOps computes.
#pragma once

#include "llmc/device/cpu/cpu_device.h"

namespace llmc::test {

// O: a class that is derived from cpu::CpuOps, with its constructor.
template <class O>
class CpuDeviceWith final : public cpu::CpuDevice {
  public:
    CpuDeviceWith() : CpuDevice(1) {}
    O& ops() override { return ops_; }

  private:
    O ops_{1, false};  // products widen
};

}  // namespace llmc::test
