#include "llmc/device/gpu_table.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace llmc {

namespace {

using cuda::sm_80, cuda::sm_86, cuda::sm_89, cuda::sm_90;

constexpr cuda::Chip with_multiprocessors(cuda::Chip chip, int multiprocessors) {
    chip.multiprocessors = multiprocessors;
    return chip;
}
constexpr cuda::Chip sm_100{100, 148, 2048, 32, 228 << 10, 227 << 10};
constexpr cuda::Chip sm_103{103, 148, 2048, 32, 228 << 10, 227 << 10};
constexpr cuda::Chip sm_120{120, 170, 1536, 24, 100 << 10, 99 << 10};

// Peaks of GeForce cards are those with sums in fp32. H800 and A800 differ from H100 and A100 in their links.
// The driver's name of one entry may begin that of another: the longer one comes first.
constexpr std::array gpus = {
    GpuModel{"A100-40", "NVIDIA A100-SXM4-40GB", sm_80, 312e12, 156e12, 19.5e12, 0, 40, 39.5, 1555, 300, 31,
             25, 8, 2},
    GpuModel{"A100-PCIe", "NVIDIA A100-PCIE", sm_80, 312e12, 156e12, 19.5e12, 0, 80, 79.2, 1940, 300, 31, 25,
             2, 2},
    GpuModel{"A100-PCIe", "NVIDIA A100 80GB PCIe", sm_80, 312e12, 156e12, 19.5e12, 0, 80, 79.2, 1940, 300, 31,
             25, 2, 2},
    GpuModel{"A100", "NVIDIA A100", sm_80, 312e12, 156e12, 19.5e12, 0, 80, 79.2, 2000, 300, 31, 25, 8, 2},
    GpuModel{"A800", "NVIDIA A800", sm_80, 312e12, 156e12, 19.5e12, 0, 80, 79.2, 2000, 200, 31, 25},
    GpuModel{"H100-NVL", "NVIDIA H100 NVL", sm_90, 835e12, 417e12, 60e12, 1671e12, 94, 93.1, 3900, 300, 63,
             50, 2},
    GpuModel{"H100-PCIe", "NVIDIA H100 PCIe", with_multiprocessors(sm_90, 114), 756e12, 378e12, 51e12,
             1513e12, 80, 79.2, 2000, 300, 63, 50, 2},
    GpuModel{"H100", "NVIDIA H100", sm_90, 989e12, 494.7e12, 67e12, 1979e12, 80, 79.2, 3350, 450, 63, 50, 8,
             3.5},
    GpuModel{"H800", "NVIDIA H800", sm_90, 989e12, 494.7e12, 67e12, 1979e12, 80, 79.2, 3350, 200, 63, 50, 8,
             2},
    GpuModel{"H200", "NVIDIA H200", sm_90, 989e12, 494.7e12, 67e12, 1979e12, 141, 139.8, 4800, 450, 63, 50},
    GpuModel{"GH200", "NVIDIA GH200", sm_90, 989e12, 494.7e12, 67e12, 1979e12, 96, 94.5, 4000, 450, 63, 50},
    GpuModel{"H20", "NVIDIA H20", with_multiprocessors(sm_90, 78), 148e12, 74e12, 44e12, 296e12, 96, 95.0,
             4000, 450, 63, 50},
    GpuModel{"B200", "NVIDIA B200", sm_100, 2250e12, 1125e12, 75e12, 4500e12, 192, 178.3, 8000, 900, 63, 50},
    GpuModel{"GB200", "NVIDIA GB200", sm_100, 2500e12, 1250e12, 80e12, 5000e12, 192, 184.3, 8000, 900, 450,
             50, 72},
    GpuModel{"B300", "NVIDIA B300", sm_103, 2250e12, 1125e12, 75e12, 4500e12, 288, 267.7, 8000, 900, 63, 100},
    GpuModel{"L40S", "NVIDIA L40S", with_multiprocessors(sm_89, 142), 362e12, 183e12, 91.6e12, 733e12, 48,
             44.4, 864, 0, 31, 25},
    GpuModel{"L40", "NVIDIA L40", with_multiprocessors(sm_89, 142), 181e12, 90.5e12, 90.5e12, 362e12, 48,
             44.4, 864, 0, 31, 25},
    GpuModel{"L4", "NVIDIA L4", with_multiprocessors(sm_89, 58), 121e12, 60e12, 30.3e12, 242e12, 24, 22.0,
             300, 0, 31, 25},
    GpuModel{"A40", "NVIDIA A40", sm_86, 149.7e12, 74.8e12, 37.4e12, 0, 48, 44.3, 696, 0, 31, 25},
    GpuModel{"A6000", "NVIDIA RTX A6000", sm_86, 154.8e12, 77.4e12, 38.7e12, 0, 48, 47.5, 768, 0, 31, 25},
    GpuModel{"A10", "NVIDIA A10", with_multiprocessors(sm_86, 72), 125e12, 62.5e12, 31.2e12, 0, 24, 22.0, 600,
             0, 31, 25},
    GpuModel{"RTX-PRO-6000", "NVIDIA RTX PRO 6000", with_multiprocessors(sm_120, 188), 503.8e12, 251.9e12,
             125e12, 1007.6e12, 96, 95.0, 1792, 0, 63, 50},
    GpuModel{"3090", "NVIDIA GeForce RTX 3090", with_multiprocessors(sm_86, 82), 71e12, 35.6e12, 35.6e12, 0,
             24, 23.6, 936, 0, 31, 12.5},
    GpuModel{"4090", "NVIDIA GeForce RTX 4090", sm_89, 165.2e12, 82.6e12, 82.6e12, 330.3e12, 24, 23.5, 1008,
             0, 31, 12.5},
    GpuModel{"5090", "NVIDIA GeForce RTX 5090", sm_120, 209.5e12, 104.8e12, 104.8e12, 419e12, 32, 31.4, 1792,
             0, 63, 12.5},
};

bool equal_letters(char a, char b) {
    return std::toupper(static_cast<unsigned char>(a)) == std::toupper(static_cast<unsigned char>(b));
}

}  // namespace

std::span<const GpuModel> known_gpus() { return gpus; }

const GpuModel* gpu_named(std::string_view name) {
    const auto* const found = std::ranges::find_if(
        gpus, [&](const GpuModel& gpu) { return std::ranges::equal(gpu.name, name, equal_letters); });
    return found == gpus.end() ? nullptr : found;
}

const GpuModel* gpu_of_driver(std::string_view name) {
    const auto* const found = std::ranges::find_if(gpus, [&](const GpuModel& gpu) {
        return name.starts_with(gpu.driver) &&
               (name.size() == gpu.driver.size() || name[gpu.driver.size()] == ' ' ||
                name[gpu.driver.size()] == '-');
    });
    return found == gpus.end() ? nullptr : found;
}

}  // namespace llmc
