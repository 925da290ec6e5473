// Included by every kernel: CUDA if nvcc compiles it. Otherwise it is the executor of test/simt, which has
// the same names and runs the same source on the CPU. A kernel for both
// - declares shared memory with SHARED or takes it from a SharedAllocator, never with `__shared__`,
// - uses PTX through the wrappers of ptx.cuh,
// - is launched with launch().
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
// Declares a shared array: SHARED(float, partial, [32]). It is aligned for 16-byte accesses, as it is on the
// CPU.
#define SHARED(type, name, size) __shared__ __align__(16) type name size
// For the executor, which identifies a barrier or warp collective by its line and the lines of the calls that
// led there. LLMC_SITE is the last parameter of a function or lambda that contains a barrier or collective
// and is called at several places. LLMC_PASS_SITE is the last argument of the calls inside it.
#define LLMC_SITE
#define LLMC_PASS_SITE
// The same for functions without other parameters.
#define LLMC_ONLY_SITE
#define LLMC_PASS_ONLY_SITE
#else
#include "simt/cuda_on_cpu.h"
// NOLINTNEXTLINE(bugprone-macro-parentheses): a declaration
#define SHARED(type, name, size) auto& name = simt::shared_variable<type size>([] {})
#define LLMC_SITE , SIMT_SITE
#define LLMC_PASS_SITE , SIMT_SITE_IN_CALLER
#define LLMC_ONLY_SITE SIMT_SITE
#define LLMC_PASS_ONLY_SITE SIMT_SITE_IN_CALLER
#endif

#include "llmc/core/error.h"
#include "llmc/device/cuda/launch.h"
#include "llmc/device/cuda/runtime.h"

namespace llmc::cuda {

using bf16 = __nv_bfloat16;
using fp16 = __half;

// Runs kernel<<<grid, block, shared_bytes, stream>>>(args...), with up to as much dynamic shared memory as
// the chip has. A grid without blocks does nothing; CUDA would refuse it. Throws the launch's own error, not
// cudaGetLastError(), which may be that of an earlier call.
template <class... Parameters, class... Arguments>
void launch(const LaunchContext& on, void (*kernel)(Parameters...), dim3 grid, dim3 block,
            std::size_t shared_bytes, Arguments&&... arguments) {
    if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    if (on.only_loads) {
        cudaFuncAttributes ignored{};
        return check_cuda(cudaFuncGetAttributes(&ignored, reinterpret_cast<const void*>(kernel)),
                          "loading a kernel");
    }
    const bool asks_for_shared = shared_bytes > Chip::unasked_dynamic_bytes;
#ifdef __CUDACC__
    if (asks_for_shared) {
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shared_bytes)),
                   "dynamic shared memory");
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = on.stream;
    const cudaError_t error = cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
#else
    const cudaError_t error = simt::launch(
        on.chip, on.stream, kernel, grid, block,
        {shared_bytes, asks_for_shared ? on.chip.shared_bytes_per_block : Chip::default_shared_bytes},
        static_cast<Parameters>(arguments)...);
#endif
    check_cuda(error, "launch");
    if (on.observer)
        on.observer->launched({reinterpret_cast<const void*>(kernel), grid, block, shared_bytes});
}

// Divides the dynamic shared memory of a launch. All threads take the same arrays in the same order. Each
// array starts at a multiple of 128 bytes. (On the executor each array is an allocation of its own, so that
// it finds accesses past the end.)
class SharedAllocator {
  public:
    // The bytes that an array of n elements takes.
    template <class T>
    __host__ __device__ static constexpr std::size_t bytes(std::size_t n) {
        return (n * sizeof(T) + 127) / 128 * 128;
    }

    template <class T>
    __device__ T* take(std::size_t n) {
        const std::size_t start = offset_;
        offset_ += bytes<T>(n);
#ifdef __CUDACC__
        extern __shared__ __align__(1024) unsigned char dynamic_shared_memory[];
        return reinterpret_cast<T*>(dynamic_shared_memory + start);
#else
        return static_cast<T*>(simt::dynamic_shared(index_++, start, n * sizeof(T)));
#endif
    }

  private:
    std::size_t offset_ = 0;
#ifndef __CUDACC__
    unsigned index_ = 0;
#endif
};

// The number of blocks of `size` that cover n.
template <class Integer>
__host__ __device__ constexpr Integer blocks_for(Integer n, Integer size) {
    return (n + size - 1) / size;
}

}  // namespace llmc::cuda
