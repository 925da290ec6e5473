// The GPUs of this machine, and the device that computes on one of them. Plain C++: the program asks here, whether it
// was built with CUDA or not (no_cuda.cpp answers where it was not).
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
    std::array<std::int8_t, 16> uuid{};  // the same in all processes, whatever number each knows it by
    int architecture = 0;                // 90 for sm_90
};

// What this process may use, by CUDA's numbers (CUDA_VISIBLE_DEVICES chooses and orders them). Where there is none
// `why` says so, as the end of a sentence.
struct Gpus {
    std::vector<Gpu> all;
    std::string why_none;
};
Gpus find_gpus();

enum class AttentionKind { flash, cudnn };

struct CudaOptions {
    int gpu = 0;
    AttentionKind attention = AttentionKind::flash;
    bool tf32 = false;  // products of fp32 numbers round them to TF32's 10 bits
    bool sync = false;  // waits for every kernel, and names the one that failed
};

// UserError if the GPU is none that this program was compiled for, or if the program has no such attention.
std::unique_ptr<Device> make_cuda_device(const CudaOptions& options);

}  // namespace llmc
