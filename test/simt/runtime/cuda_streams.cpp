// CUDA's functions for streams and events.
#include <chrono>

#include "simt/runtime/runtime.h"

namespace {

using namespace simt::runtime;

cudaError_t create_stream(cudaStream_t* stream, unsigned flags, int priority) {
    return api_call([&](Runtime& r) {
        if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) return cudaErrorInvalidValue;
        *stream = r.streams.create(current_device(), flags == cudaStreamDefault, priority);
        return cudaSuccess;
    });
}

// The result of a wait. If the work that the host ran found a fault, api_call returns it.
template <class Wait>
cudaError_t waited(const Wait& wait) {
    return api_call([&](Runtime& r) {
        wait(r.streams);
        return cudaSuccess;
    });
}

}  // namespace

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create_stream(stream, cudaStreamDefault, 0); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return create_stream(stream, flags, 0);
}

// A priority in the range is accepted and ignored: every order must be correct.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
    return create_stream(stream, flags, priority);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    return api_call([&](const Runtime&) {
        if (least) *least = 0;
        if (greatest) *greatest = -5;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
    return api_call([&](Runtime& r) {
        *priority = r.streams.get(stream).priority;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    return api_call([&](Runtime& r) {
        if (stream == nullptr) return cudaErrorInvalidResourceHandle;
        r.streams.destroy(stream);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return waited([&](Streams& streams) { streams.synchronize(stream, "cudaStreamSynchronize"); });
}

cudaError_t cudaDeviceSynchronize() {
    return waited([](Streams& streams) { streams.synchronize_all("cudaDeviceSynchronize"); });
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return api_call([&](Runtime& r) { return r.streams.query(stream) ? cudaSuccess : cudaErrorNotReady; });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return api_call([&](Runtime& r) {
        if (flags != cudaEventWaitDefault) return cudaErrorInvalidValue;
        r.streams.wait(stream, event);
        return cudaSuccess;
    });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return api_call([&](Runtime& r) {
        r.streams.add(stream, "cudaLaunchHostFunc", [=, &memory = r.memory] {
            memory.end_work();
            memory.close();
            function(data);
            return true;
        });
        return cudaSuccess;
    });
}

// ---- events ----

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    return api_call([&](Runtime& r) {
        *event = r.streams.create_event(flags);
        return cudaSuccess;
    });
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return api_call([&](Runtime& r) {
        r.streams.destroy_event(event);
        return cudaSuccess;
    });
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    return api_call([&](Runtime& r) {
        r.streams.record(event, stream);
        return cudaSuccess;
    });
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
    return api_call(
        [&](Runtime& r) { return r.streams.query_event(event) ? cudaSuccess : cudaErrorNotReady; });
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    return waited([&](Streams& streams) { streams.synchronize_event(event, "cudaEventSynchronize"); });
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
    return api_call([&](Runtime& r) {
        const CUevent_st* events[] = {&r.streams.get_event(start), &r.streams.get_event(end)};
        for (const CUevent_st* event : events) {
            if ((event->flags & cudaEventDisableTiming) || !event->latest)
                return cudaErrorInvalidResourceHandle;
        }
        if (!events[0]->latest->done || !events[1]->latest->done) return cudaErrorNotReady;
        *milliseconds =
            std::chrono::duration<float, std::milli>(events[1]->latest->time - events[0]->latest->time)
                .count();
        return cudaSuccess;
    });
}
