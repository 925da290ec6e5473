// The GPUs of this machine, and the device that computes on one of them. Plain C++: the program uses this
// header with or without CUDA. (Without CUDA, no_cuda.cpp implements it.)
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "llmc/device/device.h"

namespace llmc {

struct Gpu {
    std::string name;
    std::array<std::int8_t, 16> uuid{};  // the same in all processes, however they number the GPUs
    int architecture = 0;                // 90 for sm_90
};

// Sets what CUDA reads at its first call, which MPI may make.
void prepare_gpus();

// The GPUs that this process may use, in CUDA's order (CUDA_VISIBLE_DEVICES selects and orders them). If
// there are none, `why_none` is the reason, as the end of a sentence.
struct Gpus {
    std::vector<Gpu> all;
    std::string why_none;
};
Gpus find_gpus();

enum class AttentionKind { flash, cudnn };

struct CudaOptions {
    int gpu = 0;
    AttentionKind attention = AttentionKind::flash;
    bool tf32 = false;     // products round fp32 factors to TF32, with a 10-bit mantissa
    int host_threads = 0;  // of the CPU device beside it
    bool sync = false;     // waits for every kernel, and names the one that failed
};

// Throws a UserError if the program has no code for this GPU, or was built without the chosen attention.
std::unique_ptr<Device> make_cuda_device(const CudaOptions& options);

}  // namespace llmc
