// Launches of kernels: the context and the observer of launches, and the names of kernels. Plain C++, for the
// device's host code and for kernels. Tests and the kernel lab use it on machines without a GPU.
#pragma once

#include <cxxabi.h>
#include <driver_types.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <string>

#include "llmc/device/cuda/chip.h"

namespace llmc::cuda {

// The parameters of a launch. The kernel lab computes the occupancy from them, and --cuda-sync waits for
// the kernel.
struct LaunchRecord {
    const void* kernel;
    dim3 grid, block;
    std::size_t dynamic_shared_bytes;
};

class LaunchObserver {
  public:
    virtual ~LaunchObserver() = default;
    virtual void launched(const LaunchRecord& record) = 0;
};

struct LaunchContext {
    Chip chip;
    cudaStream_t stream = nullptr;
    LaunchObserver* observer = nullptr;
    bool only_loads = false;  // the kernel's code, and runs nothing
};

// A kernel's readable name, from its mangled symbol. For example "layernorm_forward_kernel5<float>":
// without its namespaces, result type and parameters.
inline std::string kernel_name(const std::string& symbol) {
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> demangled(
        abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
    std::string name = status == 0 ? demangled.get() : symbol;
    name = name.substr(0, name.find('('));
    const std::size_t arguments = std::min(name.find('<'), name.size());
    const std::size_t start = name.find_last_of(": ", arguments);
    return start == std::string::npos ? name : name.substr(start + 1);
}

}  // namespace llmc::cuda
