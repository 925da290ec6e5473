// CUDA's functions for devices, errors and kernels.
#include <cstdio>
#include <cstring>

#include "simt/executor.h"
#include "simt/runtime/runtime.h"

namespace {

using namespace simt::runtime;
using llmc::cuda::Chip;

bool is_device(const Runtime& r, int device) { return device >= 0 && device < r.settings.gpus; }

struct Name {
    const char* name;
    const char* text;
};

Name name_of(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return {"cudaSuccess", "no error"};
        case cudaErrorInvalidValue:
            return {"cudaErrorInvalidValue", "invalid argument"};
        case cudaErrorMemoryAllocation:
            return {"cudaErrorMemoryAllocation", "out of memory"};
        case cudaErrorInsufficientDriver:
            return {"cudaErrorInsufficientDriver",
                    "CUDA driver version is insufficient for CUDA runtime version"};
        case cudaErrorInvalidDevice:
            return {"cudaErrorInvalidDevice", "invalid device ordinal"};
        case cudaErrorInvalidResourceHandle:
            return {"cudaErrorInvalidResourceHandle", "invalid resource handle"};
        case cudaErrorNotReady:
            return {"cudaErrorNotReady", "device not ready"};
        case cudaErrorIllegalAddress:
            return {"cudaErrorIllegalAddress", "an illegal memory access was encountered"};
        case cudaErrorNoKernelImageForDevice:
            return {"cudaErrorNoKernelImageForDevice",
                    "no kernel image is available for execution on the device"};
        case cudaErrorNotPermitted:
            return {"cudaErrorNotPermitted", "operation not permitted"};
        case cudaErrorNotSupported:
            return {"cudaErrorNotSupported", "operation not supported"};
        default:
            return {"cudaErrorUnknown", "unknown error"};
    }
}

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
    return api_call([&](const Runtime& r) {
        *count = r.settings.gpus;
        return cudaSuccess;
    });
}

cudaError_t cudaSetDevice(int device) {
    return api_call([&](const Runtime& r) {
        if (!is_device(r, device)) return cudaErrorInvalidDevice;
        current_device() = device;
        return cudaSuccess;
    });
}

cudaError_t cudaGetDevice(int* device) {
    return api_call([&](const Runtime&) {
        *device = current_device();
        return cudaSuccess;
    });
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
    return api_call([&](const Runtime& r) {
        if (!is_device(r, device)) return cudaErrorInvalidDevice;
        const Chip& chip = r.settings.chip;
        *p = {};
        std::snprintf(p->name, sizeof(p->name), "GPU simulated on the CPU (sm_%d)", chip.architecture);
        p->uuid = gpu_uuid(device);
        p->pciBusID = device + 1;
        p->totalGlobalMem = r.settings.gpu_memory;
        p->sharedMemPerBlock = Chip::default_shared_bytes;
        p->sharedMemPerBlockOptin = chip.shared_bytes_per_block;
        p->sharedMemPerMultiprocessor = chip.shared_bytes_per_multiprocessor;
        p->reservedSharedMemPerBlock = 1 << 10;
        p->regsPerBlock = p->regsPerMultiprocessor = Chip::registers_per_multiprocessor;
        p->warpSize = llmc::cuda::warp_threads;
        p->maxThreadsPerBlock = Chip::threads_per_block;
        p->maxThreadsPerMultiProcessor = chip.threads_per_multiprocessor;
        p->maxBlocksPerMultiProcessor = chip.blocks_per_multiprocessor;
        const int block[] = {1024, 1024, 64};
        const int grid[] = {0x7fffffff, 65535, 65535};
        std::memcpy(p->maxThreadsDim, block, sizeof(block));
        std::memcpy(p->maxGridSize, grid, sizeof(grid));
        p->major = chip.architecture / 10;
        p->minor = chip.architecture % 10;
        p->multiProcessorCount = chip.multiprocessors;
        p->l2CacheSize = 40 << 20;
        p->memoryBusWidth = 5120;
        p->concurrentKernels = 1;
        p->asyncEngineCount = 2;
        p->unifiedAddressing = 1;
        p->canMapHostMemory = 1;
        p->streamPrioritiesSupported = 1;
        p->cooperativeLaunch = 1;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    cudaDeviceProp p;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, device)) return error;
    return api_call([&](const Runtime&) {
        switch (attribute) {
            case cudaDevAttrMaxThreadsPerBlock:
                *value = p.maxThreadsPerBlock;
                break;
            case cudaDevAttrMaxSharedMemoryPerBlock:
                *value = static_cast<int>(p.sharedMemPerBlock);
                break;
            case cudaDevAttrMaxSharedMemoryPerBlockOptin:
                *value = static_cast<int>(p.sharedMemPerBlockOptin);
                break;
            case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
                *value = static_cast<int>(p.sharedMemPerMultiprocessor);
                break;
            case cudaDevAttrMaxRegistersPerBlock:
            case cudaDevAttrMaxRegistersPerMultiprocessor:
                *value = p.regsPerBlock;
                break;
            case cudaDevAttrWarpSize:
                *value = p.warpSize;
                break;
            case cudaDevAttrClockRate:
            case cudaDevAttrMemoryClockRate:
                *value = 1'000'000;  // kHz
                break;
            case cudaDevAttrGlobalMemoryBusWidth:
                *value = p.memoryBusWidth;
                break;
            case cudaDevAttrMultiProcessorCount:
                *value = p.multiProcessorCount;
                break;
            case cudaDevAttrMaxThreadsPerMultiProcessor:
                *value = p.maxThreadsPerMultiProcessor;
                break;
            case cudaDevAttrMaxBlocksPerMultiprocessor:
                *value = p.maxBlocksPerMultiProcessor;
                break;
            case cudaDevAttrL2CacheSize:
                *value = p.l2CacheSize;
                break;
            case cudaDevAttrComputeCapabilityMajor:
                *value = p.major;
                break;
            case cudaDevAttrComputeCapabilityMinor:
                *value = p.minor;
                break;
            case cudaDevAttrPciBusId:
                *value = p.pciBusID;
                break;
            case cudaDevAttrPciDeviceId:
            case cudaDevAttrPciDomainId:
            case cudaDevAttrComputeMode:
            case cudaDevAttrIntegrated:
                *value = 0;
                break;
            case cudaDevAttrConcurrentKernels:
            case cudaDevAttrUnifiedAddressing:
            case cudaDevAttrStreamPrioritiesSupported:
                *value = 1;
                break;
            default:
                stop("cudaDeviceGetAttribute: attribute " + std::to_string(attribute) + " is not known here");
        }
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceReset() {
    return api_call([](Runtime& r) {
        r.streams.synchronize_all("cudaDeviceReset");
        r.memory.release_all();
        return cudaSuccess;
    });
}

cudaError_t cudaDriverGetVersion(int* number) {
    *number = runtime().settings.gpus == 0 ? 0 : runtime().settings.driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* number) {
    *number = cuda_version;
    return cudaSuccess;
}

// ---- errors ----

cudaError_t cudaPeekAtLastError() { return last_error(); }

cudaError_t cudaGetLastError() {
    const cudaError_t error = last_error();
    last_error() = runtime().fault();  // a fault stays
    return error;
}

const char* cudaGetErrorName(cudaError_t error) { return name_of(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return name_of(error).text; }

// ---- kernels ----

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    return api_call([&](const Runtime& r) {
        if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
        const bool fits =
            value >= 0 && static_cast<std::size_t>(value) <= r.settings.chip.shared_bytes_per_block;
        return fits ? cudaSuccess : cudaErrorInvalidValue;
    });
}

// Loads the kernel's code without launching it.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    return api_call([&](Runtime& r) {
        if (kernel == nullptr) return cudaErrorInvalidDeviceFunction;
        if (!r.settings.has_code) return cudaErrorNoKernelImageForDevice;
        r.load(simt::name_of_kernel(kernel), "cudaFuncGetAttributes");
        *attributes = {};
        attributes->maxThreadsPerBlock = Chip::threads_per_block;
        attributes->binaryVersion = attributes->ptxVersion = r.settings.chip.architecture;
        const auto* of_chip = simt::figures_on(simt::options().report, r.settings.chip.architecture);
        if (!of_chip) return cudaSuccess;
        const auto figures = of_chip->find(simt::symbol_of(kernel));
        if (figures == of_chip->end()) return cudaSuccess;
        attributes->maxThreadsPerBlock = figures->second.most_threads;
        attributes->numRegs = figures->second.registers;
        attributes->localSizeBytes = static_cast<std::size_t>(figures->second.stack_bytes);
        attributes->sharedSizeBytes = static_cast<std::size_t>(figures->second.static_shared_bytes);
        return cudaSuccess;
    });
}

// The mangled name, as for a kernel on a GPU.
cudaError_t cudaFuncGetName(const char** name, const void* kernel) {
    return api_call([&](const Runtime&) {
        static std::map<const void*, std::string> names;
        std::string& symbol = names[kernel];
        if (symbol.empty()) symbol = simt::symbol_of(kernel);
        if (symbol.empty()) return cudaErrorInvalidDeviceFunction;
        *name = symbol.c_str();
        return cudaSuccess;
    });
}
