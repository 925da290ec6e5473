// Memory and streams of a test, freed at its end, and tiny kernels.
#pragma once

#include <cstddef>

#include "llmc/device/cuda/kernel.cuh"
#include "simt/runtime/child.h"

namespace runtime_test {

template <class T>
class DeviceArray {
  public:
    explicit DeviceArray(std::size_t n) : bytes(n * sizeof(T)) {
        void* memory = nullptr;
        must(cudaMalloc(&memory, bytes));
        data = static_cast<T*>(memory);
    }
    ~DeviceArray() { must(cudaFree(data)); }
    DeviceArray(const DeviceArray&) = delete;
    DeviceArray& operator=(const DeviceArray&) = delete;

    std::vector<T> download() const {
        std::vector<T> host(bytes / sizeof(T));
        must(cudaMemcpy(host.data(), data, bytes, cudaMemcpyDeviceToHost));
        return host;
    }
    void upload(const std::vector<T>& host) {
        must(cudaMemcpy(data, host.data(), bytes, cudaMemcpyHostToDevice));
    }

    T* data = nullptr;
    std::size_t bytes;
};

template <class T>
class PinnedArray {
  public:
    explicit PinnedArray(std::size_t n) : bytes(n * sizeof(T)) {
        void* memory = nullptr;
        must(cudaMallocHost(&memory, bytes));
        data = static_cast<T*>(memory);
    }
    ~PinnedArray() { must(cudaFreeHost(data)); }
    PinnedArray(const PinnedArray&) = delete;
    PinnedArray& operator=(const PinnedArray&) = delete;

    T* data = nullptr;
    std::size_t bytes;
};

class Stream {
  public:
    explicit Stream(unsigned flags = cudaStreamNonBlocking) {
        must(cudaStreamCreateWithFlags(&handle_, flags));
    }
    ~Stream() { must(cudaStreamDestroy(handle_)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    operator cudaStream_t() const { return handle_; }

    void record(cudaEvent_t event) const { must(cudaEventRecord(event, handle_)); }
    void wait(cudaEvent_t event) const { must(cudaStreamWaitEvent(handle_, event, 0)); }
    void synchronize() const { must(cudaStreamSynchronize(handle_)); }

  private:
    cudaStream_t handle_ = nullptr;
};

class Event {
  public:
    explicit Event(unsigned flags = cudaEventDisableTiming) {
        must(cudaEventCreateWithFlags(&handle_, flags));
    }
    ~Event() { must(cudaEventDestroy(handle_)); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    operator cudaEvent_t() const { return handle_; }

  private:
    cudaEvent_t handle_ = nullptr;
};

// to[i] = a from[i] + b, by one block of n threads.
void scale(cudaStream_t stream, float* to, const float* from, float a, float b, unsigned n = 8);

}  // namespace runtime_test
