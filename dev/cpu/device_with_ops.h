// A device with other operations than its own.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "llmc/device/device.h"
#include "llmc/device/ops.h"

namespace llmc::bench {

class DeviceWithOps : public Device {
  public:
    // The device must outlive this object.
    DeviceWithOps(Device& device, std::unique_ptr<Ops> ops) : device_(device), ops_(std::move(ops)) {}

    DeviceKind kind() const override { return device_.kind(); }
    std::string description() const override { return device_.description(); }
    std::string note(DType dtype) const override { return device_.note(dtype); }
    std::optional<double> peak_flops(DType dtype) const override { return device_.peak_flops(dtype); }
    std::size_t available_memory() const override { return device_.available_memory(); }
    std::byte* allocate(std::size_t bytes, std::string_view arena) override {
        return device_.allocate(bytes, arena);
    }
    void release(std::byte* memory) override { device_.release(memory); }
    void upload(const Tensor& to_device, const void* from_host) override {
        device_.upload(to_device, from_host);
    }
    Device& host() override { return device_.host(); }
    void begin_download(void* to_host_memory, const Tensor& from_device) override {
        device_.begin_download(to_host_memory, from_device);
    }
    void download(void* to_host, const Tensor& from_device) override {
        device_.download(to_host, from_device);
    }
    HostMemory host_memory(std::size_t bytes) override { return device_.host_memory(bytes); }
    void synchronize() override { device_.synchronize(); }
    Ops& ops() override { return *ops_; }
    const DeviceSizes& sizes() const override { return device_.sizes(); }

  private:
    Device& device_;
    std::unique_ptr<Ops> ops_;
};

}  // namespace llmc::bench
