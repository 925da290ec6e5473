// The runtime's answers about its devices.
#include <cstring>

#include "simt/runtime/device_memory.h"

namespace runtime_test {
namespace {

std::string uuid_of(int device) {
    cudaDeviceProp properties{};
    must(cudaGetDeviceProperties(&properties, device));
    return {properties.uuid.bytes, 16};
}

TEST(Device, is_the_chip_that_the_environment_names) {
    EXPECT_TRUE(run_process({{"SIMT_CHIP", "90"}}, [] {
                    cudaDeviceProp p{};
                    must(cudaGetDeviceProperties(&p, 0));
                    int value = 0;
                    must(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
                    return p.major == 9 && p.minor == 0 && p.multiProcessorCount == 132 &&
                           p.sharedMemPerBlockOptin == 227 << 10 && value == 227 << 10 &&
                           std::strstr(p.name, "simulated on the CPU (sm_90)");
                }).good());
    EXPECT_TRUE(run_process({{"SIMT_CHIP", "86"}}, [] {
                    int major = 0, minor = 0;
                    must(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
                    must(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
                    return major == 8 && minor == 6;
                }).good());
}

TEST(Device, there_may_be_none) {
    EXPECT_TRUE(run_process({{"SIMT_GPUS", "0"}}, [] {
                    int count = -1, driver = -1;
                    return cudaGetDeviceCount(&count) == cudaErrorInsufficientDriver && count == -1 &&
                           cudaGetLastError() == cudaErrorInsufficientDriver &&
                           cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
                }).good());
}

TEST(Device, devices_have_uuids_of_their_own) {
    EXPECT_TRUE(run_process({{"SIMT_GPUS", "2"}}, [] {
                    int count = 0, device = -1;
                    must(cudaGetDeviceCount(&count));
                    must(cudaSetDevice(1));
                    must(cudaGetDevice(&device));
                    return count == 2 && device == 1 && cudaSetDevice(2) == cudaErrorInvalidDevice &&
                           uuid_of(0) != uuid_of(1);
                }).good());
    EXPECT_TRUE(
        run_process({{"SIMT_GPU_UUID", "another"}}, [] { return uuid_of(0).starts_with("another"); }).good());
}

TEST(Device, streams_have_priorities) {
    EXPECT_TRUE(run_process({}, [] {
                    int least = 1, greatest = 1, priority = 1;
                    must(cudaDeviceGetStreamPriorityRange(&least, &greatest));
                    cudaStream_t stream = nullptr;
                    must(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
                    must(cudaStreamGetPriority(stream, &priority));
                    must(cudaStreamDestroy(stream));
                    return least == 0 && greatest < least && priority == greatest;
                }).good());
}

TEST(Device, a_reset_frees_all) {
    EXPECT_TRUE(run_process({}, [] {
                    void *memory = nullptr, *pinned = nullptr;
                    must(cudaMalloc(&memory, 1000));
                    must(cudaMallocHost(&pinned, 1000));
                    must(cudaDeviceReset());
                    std::size_t free_bytes = 0, total = 0;
                    must(cudaMemGetInfo(&free_bytes, &total));
                    return free_bytes == total;
                }).good());
}

TEST(Device, memory_is_limited) {
    EXPECT_TRUE(run_process({{"SIMT_GPU_MEMORY", "1000"}}, [] {
                    const DeviceArray<char> x(600);
                    std::size_t free_bytes = 0, total = 0;
                    must(cudaMemGetInfo(&free_bytes, &total));
                    void* memory = nullptr;
                    return free_bytes == 400 && total == 1000 &&
                           cudaMalloc(&memory, 401) == cudaErrorMemoryAllocation &&
                           is_last_error(cudaErrorMemoryAllocation) && DeviceArray<char>(400).data != nullptr;
                }).good());
}

TEST(Device, the_context_takes_memory) {
    EXPECT_TRUE(run_process({{"SIMT_GPU_MEMORY", "1000"}, {"SIMT_CONTEXT_BYTES", "300"}}, [] {
                    std::size_t free_bytes = 0, total = 0;
                    must(cudaMemGetInfo(&free_bytes, &total));
                    void* memory = nullptr;
                    return free_bytes == 700 && cudaMalloc(&memory, 701) == cudaErrorMemoryAllocation;
                }).good());
}

TEST(Device, kernels_have_names) {
    EXPECT_TRUE(run_process({}, [] {
                    const auto* kernel = reinterpret_cast<const void*>(&scale);
                    const char* name = nullptr;
                    must(cudaFuncGetName(&name, kernel));
                    return std::strstr(name, "scale") &&
                           cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                163 << 10) == cudaSuccess &&
                           cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                164 << 10) == cudaErrorInvalidValue;
                }).good());
}

}  // namespace
}  // namespace runtime_test
