#include "llmc/device/cuda/checksum.h"

#include "llmc/device/cuda/grid.cuh"
#include "llmc/device/cuda/reduce.cuh"

namespace llmc::cuda {

constexpr int checksum_threads = 128, checksum_resident_threads = 1024;

struct IntegerSum {
    __device__ unsigned long long operator()(unsigned long long a, unsigned long long b) const {
        return a + b;
    }
};

// Each 16 bytes are hashed together with their place, so that two that change places change the sum.
// The factors are the prime of FNV-1a and 2^64 over the golden ratio.
__global__ void __launch_bounds__(checksum_threads, checksum_resident_threads / checksum_threads)
    checksum_kernel(unsigned long long* sum, const uint4* data, std::int64_t packs, unsigned counted) {
    unsigned long long own = 0;
    for_grid<4>(
        packs, [=](std::int64_t i) { return data[i]; },
        [&own, counted](std::int64_t i, uint4 bits) {
            bits = {bits.x & counted, bits.y & counted, bits.z & counted, bits.w & counted};
            constexpr unsigned long long prime = 0x100000001b3;
            unsigned long long hash = static_cast<unsigned long long>(i + 1) * 0x9e3779b97f4a7c15;
            hash = (hash ^ bits.x) * prime;
            hash = (hash ^ bits.y) * prime;
            hash = (hash ^ bits.z) * prime;
            hash = (hash ^ bits.w) * prime;
            if ((bits.x | bits.y | bits.z | bits.w) != 0) own += hash ^ hash >> 32;
        });
    own = warp_reduce(own, IntegerSum());
    if (threadIdx.x % warp_threads == 0) atomicAdd(sum, own);
}

void add_checksum(const LaunchContext& on, unsigned long long* sum, const void* data, std::int64_t bytes,
                  unsigned ignored) {
    check(bytes % 16 == 0 && reinterpret_cast<std::uintptr_t>(data) % 16 == 0,
          "a checksum is of whole 16 bytes");
    const std::int64_t packs = bytes / 16;
    launch(on, checksum_kernel, streaming_blocks(on.chip, packs, checksum_threads, checksum_resident_threads),
           checksum_threads, 0, sum, static_cast<const uint4*>(data), packs, ~ignored);
}

}  // namespace llmc::cuda
