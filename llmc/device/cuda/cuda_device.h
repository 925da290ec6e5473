// A GPU as a device: its memory, its streams, and its operations (cuda_ops.h).
#pragma once

#include <map>
#include <memory>
#include <string>

#include "llmc/device/cuda/cuda_ops.h"
#include "llmc/device/cuda/cuda_streams.h"
#include "llmc/device/cuda/gpus.h"

namespace llmc::cuda {

class CudaDevice final : public Device {
  public:
    explicit CudaDevice(const CudaOptions& options);
    ~CudaDevice() override;
    CudaDevice(const CudaDevice&) = delete;
    CudaDevice& operator=(const CudaDevice&) = delete;

    DeviceKind kind() const override { return DeviceKind::cuda; }
    std::string description() const override;
    std::string note(DType dtype) const override;
    std::size_t available_memory() const override;
    std::optional<double> peak_flops(DType dtype) const override;

    std::byte* allocate(std::size_t bytes, std::string_view arena) override;
    void release(std::byte* memory) override;

    Streams* streams() override { return &streams_; }
    Device& host() override { return *host_; }
    void upload(const Tensor& to_device, const void* from_host) override;
    void download(void* to_host, const Tensor& from_device) override;
    void begin_download(void* to_host_memory, const Tensor& from_device) override;
    HostMemory host_memory(std::size_t bytes) override;
    void synchronize() override;

    Ops& ops() override { return ops_; }
    const DeviceSizes& sizes() const override { return ops_; }

    std::string choices() const override { return ops_.products().choices(); }
    void adopt_choices(std::string_view choices) override { ops_.products().adopt_choices(choices); }
    void set_autotuning(bool on) override { ops_.products().set_autotuning(on); }
    void set_loading(bool on) override { ops_.set_loading(on); }
    LeftOut left_out() const override { return ops_.products().left_out(); }
    std::size_t memory_taken() const override;
    std::string memory_beside_arenas(std::size_t communicator_bytes) const override;

  private:
    CudaOptions options_;
    cudaDeviceProp properties_;
    CudaStreams streams_;
    CudaOps ops_;
    std::unique_ptr<Device> host_;
    std::size_t used_at_start_;  // GPU memory of CUDA's context and of other processes
    std::map<std::byte*, std::size_t> allocations_;
};

}  // namespace llmc::cuda
