// The order of work. CUDA's guarantees hold under every seed. An order that CUDA does not guarantee goes
// wrong under some seeds.
#include <thread>

#include "simt/runtime/device_memory.h"

namespace runtime_test {

__global__ void scale_kernel(float* to, const float* from, float a, float b) {
    to[threadIdx.x] = a * from[threadIdx.x] + b;
}

void scale(cudaStream_t stream, float* to, const float* from, float a, float b, unsigned n) {
    llmc::cuda::launch({.chip = llmc::cuda::sm_80, .stream = stream}, scale_kernel, 1, n, 0, to, from, a, b);
}

namespace {

const std::vector<float> ones(8, 1.0f);

bool all_are(const float* data, float value) { return std::vector(data, data + 8) == std::vector(8, value); }

TEST(Streams, work_runs_when_the_host_waits_and_not_before) {
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8);
        PinnedArray<float> host(8);
        x.upload(ones);
        const Stream stream;
        scale(stream, x.data, x.data, 2, 0);
        must(cudaMemcpyAsync(host.data, x.data, x.bytes, cudaMemcpyDeviceToHost, stream));
        const bool late = host.data[0] != 2;
        stream.synchronize();
        return late && all_are(host.data, 2);
    }));
}

TEST(Streams, a_kernel_of_the_null_stream_runs_at_once) {
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8), y(8);
        x.upload(ones);
        const Stream waits(cudaStreamDefault);
        scale(waits, y.data, x.data, 5, 0);
        scale(nullptr, x.data, y.data, 2, 1);
        return x.download() == std::vector<float>(8, 11);
    }));
}

TEST(Streams, work_of_a_stream_runs_in_its_order) {
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8);
        const Stream stream;
        must(cudaMemcpyAsync(x.data, ones.data(), x.bytes, cudaMemcpyHostToDevice, stream));
        for (int i = 0; i < 5; ++i) scale(stream, x.data, x.data, 3, static_cast<float>(i));
        must(cudaMemsetAsync(x.data, 0, 4, stream));
        scale(stream, x.data, x.data, 1, 1);
        stream.synchronize();
        // 3^5 + 3^3 + 2 3^2 + 3 3 + 4 + 1
        return x.download() == std::vector<float>{1, 302, 302, 302, 302, 302, 302, 302};
    }));
}

// Correct with `right`; otherwise without the wait.
bool consumer(bool right) {
    DeviceArray<float> x(8), y(8);
    x.upload(ones);
    const Stream producer, other;
    const Event ready;
    for (int i = 0; i < 20; ++i) scale(producer, x.data, x.data, 1, 1);
    producer.record(ready);
    if (right) other.wait(ready);
    scale(other, y.data, x.data, 1, 0);
    must(cudaDeviceSynchronize());
    return y.download() == std::vector<float>(8, 21);
}

TEST(Streams, a_missing_event_wait_shows) {
    EXPECT_TRUE(is_right_in_any_order([] { return consumer(true); }));
    EXPECT_TRUE(goes_wrong_in_some_order([] { return consumer(false); }));
}

// New contents of a buffer must wait until the other stream has read the old contents.
bool reuse(bool right) {
    DeviceArray<float> x(8), y(8);
    x.upload(ones);
    const Stream stream, other;
    const Event written, read;
    scale(stream, x.data, x.data, 1, 1);
    stream.record(written);
    other.wait(written);
    scale(other, y.data, x.data, 1, 0);
    other.record(read);
    for (int i = 0; i < 20; ++i) scale(stream, y.data + 0, y.data, 1, 0);
    if (right) stream.wait(read);
    scale(stream, x.data, x.data, 0, 7);
    stream.synchronize();
    other.synchronize();
    return y.download() == std::vector<float>(8, 2);
}

TEST(Streams, a_buffer_that_is_used_again_before_its_event_shows) {
    EXPECT_TRUE(is_right_in_any_order([] { return reuse(true); }));
    EXPECT_TRUE(goes_wrong_in_some_order([] { return reuse(false); }));
}

bool staging(bool pinned, bool waits) {
    DeviceArray<float> x(16);
    PinnedArray<float> pinned_memory(8);
    std::vector<float> pageable_memory(8);
    float* const host = pinned ? pinned_memory.data : pageable_memory.data();
    const Stream stream;
    const Event uploaded;
    for (std::size_t batch = 0; batch < 2; ++batch) {
        if (batch > 0 && waits) must(cudaEventSynchronize(uploaded));
        std::fill_n(host, 8, static_cast<float>(batch));
        must(cudaMemcpyAsync(x.data + batch * 8, host, 32, cudaMemcpyHostToDevice, stream));
        stream.record(uploaded);
    }
    stream.synchronize();
    const std::vector<float> result = x.download();
    return all_are(result.data(), 0) && all_are(result.data() + 8, 1);
}

TEST(Streams, pinned_memory_is_read_when_the_copy_runs) {
    EXPECT_TRUE(is_right_in_any_order([] { return staging(true, true); }));
    EXPECT_TRUE(goes_wrong_in_some_order([] { return staging(true, false); }));
    EXPECT_TRUE(is_right_in_any_order([] { return staging(false, true); }));
}

TEST(Streams, a_copy_to_pageable_memory_waits_for_its_stream) {
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8);
        x.upload(ones);
        std::vector<float> host(8);
        const Stream stream;
        scale(stream, x.data, x.data, 5, 0);
        must(cudaMemcpyAsync(host.data(), x.data, x.bytes, cudaMemcpyDeviceToHost, stream));
        return all_are(host.data(), 5);
    }));
}

TEST(Streams, a_kernel_in_the_wrong_stream_shows) {
    const auto step = [](bool right) {
        DeviceArray<float> x(8);
        x.upload(ones);
        const Stream stream, wrong_one;
        scale(stream, x.data, x.data, 1, 1);
        scale(right ? stream : wrong_one, x.data, x.data, 2, 0);
        scale(stream, x.data, x.data, 1, 1);
        stream.synchronize();
        wrong_one.synchronize();
        return x.download() == std::vector<float>(8, 5);
    };
    EXPECT_TRUE(is_right_in_any_order([&] { return step(true); }));
    EXPECT_TRUE(goes_wrong_in_some_order([&] { return step(false); }));
}

// If the wait were for the event's next record, the two streams would wait for each other.
TEST(Streams, a_wait_is_for_the_latest_record_before_it) {
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8);
        x.upload(ones);
        const Stream a, b;
        const Event event, back;
        scale(a, x.data, x.data, 1, 1);
        a.record(event);
        b.wait(event);
        scale(b, x.data, x.data, 3, 0);
        b.record(back);
        a.wait(back);
        scale(a, x.data, x.data, 1, 1);
        a.record(event);
        b.synchronize();
        must(cudaEventSynchronize(event));
        return x.download() == std::vector<float>(8, 7);
    }));
}

TEST(Streams, a_wait_for_an_event_never_recorded_is_none) {
    EXPECT_TRUE(is_right_in_any_order([] {
        const Stream stream;
        const Event never;
        stream.wait(never);
        stream.synchronize();
        must(cudaEventSynchronize(never));
        return cudaEventQuery(never) == cudaSuccess;
    }));
}

// Work of a stream with these flags, then a copy in the null stream. The copy waits only if the stream is a
// blocking one.
bool null_stream(unsigned flags) {
    DeviceArray<float> x(8);
    x.upload(ones);
    const Stream stream(flags);
    for (int i = 0; i < 4; ++i) scale(stream, x.data, x.data, 1, 1);
    const bool right = x.download() == std::vector<float>(8, 5);
    must(cudaDeviceSynchronize());
    return right;
}

TEST(Streams, the_null_stream_waits_for_blocking_streams_only) {
    EXPECT_TRUE(is_right_in_any_order([] { return null_stream(cudaStreamDefault); }));
    EXPECT_TRUE(goes_wrong_in_some_order([] { return null_stream(cudaStreamNonBlocking); }));
}

TEST(Streams, a_query_says_not_ready_and_goes_on) {
    EXPECT_TRUE(is_right_in_any_order([] {
        DeviceArray<float> x(8);
        x.upload(ones);
        const Stream stream;
        const Event done;
        for (int i = 0; i < 4; ++i) scale(stream, x.data, x.data, 1, 1);
        stream.record(done);
        const bool first =
            cudaEventQuery(done) == cudaErrorNotReady && cudaStreamQuery(stream) == cudaErrorNotReady;
        while (cudaEventQuery(done) == cudaErrorNotReady) {
        }
        const bool noted = is_last_error(cudaSuccess);
        return first && noted && cudaStreamQuery(stream) == cudaSuccess;
    }));
}

TEST(Streams, host_functions_run_in_their_stream_and_may_not_call) {
    EXPECT_TRUE(is_right_in_any_order([] {
        struct Seen {
            const float* data;
            float value;
            cudaError_t error;
        };
        PinnedArray<float> host(8);
        DeviceArray<float> x(8);
        x.upload(ones);
        const Stream stream;
        Seen seen{host.data, 0, cudaSuccess};
        must(cudaMemcpyAsync(host.data, x.data, x.bytes, cudaMemcpyDeviceToHost, stream));
        const auto look = [](void* data) {
            auto* s = static_cast<Seen*>(data);
            s->value = s->data[3];
            s->error = cudaDeviceSynchronize();
        };
        must(cudaLaunchHostFunc(stream, look, &seen));
        const bool late = seen.value == 0;
        stream.synchronize();
        return late && seen.value == 1 && seen.error == cudaErrorNotPermitted;
    }));
}

TEST(Streams, times_are_those_at_which_the_records_ran) {
    EXPECT_TRUE(is_right_in_any_order([] {
        using namespace std::chrono_literals;
        const Stream stream;
        const Event start(cudaEventDefault), end(cudaEventDefault), without_time;
        stream.record(start);
        must(cudaLaunchHostFunc(
            stream, [](void*) { std::this_thread::sleep_for(5ms); }, nullptr));
        stream.record(end);
        stream.record(without_time);
        float milliseconds = 0;
        const bool early = cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady;
        stream.synchronize();
        must(cudaEventElapsedTime(&milliseconds, start, end));
        return early && milliseconds >= 5 &&
               cudaEventElapsedTime(&milliseconds, start, without_time) == cudaErrorInvalidResourceHandle;
    }));
}

}  // namespace
}  // namespace runtime_test
