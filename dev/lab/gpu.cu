// Implements gpu.h with CUDA.
#include "dev/lab/gpu.h"

#include <fmt/core.h>

#include <algorithm>
#include <vector>

#include "dev/lab/memory.h"
#include "dev/lab/rivals.h"
#include "llmc/device/cuda/launch.h"

namespace lab {
namespace {

using llmc::cuda::check_cuda;

cudaDeviceProp properties() {
    int devices = 0;  // not set if there is no driver
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        llmc::user_error("no GPU: CUDA says \"{}\"; `make bench-check` runs the kernels without one",
                         cudaGetErrorString(error));
    }
    cudaDeviceProp of_device;
    check_cuda(cudaGetDeviceProperties(&of_device, 0), "cudaGetDeviceProperties");
    return of_device;
}

// Memory that only the device uses; the destructor frees it.
class DeviceMemory {
  public:
    explicit DeviceMemory(std::size_t bytes) { check_cuda(cudaMalloc(&data_, bytes), "cudaMalloc"); }
    ~DeviceMemory() { cudaFree(data_); }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;
    void* data() const { return data_; }

  private:
    void* data_ = nullptr;
};

class Event {
  public:
    Event() { check_cuda(cudaEventCreate(&event_), "cudaEventCreate"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record(cudaStream_t stream) { check_cuda(cudaEventRecord(event_, stream), "cudaEventRecord"); }
    float milliseconds_since(const Event& start) const {
        check_cuda(cudaEventSynchronize(event_), "a timed launch");
        float elapsed = 0;
        check_cuda(cudaEventElapsedTime(&elapsed, start.event_, event_), "cudaEventElapsedTime");
        return elapsed;
    }

  private:
    cudaEvent_t event_ = nullptr;
};

}  // namespace

std::string gpu_name() { return properties().name; }

llmc::cuda::LaunchContext gpu_context() {
    static const llmc::cuda::Chip chip = [] {
        const cudaDeviceProp p = properties();
        return llmc::cuda::Chip{.architecture = p.major * 10 + p.minor,
                                .multiprocessors = p.multiProcessorCount,
                                .threads_per_multiprocessor = p.maxThreadsPerMultiProcessor,
                                .blocks_per_multiprocessor = p.maxBlocksPerMultiProcessor,
                                .shared_bytes_per_multiprocessor = p.sharedMemPerMultiprocessor,
                                .shared_bytes_per_block = p.sharedMemPerBlockOptin};
    }();
    return {.chip = chip};
}

std::vector<llmc::cuda::Chip> known_chips() { return {gpu_context().chip}; }

void synchronize() { check_cuda(cudaDeviceSynchronize(), "a kernel"); }

void use_executor(std::uint64_t) {}

double milliseconds(const std::function<void()>& launch, cudaStream_t stream) {
    // Overwriting twice the size of the cache evicts all that the launch reads.
    static const std::size_t flushed = 2 * static_cast<std::size_t>(properties().l2CacheSize);
    static const DeviceMemory flush(flushed);
    constexpr int warm_up = 3, least = 11, most = 101;
    constexpr double enough_milliseconds = 300;
    std::vector<double> times;
    double total = 0;
    Event start, end;
    for (int i = 0; i < warm_up + most; ++i) {
        check_cuda(cudaMemsetAsync(flush.data(), i & 0xff, flushed, stream), "cudaMemset");
        start.record(stream);
        launch();
        end.record(stream);
        const double elapsed = end.milliseconds_since(start);
        if (i < warm_up) continue;
        times.push_back(elapsed);
        total += elapsed;
        if (i >= warm_up + least && total > enough_milliseconds) break;
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

double copy_bandwidth() {
    constexpr std::size_t bytes = std::size_t{1} << 30;
    const DeviceMemory from(bytes), to(bytes);
    const double ms = milliseconds([&] {
        check_cuda(cudaMemcpyAsync(to.data(), from.data(), bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
    });
    return 2 * static_cast<double>(bytes) / (ms * 1e-3);
}

double product_rate() {
    constexpr std::int64_t n = 8192;
    const auto rivals = rivals_of("matmul_forward", llmc::DType::bf16, {n, n, n});
    if (rivals.empty()) return 0;
    return 2.0 * n * n * n / (milliseconds(rivals.front().run, rivals.front().stream) * 1e-3);
}

std::optional<KernelFigures> kernel_figures(const llmc::cuda::Chip&, const void* kernel) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    const char* symbol = nullptr;
    check_cuda(cudaFuncGetName(&symbol, kernel), "cudaFuncGetName");
    return KernelFigures{llmc::cuda::kernel_name(symbol), attributes.numRegs,
                         static_cast<int>(attributes.sharedSizeBytes),
                         static_cast<int>(attributes.localSizeBytes)};
}

}  // namespace lab
