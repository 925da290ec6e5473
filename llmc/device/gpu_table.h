// The GPUs that plans and reports know: the chip, its peaks, its memory and its links, from the makers' datasheets.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>

#include "llmc/core/dtype.h"
#include "llmc/device/cuda/chip.h"

namespace llmc {

struct GpuModel {
    std::string_view name;    // for --gpu
    std::string_view driver;  // the words with which the driver's name for it begins; empty: none of ours
    cuda::Chip chip{};
    // Dense matrix products in FLOP/s, those of fp16 like those of bf16. The products of fp32 use no tensor cores.
    // 0: the GPU has no such products.
    double bf16 = 0, tf32 = 0, fp32 = 0, fp8 = 0;
    double nominal_gb = 0;  // as sold, in 1e9 bytes
    // The GiB that a process sees (as PyTorch's messages print them); 0: not known, so --gpu-memory is needed.
    double gib = 0;
    // In one direction, 1e9 bytes/s: the GPU's memory, its link to the GPUs of its node (0: over PCIe alone),
    // PCIe, and the network of a typical cluster.
    double memory_gbs = 0, link_gbs = 0, pcie_gbs = 0, network_gbs = 0;
    int node = 8;                             // GPUs that the link connects
    std::optional<double> dollars_an_hour{};  // of common offers; for others, --price

    double peak(DType dtype, bool uses_tf32) const {
        return dtype != DType::fp32 ? bf16 : uses_tf32 ? tf32 : fp32;
    }
};

std::span<const GpuModel> known_gpus();
// The GPU of a name for --gpu, in capital or small letters; null if there is none.
const GpuModel* gpu_named(std::string_view name);
// The GPU whose name the driver gives; null if there is none.
const GpuModel* gpu_of_driver(std::string_view name);

}  // namespace llmc
