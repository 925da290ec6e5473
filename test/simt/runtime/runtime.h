// The CUDA runtime of the tests. It replaces libcudart, libcublasLt and libnccl, so that the host code of the
// CUDA device runs, unchanged, on a machine without a GPU. Kernels run on the executor (simt/executor.h),
// copies and products on the CPU, all of it late and in a random order (streams.h). This file holds what its
// parts share.
//
// Environment variables:
//   SIMT_SEED=N           the order in which streams, blocks, warps and lanes take turns; 0: as they were issued.
//                         If it is odd, the first launch of a kernel, or of a product's algorithm, waits for all
//                         issued work
//   SIMT_GPUS=N           number of devices; 0: as on a machine without a driver
//   SIMT_CHIP=80|86|89|90 their chip; 75 or 100: chips for which no kernel has code
//   SIMT_MULTIPROCESSORS=N how many each has
//   SIMT_GPU_MEMORY=N     bytes of each device
//   SIMT_CONTEXT_BYTES=N  bytes of these that CUDA's context takes; SIMT_NCCL_BYTES=N: that a communicator takes;
//                         0 by default
//   SIMT_HOST_MEMORY=N    bytes of pinned memory that there are
//   SIMT_DRIVER=N         the CUDA version of the driver, such as 12020; older than the runtime's, no call works
//   SIMT_GPU_UUID=TEXT    the UUID of device 0, instead of one that all processes share
//   SIMT_FAIL=WHAT:N      the Nth launch that runs, or the Nth call of malloc or memcpy, fails like an illegal
//                         address; with memory:N, the Nth cudaMalloc finds no memory, as if other processes had
//                         taken it; with hostmalloc:N, so does the Nth cudaMallocHost; with nccl:N, the Nth
//                         operation of NCCL fails, as if the network had failed while all processes live
//   SIMT_NCCL_SECONDS=N   how long a collective may wait for its peers
//   SIMT_COUNT=FILE       writes counts of its calls (counts.h) to FILE and the process's number
//   KERNEL_REPORT=FILE    the compiler's figures, by which launches are refused
//
// Wrong use whose result is undefined on a GPU ends the process with one line that begins with "simt: ".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>

#include "llmc/device/cuda/launch.h"
#include "simt/runtime/counts.h"
#include "simt/runtime/memory.h"
#include "simt/runtime/streams.h"

namespace simt::runtime {

inline constexpr int cuda_version = 13000;

struct Settings {
    std::uint64_t seed = 0;
    int gpus = 1;
    llmc::cuda::Chip chip = llmc::cuda::sm_80;
    bool has_code = true;  // for the chip
    std::size_t gpu_memory = std::size_t{4} << 30;
    std::size_t context_bytes = 0, nccl_bytes = 0;
    std::size_t host_memory = SIZE_MAX;
    int driver = cuda_version;
    std::string gpu_uuid;
    int slow_algorithm = 11;  // an algorithm of cuBLASLt (cublaslt_algorithms.cpp)
    std::string fails;        // "launch", "malloc", "memcpy", "memory", "hostmalloc" or "nccl"
    std::uint64_t fails_at = 0;
    double nccl_seconds = 120;
    std::string count_file;
};

// A device's multiprocessors. Operations of NCCL hold some of them from their turn to their end: their blocks spin, and
// share them with no other kernel.
class Multiprocessors {
  public:
    explicit Multiprocessors(int number) : free_(number) {}
    bool has_free() const { return free_ > 0; }
    int held() const { return held_; }
    int wanted() const { return wanted_; }
    std::string why_none_is_free() const;

    // The multiprocessors that one operation wants, until this is destroyed.
    class Share {
      public:
        Share(Multiprocessors& of, int wanted) : of_(of), wanted_(wanted) { of_.wanted_ += wanted_; }
        ~Share();
        Share(const Share&) = delete;
        Share& operator=(const Share&) = delete;
        // Whether it has them, which it does from the first time that enough are free.
        bool take();

      private:
        Multiprocessors& of_;
        int wanted_;
        bool has_ = false;
    };

  private:
    int free_, held_ = 0, wanted_ = 0;
};

class Runtime {
  public:
    // Any thread may call it, one call at a time.
    std::mutex mutex;
    const Settings settings;
    Counts counts;
    std::int64_t nccl_in_flight = 0;  // operations that were issued and have not ended
    Memory memory;
    Streams streams;

    Runtime();

    // Bytes of a device's memory that allocations, the context and communicators take.
    std::size_t memory_taken(int device) const;
    void add_communicator(int device) { ++communicators_[device]; }
    void remove_communicator(int device) { --communicators_[device]; }

    // The code of a kernel, or of a product's algorithm, is loaded when it is first launched or asked for. With an odd
    // seed this waits for all issued work.
    void load(const std::string& code, const char* call);
    Multiprocessors& multiprocessors(int device);

    // The error that every call returns from now on, as after an illegal address on a GPU; cudaSuccess if
    // there is none.
    cudaError_t fault() const { return fault_; }
    // Counts calls of a kind. Returns true if this call must fail, and sets the fault.
    bool strikes(const char* kind);
    // The same without setting a lasting fault.
    bool is_struck(const char* kind) { return settings.fails == kind && ++calls_ == settings.fails_at; }

  private:
    std::map<int, std::size_t> communicators_;  // the number of each device's communicators
    std::map<int, Multiprocessors> multiprocessors_;
    std::set<std::string> loaded_;
    std::uint64_t calls_ = 0;  // calls of the kind that must fail
    cudaError_t fault_ = cudaSuccess;
};
Runtime& runtime();

// In every process, the same number is the same device.
cudaUUID_t gpu_uuid(int device);
// The device of this host thread.
int& current_device();
// The error that cudaGetLastError returns to this host thread.
cudaError_t& last_error();

// Runs the body of an API function that returns a cudaError_t.
template <class Body>
cudaError_t api_call(const Body& body) {
    Runtime& r = runtime();
    if (r.streams.runs_on_this_thread()) return cudaErrorNotPermitted;  // called by a host function
    const std::lock_guard one_at_a_time(r.mutex);
    r.streams.host_is_here();
    if (r.settings.gpus == 0 || r.settings.driver < cuda_version)
        return last_error() = cudaErrorInsufficientDriver;
    cudaError_t error = r.fault();
    if (error == cudaSuccess) error = body(r);
    if (r.fault() != cudaSuccess) error = r.fault();
    r.streams.host_is_here();
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error() = error;
    return error;
}

}  // namespace simt::runtime
