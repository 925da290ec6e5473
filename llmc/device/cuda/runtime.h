// The CUDA runtime for the device's host code: errors as exceptions, and owners of streams and events.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

#include "llmc/core/error.h"
#include "llmc/device/device.h"

namespace llmc::cuda {

// Throws a DeviceFault unless `error` is cudaSuccess.
inline void check_cuda(cudaError_t error, std::string_view call) {
    if (error == cudaSuccess) return;
    throw DeviceFault(
        fmt::format("{}: CUDA says \"{}\" ({})", call, cudaGetErrorString(error), cudaGetErrorName(error)));
}

class StreamOwner {
  public:
    // A stream that does not synchronize with the legacy default stream. A lower number is a higher priority.
    explicit StreamOwner(int priority) {
        check_cuda(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, priority),
                   "cudaStreamCreateWithPriority");
    }
    ~StreamOwner() { cudaStreamDestroy(stream_); }
    StreamOwner(const StreamOwner&) = delete;
    StreamOwner& operator=(const StreamOwner&) = delete;
    cudaStream_t get() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

class EventOwner {
  public:
    // Events without a time are quicker to wait for, and to ask whether they are reached.
    explicit EventOwner(bool has_time) {
        check_cuda(cudaEventCreateWithFlags(&event_, has_time ? cudaEventDefault : cudaEventDisableTiming),
                   "cudaEventCreateWithFlags");
    }
    ~EventOwner() { cudaEventDestroy(event_); }
    EventOwner(const EventOwner&) = delete;
    EventOwner& operator=(const EventOwner&) = delete;
    cudaEvent_t get() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;
};

}  // namespace llmc::cuda
