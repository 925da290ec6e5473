#include "llmc/device/cuda/cuda_streams.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace llmc::cuda {

CudaStreams::CudaStreams() {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    // Communication and copies need few of the GPU's resources, and other work waits for them.
    for (const StreamKind kind : device_streams) {
        const int priority = kind == StreamKind::compute ? least : greatest;
        streams_[static_cast<std::size_t>(kind)] = std::make_unique<StreamOwner>(priority);
    }
    finished_ = new_event();
}

int CudaStreams::add_event(bool has_time) {
    events_.push_back(std::make_unique<EventOwner>(has_time));
    return static_cast<int>(events_.size()) - 1;
}

void CudaStreams::record(int event) {
    check_cuda(cudaEventRecord(native(event), selected()), "cudaEventRecord");
}

void CudaStreams::wait(int event) {
    check_cuda(cudaStreamWaitEvent(selected(), native(event), 0), "cudaStreamWaitEvent");
}

void CudaStreams::wait_on_host(int event) { check_cuda(reach(event), "waiting for the GPU"); }

// Polls, since a wait inside CUDA for a collective whose peer is gone would never end.
cudaError_t CudaStreams::reach(int event) {
    using Clock = std::chrono::steady_clock;
    using Seconds = std::chrono::duration<double>;
    constexpr Seconds spin{2e-3};  // longer waits leave the core to others
    constexpr std::chrono::microseconds nap{20};
    constexpr Seconds between_watches{0.05};
    const auto start = Clock::now();
    auto watched = start;
    while (true) {
        const cudaError_t state = cudaEventQuery(native(event));
        if (state != cudaErrorNotReady) {
            if (watched != start) call_watches(HostWait::ends);
            return state;
        }
        const auto now = Clock::now();
        if (now - start < spin) continue;
        std::this_thread::sleep_for(nap);
        if (now - watched < between_watches) continue;
        call_watches(watched == start ? HostWait::begins : HostWait::goes_on);
        watched = now;
    }
}

std::ptrdiff_t CudaStreams::count_reached() const {
    return std::ranges::count_if(
        events_, [](const auto& event) { return cudaEventQuery(event->get()) == cudaSuccess; });
}

void CudaStreams::call_watches(HostWait wait) const {
    for (const auto& [number, watch] : watches_) watch(wait);
}

int CudaStreams::add_watch(Watch watch) {
    const int number = watches_.empty() ? 0 : watches_.rbegin()->first + 1;
    watches_[number] = std::move(watch);
    return number;
}

cudaError_t CudaStreams::wait_until_empty() {
    const cudaError_t error = cudaEventRecord(native(finished_), selected());
    return error == cudaSuccess ? reach(finished_) : error;
}

void CudaStreams::finish() { check_cuda(wait_until_empty(), "waiting for the GPU"); }

void CudaStreams::finish_all() {
    const StreamKind before = selected_;
    for (const StreamKind kind : device_streams) {
        select(kind);
        finish();
    }
    select(before);
}

double CudaStreams::milliseconds(int from, int to) {
    float elapsed = 0;
    check_cuda(cudaEventElapsedTime(&elapsed, native(from), native(to)), "cudaEventElapsedTime");
    return elapsed;
}

}  // namespace llmc::cuda
