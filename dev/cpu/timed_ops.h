// A device whose operations are timed: it passes every call on to another device and keeps, for each operation
// and shape, the seconds it took and the work it had to do (floating-point operations, and bytes of operands
// each counted once), from which a roofline follows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "llmc/device/device.h"
#include "llmc/device/ops.h"

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

class TimedDevice final : public Device {
  public:
    explicit TimedDevice(Device& device);
    ~TimedDevice() override;

    // What has been done since the last call.
    WorkByOperation take_work();

    DeviceKind kind() const override { return device_.kind(); }
    std::string description() const override { return device_.description(); }
    std::string note(DType dtype) const override { return device_.note(dtype); }
    std::optional<double> peak_flops(DType dtype) const override { return device_.peak_flops(dtype); }
    std::size_t available_memory() const override { return device_.available_memory(); }
    std::int64_t usual_tokens() const override { return device_.usual_tokens(); }
    std::int64_t usual_logits_bytes() const override { return device_.usual_logits_bytes(); }
    std::byte* allocate(std::size_t bytes, std::string_view arena) override {
        return device_.allocate(bytes, arena);
    }
    void release(std::byte* memory) override { device_.release(memory); }
    void upload(const Tensor& to_device, const void* from_host) override {
        device_.upload(to_device, from_host);
    }
    void download(void* to_host, const Tensor& from_device) override {
        device_.download(to_host, from_device);
    }
    HostMemory host_memory(std::size_t bytes) override { return device_.host_memory(bytes); }
    void synchronize() override { device_.synchronize(); }
    Ops& ops() override;

  private:
    class TimedOps;
    Device& device_;
    std::unique_ptr<TimedOps> ops_;
};

}  // namespace llmc::bench
