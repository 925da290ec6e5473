// Wrong use that the runtime reports, whatever the order of work: races between copies, memory and handles
// used after their end, and work and memory left behind. Also the faults that the environment requests.
#include <cstring>

#include "simt/runtime/device_memory.h"

namespace runtime_test {
namespace {

// The process ends with a line that contains these words.
testing::AssertionResult is_reported(const std::string& words, const Body& body,
                                     const Environment& environment = {}) {
    const Outcome outcome = run_process(environment, body);
    const bool reported = !outcome.good() && outcome.status != wrong &&
                          outcome.errors.find("simt: ") != std::string::npos &&
                          outcome.errors.find(words) != std::string::npos;
    return (reported ? testing::AssertionSuccess() : testing::AssertionFailure()) << outcome;
}

enum class Ordered { not_at_all, by_event, by_host };

bool two_copies(Ordered ordered, bool second_writes) {
    DeviceArray<float> x(8);
    PinnedArray<float> host(8), back(8);
    const Stream a, b;
    const Event event;
    must(cudaMemcpyAsync(x.data, host.data, 32, cudaMemcpyHostToDevice, a));
    a.record(event);
    if (ordered == Ordered::by_event) b.wait(event);
    if (ordered == Ordered::by_host) must(cudaEventSynchronize(event));
    if (second_writes) {
        must(cudaMemsetAsync(x.data + 7, 0, 4, b));
    } else {
        must(cudaMemcpyAsync(back.data, x.data, 4, cudaMemcpyDeviceToHost, b));
    }
    must(cudaDeviceSynchronize());
    return true;
}

TEST(WrongUse, two_streams_that_touch_the_same_memory_with_nothing_between) {
    EXPECT_TRUE(
        is_reported("cudaMemsetAsync in stream 2 writes memory that cudaMemcpyAsync in stream 1 writes",
                    [] { return two_copies(Ordered::not_at_all, true); }));
    EXPECT_TRUE(
        is_reported("cudaMemcpyAsync in stream 2 reads memory that cudaMemcpyAsync in stream 1 writes",
                    [] { return two_copies(Ordered::not_at_all, false); }));
    for (const Ordered ordered : {Ordered::by_event, Ordered::by_host}) {
        EXPECT_TRUE(is_right_in_any_order([=] { return two_copies(ordered, true); }));
        EXPECT_TRUE(is_right_in_any_order([=] { return two_copies(ordered, false); }));
    }
}

// An order through a third stream counts, and so does one by an earlier record. Two readers need no order.
TEST(WrongUse, order_is_passed_on_and_readers_need_none) {
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8);
        PinnedArray<float> first(8), second(8);
        const Stream a, b, c;
        const Event of_a, of_b, of_c;
        must(cudaMemsetAsync(x.data, 0, 32, a));
        a.record(of_a);
        b.wait(of_a);
        must(cudaMemcpyAsync(first.data, x.data, 32, cudaMemcpyDeviceToHost, b));
        c.wait(of_a);
        must(cudaMemcpyAsync(second.data, x.data, 32, cudaMemcpyDeviceToHost, c));
        b.record(of_b);
        c.wait(of_b);
        c.record(of_c);
        a.wait(of_c);
        must(cudaMemsetAsync(x.data, 1, 32, a));
        must(cudaDeviceSynchronize());
        return first.data[0] == 0 && second.data[7] == 0;
    }));
    EXPECT_TRUE(
        is_reported("cudaMemsetAsync in stream 1 writes memory that cudaMemcpyAsync in stream 2 reads", [] {
            DeviceArray<float> x(8);
            PinnedArray<float> host(8);
            const Stream a, b;
            const Event early;
            b.record(early);
            must(cudaMemcpyAsync(host.data, x.data, 32, cudaMemcpyDeviceToHost, b));
            a.wait(early);  // recorded before the copy
            must(cudaMemsetAsync(x.data, 1, 32, a));
            return true;
        }));
}

TEST(WrongUse, handles_and_memory_after_their_end) {
    EXPECT_TRUE(is_reported("stream 1 was destroyed and is used", [] {
        cudaStream_t stream = nullptr;
        must(cudaStreamCreate(&stream));
        must(cudaStreamDestroy(stream));
        return cudaStreamSynchronize(stream) == cudaSuccess;
    }));
    EXPECT_TRUE(is_reported("an event was destroyed and is used", [] {
        const Stream stream;
        cudaEvent_t event = nullptr;
        must(cudaEventCreate(&event));
        must(cudaEventDestroy(event));
        stream.record(event);
        return true;
    }));
    EXPECT_TRUE(is_reported("cudaFree of memory that was not allocated, or already freed", [] {
        DeviceArray<float> x(8);
        must(cudaFree(x.data));
        return true;
    }));
    EXPECT_TRUE(is_reported("cudaFreeHost of memory that cudaMemcpyAsync has yet to use", [] {
        DeviceArray<float> x(8);
        const Stream stream;
        {
            const PinnedArray<float> host(8);
            must(cudaMemcpyAsync(x.data, host.data, 32, cudaMemcpyHostToDevice, stream));
        }
        stream.synchronize();
        return true;
    }));
}

TEST(WrongUse, what_is_left_at_the_end_of_the_program) {
    EXPECT_TRUE(is_reported("1 allocations of device or pinned memory were never freed", [] {
        void* memory = nullptr;
        must(cudaMalloc(&memory, 16));
        return true;
    }));
    EXPECT_TRUE(is_reported(
        "stream 1 has 2 pieces of work that the program never waited for, the first one scale_kernel", [] {
            static DeviceArray<float>& x = *new DeviceArray<float>(8);
            static const Stream& stream = *new Stream;
            scale(stream, x.data, x.data, 1, 1);
            scale(stream, x.data, x.data, 1, 1);
            return true;
        }));
    EXPECT_TRUE(is_right_in_any_order([] {
        const Stream stream;
        must(cudaLaunchHostFunc(
            stream, [](void*) {}, nullptr));
        return true;  // the stream is destroyed, and its work discarded with it
    }));
}

TEST(WrongUse, copies_of_what_is_not_there_are_refused) {
    EXPECT_TRUE(is_right_in_any_order([] {
        const DeviceArray<float> x(8);
        std::vector<float> host(9);
        const auto copy = [&](void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind) {
            return cudaMemcpy(to, from, bytes, kind);
        };
        return copy(x.data, host.data(), 36, cudaMemcpyHostToDevice) == cudaErrorInvalidValue &&
               copy(host.data(), x.data + 1, 32, cudaMemcpyDeviceToHost) == cudaErrorInvalidValue &&
               copy(host.data(), x.data, 32, cudaMemcpyHostToDevice) == cudaErrorInvalidValue &&
               cudaMemset(x.data, 0, 33) == cudaErrorInvalidValue &&
               cudaMemset(host.data(), 0, 4) == cudaErrorInvalidValue &&
               copy(x.data, host.data(), 32, cudaMemcpyDefault) == cudaSuccess;
    }));
}

bool upload_of_pageable_memory(bool waits, const std::function<void(std::vector<float>&)>& use_again) {
    DeviceArray<float> x(1 << 16);
    std::vector<float> host(1 << 16, 1);
    const Stream stream;
    must(cudaMemcpyAsync(x.data, host.data(), x.bytes, cudaMemcpyHostToDevice, stream));
    if (waits) stream.synchronize();
    use_again(host);
    stream.synchronize();
    return x.download().back() == 1;
}

// It may be read after the call, as on GH200. On the way to a PCIe bus it is read before, which hides this.
TEST(WrongUse, pageable_memory_that_is_used_again_before_its_upload_has_ended) {
    const auto changes = [](std::vector<float>& host) { host.back() = 2; };
    const auto frees = [](std::vector<float>& host) { std::vector<float>().swap(host); };
    for (const std::function<void(std::vector<float>&)>& use :
         {std::function(changes), std::function(frees)}) {
        EXPECT_TRUE(is_reported("cudaMemcpyAsync: its source is not pinned, and is gone or changed",
                                [&] { return upload_of_pageable_memory(false, use); }));
        EXPECT_TRUE(is_right_in_any_order([&] { return upload_of_pageable_memory(true, use); }));
    }
}

// A call that the program expects to fail, as that of an algorithm which it tries, leaves an error. Who asks for the
// last error after a launch gets that one.
TEST(WrongUse, an_earlier_error_is_taken_for_that_of_a_launch) {
    const auto launch_after_a_failed_call = [](bool asks_for_the_last_error) {
        DeviceArray<float> x(8);
        const Stream stream;
        void* memory = nullptr;
        if (cudaMalloc(&memory, std::size_t{1} << 60) != cudaErrorMemoryAllocation) return false;
        scale(stream, x.data, x.data, 1, 1);  // throws its own error
        const bool is_good = !asks_for_the_last_error || cudaGetLastError() == cudaSuccess;
        cudaGetLastError();
        stream.synchronize();
        return is_good;
    };
    EXPECT_EQ(run_process({}, [&] { return launch_after_a_failed_call(true); }).status, wrong);
    EXPECT_TRUE(is_right_in_any_order([&] { return launch_after_a_failed_call(false); }));
    // After a fault, a launch itself fails.
    const Outcome after_a_fault = run_process({{"SIMT_FAIL", "launch:1"}}, [] {
        cudaStream_t stream = nullptr;
        must(cudaStreamCreate(&stream));
        scale(stream, nullptr, nullptr, 1, 0, 1);
        if (cudaStreamSynchronize(stream) != cudaErrorIllegalAddress) return false;
        try {
            scale(stream, nullptr, nullptr, 1, 0, 1);
        } catch (const llmc::DeviceFault& fault) {
            return std::string(fault.what()).starts_with("launch: CUDA says");
        }
        return false;
    });
    EXPECT_TRUE(after_a_fault.good()) << after_a_fault;
}

TEST(WrongUse, new_memory_reads_as_nan) {
    EXPECT_TRUE(is_right_in_any_order([] {
        const DeviceArray<float> x(8);
        const PinnedArray<float> host(8);
        return std::isnan(x.download()[7]) && std::isnan(host.data[7]) &&
               reinterpret_cast<std::uintptr_t>(x.data) % 256 == 0;
    }));
}

#ifndef SIMT_ADDRESS
TEST(WrongUse, the_host_touches_closed_memory) {
    EXPECT_TRUE(is_reported("the host reads byte 12 of 32 of device 0's memory", [] {
        const DeviceArray<float> x(8);
        return x.data[3] == 0;
    }));
    EXPECT_TRUE(is_reported("the host writes byte 0 of 32 of device 0's memory", [] {
        const DeviceArray<float> x(8);
        const std::vector<float> host(8);
        std::memcpy(x.data, host.data(), 32);
        return true;
    }));
    EXPECT_TRUE(is_reported("the host reads byte 4 of 32", [] {  // after work has opened it
        DeviceArray<float> x(8);
        const Stream stream;
        scale(stream, x.data, x.data, 1, 1);
        stream.synchronize();
        return x.data[1] == 0;
    }));
    EXPECT_TRUE(is_reported("the host reads byte 0 of 32", [] {
        DeviceArray<float> x(8);
        const Stream stream;
        scale(stream, x.data, x.data, 1, 1);
        must(cudaLaunchHostFunc(
            stream, [](void* data) { *static_cast<volatile float*>(data); }, x.data));
        stream.synchronize();
        return true;
    }));
    EXPECT_TRUE(is_reported("the host writes device memory that was not allocated, or already freed", [] {
        float* freed = DeviceArray<float>(8).data;
        *static_cast<volatile float*>(freed) = 0;
        return true;
    }));
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8);
        PinnedArray<float> host(8);
        const Stream stream;
        x.upload(std::vector<float>(8, 1));
        scale(stream, x.data, x.data, 2, 1);
        must(cudaMemcpyAsync(host.data, x.data, 32, cudaMemcpyDeviceToHost, stream));
        stream.synchronize();
        return host.data[7] == 3 && x.download()[0] == 3;
    }));
}

TEST(WrongUse, a_kernel_that_crashes_is_named) {
    for (const bool null_stream : {false, true}) {
        EXPECT_TRUE(is_reported(
            "scale_kernel: block (0,0,0), thread (0,0,0): touches memory that is not there", [null_stream] {
                const DeviceArray<float> x(8);
                const Stream stream;
                scale(null_stream ? nullptr : cudaStream_t(stream), x.data, nullptr, 1, 0);
                stream.synchronize();
                return true;
            }));
    }
}
#endif

#ifdef SIMT_ADDRESS
testing::AssertionResult is_found_by_address_sanitizer(const Body& body) {
    const Outcome outcome = run_process({}, body);
    const bool found = outcome.errors.find("ERROR: AddressSanitizer") != std::string::npos;
    return (found ? testing::AssertionSuccess() : testing::AssertionFailure()) << outcome;
}

TEST(WrongUse, the_host_touches_device_memory) {
    EXPECT_TRUE(is_found_by_address_sanitizer([] {
        const DeviceArray<float> x(8);
        return x.data[3] == 0;
    }));
}

TEST(WrongUse, kernels_touch_what_is_not_theirs) {
    EXPECT_TRUE(is_found_by_address_sanitizer([] {
        const DeviceArray<float> x(8);
        const Stream stream;
        scale(stream, x.data + 1, x.data, 1, 1);
        stream.synchronize();
        return true;
    }));
    EXPECT_TRUE(is_found_by_address_sanitizer([] {
        const Stream stream;
        const DeviceArray<float> x(8);
        const float* freed = DeviceArray<float>(8).data;
        scale(stream, x.data, freed, 1, 1);
        stream.synchronize();
        return true;
    }));
}
#endif

// ---- requested faults ----

TEST(Faults, stay_once_they_are_there) {
    const auto body = [] {
        cudaStream_t stream = nullptr;
        must(cudaStreamCreate(&stream));
        void* memory = nullptr;
        if (cudaMalloc(&memory, 32) != cudaSuccess) return cudaGetLastError() == cudaErrorIllegalAddress;
        auto* x = static_cast<float*>(memory);
        scale(stream, x, x, 1, 1);
        scale(stream, x, x, 1, 1);
        const bool launched = cudaGetLastError() == cudaSuccess;
        const bool found = cudaStreamSynchronize(stream) == cudaErrorIllegalAddress;
        const bool stays = cudaGetLastError() == cudaErrorIllegalAddress &&
                           cudaFree(memory) == cudaErrorIllegalAddress &&
                           cudaGetLastError() == cudaErrorIllegalAddress;
        return launched && found && stays;
    };
    EXPECT_TRUE(run_process({{"SIMT_FAIL", "launch:2"}}, body).good());
    EXPECT_EQ(run_process({{"SIMT_FAIL", "launch:3"}}, body).status, wrong);
    EXPECT_TRUE(run_process({{"SIMT_FAIL", "malloc:1"}}, body).good());
    EXPECT_TRUE(run_process({{"SIMT_FAIL", "memcpy:2"}}, [] {
                    float a = 1, b = 2;
                    must(cudaMemcpy(&a, &b, 4, cudaMemcpyHostToHost));
                    return cudaMemcpy(&a, &b, 4, cudaMemcpyHostToHost) == cudaErrorIllegalAddress &&
                           cudaDeviceSynchronize() == cudaErrorIllegalAddress;
                }).good());
    EXPECT_TRUE(is_reported("SIMT_FAIL is", [] { return cudaDeviceSynchronize() == cudaSuccess; },
                            {{"SIMT_FAIL", "lunch:1"}}));
}

}  // namespace
}  // namespace runtime_test
