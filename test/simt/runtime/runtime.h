// The CUDA runtime of the tests: it stands where libcudart, libcublasLt and libnccl would, so that the host code of the
// CUDA device runs, unchanged, on a machine without a GPU. Kernels run on the executor (simt/executor.h), copies and
// products on the CPU, all of it late and in a random order (streams.h). This file holds what its parts share.
//
// What the environment says:
//   SIMT_SEED=N           the order in which streams, blocks, warps and lanes take turns; 0, as they were issued
//   SIMT_GPUS=N           devices; 0, as on a machine without a driver
//   SIMT_CHIP=80|86|90    what they are; 75 or 100, chips that no kernel has code for
//   SIMT_GPU_MEMORY=N     bytes of each
//   SIMT_CONTEXT_BYTES=N  of these that CUDA's context takes, and SIMT_NCCL_BYTES=N that a communicator takes; 0 without
//   SIMT_GPU_UUID=TEXT    of device 0, instead of one that all processes have in common
//   SIMT_FAIL=WHAT:N      the Nth launch that runs, or call of malloc or memcpy, fails as an illegal address does; with
//                         memory:N the Nth cudaMalloc finds none, as where other processes take it; with nccl:N the Nth
//                         of NCCL's operations fails, as where the network does, while all processes live
//   SIMT_NCCL_SECONDS=N   how long a collective may wait for its peers
//   SIMT_COUNT=FILE       what was asked of it is counted (counts.h), into FILE and the process's number
//   KERNEL_REPORT=FILE    the compiler's figures, by which launches are refused
//
// Wrong use that a GPU would answer with an undefined result ends the process with one line that begins with "simt: ".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "llmc/device/cuda/chip.h"
#include "simt/runtime/counts.h"
#include "simt/runtime/memory.h"
#include "simt/runtime/streams.h"

namespace simt::runtime {

struct Settings {
    std::uint64_t seed = 0;
    int gpus = 1;
    llmc::cuda::Chip chip = llmc::cuda::sm_80;
    bool has_code = true;  // for the chip
    std::size_t gpu_memory = std::size_t{4} << 30;
    std::size_t context_bytes = 0, nccl_bytes = 0;
    std::string gpu_uuid;
    int slow_algorithm = 11;  // of cuBLASLt (cublaslt_algorithms.cpp)
    std::string fails;        // "launch", "malloc", "memcpy", "memory" or "nccl"
    std::uint64_t fails_at = 0;
    double nccl_seconds = 120;
    std::string count_file;
};

class Runtime {
  public:
    // Called by any thread, one call at a time.
    std::mutex mutex;
    const Settings settings;
    Counts counts;
    Memory memory;
    Streams streams;

    Runtime();

    // Bytes of a device's memory that are taken: by allocations, the context and communicators.
    std::size_t memory_taken(int device) const;
    void add_communicator(int device) { ++communicators_[device]; }
    void remove_communicator(int device) { --communicators_[device]; }

    // What every call answers from now on, as after an illegal address on a GPU; cudaSuccess where all is well.
    cudaError_t fault() const { return fault_; }
    // Counts calls of a kind. True where this is the one that is to fail: then the fault is set.
    bool strikes(const char* kind);
    // The same without a fault that stays.
    bool is_struck(const char* kind) { return settings.fails == kind && ++calls_ == settings.fails_at; }

  private:
    std::map<int, std::size_t> communicators_;  // of each device
    std::uint64_t calls_ = 0;                   // of the kind that is to fail
    cudaError_t fault_ = cudaSuccess;
};
Runtime& runtime();

// The same number is the same device in every process.
cudaUUID_t gpu_uuid(int device);
// The device of this host thread.
int& current_device();
// What cudaGetLastError is to answer to this host thread.
cudaError_t& last_error();

// Runs the body of an API function that answers a cudaError_t.
template <class Body>
cudaError_t api_call(const Body& body) {
    Runtime& r = runtime();
    if (r.streams.runs_on_this_thread()) return cudaErrorNotPermitted;  // by a host function
    const std::lock_guard one_at_a_time(r.mutex);
    r.streams.host_is_here();
    if (r.settings.gpus == 0) return last_error() = cudaErrorInsufficientDriver;
    cudaError_t error = r.fault();
    if (error == cudaSuccess) error = body(r);
    if (r.fault() != cudaSuccess) error = r.fault();
    r.streams.host_is_here();
    if (error != cudaSuccess) last_error() = error;
    return error;
}

}  // namespace simt::runtime
