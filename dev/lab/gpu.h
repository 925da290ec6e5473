// The GPU of the lab, where there is one: gpu.cu asks CUDA; no_gpu.cpp stands in for it where kernels run on the
// executor, which has no time to tell.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "llmc/device/cuda/kernel.cuh"

namespace lab {

// Empty on the executor. Stops with one line where CUDA finds no GPU.
std::string gpu_name();
llmc::cuda::LaunchContext gpu_context();
// Whose figures are at hand: the GPU; on the executor those of sm_80, sm_86 and sm_90 that are in the compiler's report.
std::vector<llmc::cuda::Chip> known_chips();
void synchronize();
// Before the first launch, on the executor: the seed of the order of threads, and the compiler's report. Nothing on
// a GPU.
void use_executor(std::uint64_t seed);

// Median milliseconds of what `launch` launches in the stream, by events, the L2 cache flushed before each.
double milliseconds(const std::function<void()>& launch, cudaStream_t stream = nullptr);

// Measured now: bytes a second of a device-to-device copy (read plus written), operations a second of a large
// bf16 product.
double copy_bandwidth();
double product_rate();

struct KernelFigures {
    std::string name;
    int registers;  // a thread
    int static_shared_bytes;
    int local_bytes;  // stack and spills
};
// Of a kernel on the context's chip; nothing where no compiler's report is at hand.
std::optional<KernelFigures> kernel_figures(const llmc::cuda::Chip& chip, const void* kernel);

}  // namespace lab
