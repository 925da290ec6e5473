// The CPU as a device: its memory, its name, and the operations of cpu_ops.h. Each call finishes before it
// returns.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "llmc/device/cpu/cpu_ops.h"
#include "llmc/device/device.h"

namespace llmc::cpu {

class CpuDevice : public Device {
  public:
    explicit CpuDevice(int threads);
    ~CpuDevice() override;
    CpuDevice(const CpuDevice&) = delete;
    CpuDevice& operator=(const CpuDevice&) = delete;

    DeviceKind kind() const override { return DeviceKind::cpu; }
    std::string description() const override;
    std::string note(DType dtype) const override;
    std::optional<double> peak_flops(DType /*dtype*/) const override { return std::nullopt; }

    std::size_t available_memory() const override;

    std::byte* allocate(std::size_t bytes, std::string_view arena) override;
    void release(std::byte* memory) override;

    Device& host() override { return *this; }
    void upload(const Tensor& to_device, const void* from_host) override;
    void download(void* to_host, const Tensor& from_device) override;
    void begin_download(void* to_host_memory, const Tensor& from_device) override {
        download(to_host_memory, from_device);
    }
    HostMemory host_memory(std::size_t bytes) override;
    void synchronize() override {}

    Ops& ops() override { return ops_; }
    const DeviceSizes& sizes() const override { return ops_; }

  private:
    int threads_;
    bool native_bf16_;
    CpuOps ops_;
    std::unordered_map<std::byte*, std::size_t> allocations_;
};

// The number of threads of a device that is made with `threads` = 0.
int default_threads();

}  // namespace llmc::cpu
