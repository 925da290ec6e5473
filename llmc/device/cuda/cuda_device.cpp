#include "llmc/device/cuda/cuda_device.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "llmc/core/memory_layout.h"
#include "llmc/core/text.h"
#include "llmc/device/gpu_table.h"

namespace llmc {

namespace cuda {

namespace {

// Memory to leave free for code that is loaded when it is first used, such as the kernels of cuBLASLt.
constexpr std::size_t kept_for_code = std::size_t{256} << 20;

struct Memory {
    std::size_t free = 0, total = 0;
};

// Advice for an arena that does not fit although it was planned: another process uses this GPU.
std::string_view what_would_shrink(std::string_view arena) {
    const auto is_one_of = [&](auto... kinds) { return ((arena == name_of(kinds)) || ...); };
    if (is_one_of(ArenaKind::activations, ArenaKind::pipeline))
        return ", or give a smaller --micro-batch-size or --recompute block";
    if (is_one_of(ArenaKind::parameters, ArenaKind::gradients, ArenaKind::master, ArenaKind::moments))
        return ", or give a smaller --model, or more GPUs and a higher --zero-stage";
    return "";
}

Memory memory_now() {
    Memory memory;
    check_cuda(cudaMemGetInfo(&memory.free, &memory.total), "cudaMemGetInfo");
    return memory;
}

// Selects the GPU for all later CUDA calls of this process. This is the first call to a GPU.
cudaDeviceProp select_gpu(int gpu) {
    check_cuda(cudaSetDevice(gpu), fmt::format("GPU {}", gpu));
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, gpu), "cudaGetDeviceProperties");
    if (properties.major < 8) {
        user_error("GPU {}, {}, has compute capability {}.{}, but the kernels need 8.0; try --device cpu",
                   gpu, properties.name, properties.major, properties.minor);
    }
    if (!has_code_for_this_gpu()) {
        user_error(
            "GPU {}, {}, is of another kind (sm_{}{}) than this program was compiled for (see --version); "
            "build it again with GPU_ARCH={}{}, or use --device cpu",
            gpu, properties.name, properties.major, properties.minor, properties.major, properties.minor);
    }
    return properties;
}

Chip chip_of(const cudaDeviceProp& p) {
    return {.architecture = 10 * p.major + p.minor,
            .multiprocessors = p.multiProcessorCount,
            .threads_per_multiprocessor = p.maxThreadsPerMultiProcessor,
            .blocks_per_multiprocessor = p.maxBlocksPerMultiProcessor,
            .shared_bytes_per_multiprocessor = p.sharedMemPerMultiprocessor,
            .shared_bytes_per_block = p.sharedMemPerBlockOptin};
}

std::string version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

}  // namespace

CudaDevice::CudaDevice(const CudaOptions& options)
    : options_(options),
      properties_(select_gpu(options.gpu)),
      ops_(properties_.name, chip_of(properties_), streams_, options),
      host_(make_cpu_device(options.host_threads)) {
    const Memory memory = memory_now();
    used_at_start_ = memory.total - memory.free;
}

CudaDevice::~CudaDevice() { cudaDeviceSynchronize(); }

std::string CudaDevice::description() const {
    int runtime = 0, driver = 0;
    check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    return fmt::format("{}, {}, CUDA {} (driver for {}), {} attention", properties_.name,
                       human_bytes(properties_.totalGlobalMem), version_text(runtime), version_text(driver),
                       options_.attention == AttentionKind::cudnn ? "cuDNN's" : "flash");
}

std::string CudaDevice::note(DType dtype) const {
    if (dtype != DType::fp32) return {};
    return options_.tf32 ? "products in TF32" : "fp32 products without tensor cores; --tf32 uses them";
}

std::size_t CudaDevice::available_memory() const {
    const std::size_t free = memory_now().free;
    return free - std::min(kept_for_code, free / 8);
}

std::optional<double> CudaDevice::peak_flops(DType dtype) const {
    const GpuModel* const gpu = gpu_of_driver(properties_.name);
    return gpu ? std::optional(gpu->peak(dtype, options_.tf32)) : std::nullopt;
}

std::byte* CudaDevice::allocate(std::size_t bytes, std::string_view arena) {
    if (bytes == 0) return nullptr;
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // clear the error, which is reported here
        const Memory now = memory_now();
        user_error(
            "the arena {} needs {} of the GPU's memory, but {} of {} are free; end other programs that use "
            "it (nvidia-smi lists them){}",
            arena, human_bytes(bytes), human_bytes(now.free), human_bytes(now.total),
            what_would_shrink(arena));
    }
    check_cuda(error, "cudaMalloc");
    check_cuda(cudaMemsetAsync(memory, 0, bytes, streams_.selected()), "cudaMemsetAsync");
    check_cuda(cudaStreamSynchronize(streams_.selected()), "cudaStreamSynchronize");
    allocations_[static_cast<std::byte*>(memory)] = bytes;
    return static_cast<std::byte*>(memory);
}

void CudaDevice::release(std::byte* memory) {
    if (memory == nullptr) return;
    check(allocations_.erase(memory) == 1, "memory is released on the device that allocated it, once");
    cudaFree(memory);
}

void CudaDevice::upload(const Tensor& to_device, const void* from_host) {
    if (to_device.bytes() == 0) return;
    check_cuda(cudaMemcpyAsync(to_device.data, from_host, to_device.bytes(), cudaMemcpyHostToDevice,
                               streams_.selected()),
               "cudaMemcpyAsync");
    cudaPointerAttributes source{};
    check_cuda(cudaPointerGetAttributes(&source, from_host), "cudaPointerGetAttributes");
    // When CUDA reads memory that is not pinned depends on the machine.
    if (source.type != cudaMemoryTypeHost) streams_.finish();
}

void CudaDevice::begin_download(void* to_host_memory, const Tensor& from_device) {
    if (from_device.bytes() == 0) return;
    check_cuda(cudaMemcpyAsync(to_host_memory, from_device.data, from_device.bytes(), cudaMemcpyDeviceToHost,
                               streams_.selected()),
               "cudaMemcpyAsync");
}

void CudaDevice::download(void* to_host, const Tensor& from_device) {
    streams_.finish();
    begin_download(to_host, from_device);
    check_cuda(cudaStreamSynchronize(streams_.selected()), "a copy from the GPU");
}

HostMemory CudaDevice::host_memory(std::size_t bytes) {
    void* memory = nullptr;
    const cudaError_t error = cudaMallocHost(&memory, std::max<std::size_t>(bytes, 1));
    if (error == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // clear the error, which is reported here
        user_error(
            "{} of pinned host memory are not to be had; end other programs, raise the memory limit of the "
            "container, or, where a run offloads, offload less",
            human_bytes(bytes));
    }
    check_cuda(error, "cudaMallocHost");
    return {static_cast<std::byte*>(memory), [](std::byte* pinned) { cudaFreeHost(pinned); }};
}

void CudaDevice::synchronize() { streams_.finish_all(); }

std::size_t CudaDevice::memory_taken() const {
    const Memory now = memory_now();
    return now.total - now.free;
}

std::string CudaDevice::memory_beside_arenas(std::size_t communicator_bytes) const {
    const std::size_t taken = memory_taken();
    std::size_t known = used_at_start_ + communicator_bytes;
    for (const auto& [memory, bytes] : allocations_) known += bytes;
    std::string text = fmt::format("CUDA's context and other processes {}", human_bytes(used_at_start_));
    if (communicator_bytes > 0) text += fmt::format(", NCCL {}", human_bytes(communicator_bytes));
    if (taken > known) text += fmt::format(", libraries {}", human_bytes(taken - known));
    return text;
}

}  // namespace cuda

// Streams share the connections to a GPU, by default 8: work behind a receive that spins could wait for it, though it
// is of another stream.
void prepare_gpus() { setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0); }

Gpus find_gpus() {
    int count = 0;  // not set if there is no driver
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
        cudaGetLastError();  // clear the error, which is reported here
        int driver = 0;
        const bool has_driver = cudaDriverGetVersion(&driver) == cudaSuccess && driver > 0;
        if (!has_driver) return {{}, "NVIDIA driver not found"};
        if (error == cudaErrorInsufficientDriver) {
            int needed = 0;
            cuda::check_cuda(cudaRuntimeGetVersion(&needed), "cudaRuntimeGetVersion");
            user_error(
                "the NVIDIA driver is for CUDA {}, but this program needs one for CUDA {}; install a newer "
                "driver, build the program with an older CUDA, or give --device cpu",
                cuda::version_text(driver), cuda::version_text(needed));
        }
        return {{},
                error == cudaSuccess ? "CUDA finds no GPU"
                                     : std::string("CUDA says \"") + cudaGetErrorString(error) + "\""};
    }
    Gpus gpus;
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp properties;
        cuda::check_cuda(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
        Gpu& gpu = gpus.all.emplace_back();
        gpu.name = properties.name;
        gpu.architecture = 10 * properties.major + properties.minor;
        std::copy_n(properties.uuid.bytes, gpu.uuid.size(), gpu.uuid.begin());
    }
    return gpus;
}

std::unique_ptr<Device> make_cuda_device(const CudaOptions& options) {
    return std::make_unique<cuda::CudaDevice>(options);
}

}  // namespace llmc
