// The lab's GPU. gpu.cu implements this with CUDA. no_gpu.cpp replaces it where kernels run on the executor,
// which has no timings.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/device/cuda/kernel.cuh"

namespace lab {

// Empty on the executor. Throws a UserError if CUDA finds no GPU.
std::string gpu_name();
llmc::cuda::LaunchContext gpu_context();
// The chips with known kernel figures: the GPU or, on the executor, those of sm_80, sm_86 and sm_90 that are
// in the compiler's report.
std::vector<llmc::cuda::Chip> known_chips();
void synchronize();
// Call before the first launch. On the executor, sets the seed of the order of threads and the compiler's
// report. Does nothing on a GPU.
void use_executor(std::uint64_t seed);

// The median time of `launch` in the stream, in milliseconds, measured with events. The L2 cache is flushed
// before each run.
double milliseconds(const std::function<void()>& launch, cudaStream_t stream = nullptr);

// Measured when called: the bytes per second of a device-to-device copy (read plus written), and the
// operations per second of a large bf16 product.
double copy_bandwidth();
double product_rate();

struct KernelFigures {
    std::string name;
    int registers;  // per thread
    int static_shared_bytes;
    int local_bytes;  // stack and spills
};
// The figures of a kernel on this chip. On the executor, empty if the compiler's report does not have them.
std::optional<KernelFigures> kernel_figures(const llmc::cuda::Chip& chip, const void* kernel);

}  // namespace lab
