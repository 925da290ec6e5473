#include "llmc/device/cuda/cuda_queues.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace llmc::cuda {

CudaQueues::CudaQueues() {
    int least = 0, greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    // Communication and copies take few of the GPU's resources, and others wait for them.
    for (const StreamKind kind : all_streams) {
        const int priority = kind == StreamKind::compute ? least : greatest;
        streams_[static_cast<std::size_t>(kind)] = std::make_unique<StreamOwner>(priority);
    }
    finished_ = new_mark();
}

int CudaQueues::new_mark() {
    marks_.push_back(std::make_unique<EventOwner>());
    return static_cast<int>(marks_.size()) - 1;
}

void CudaQueues::set(int mark) { check_cuda(cudaEventRecord(event(mark), selected()), "cudaEventRecord"); }

void CudaQueues::wait(int mark) {
    check_cuda(cudaStreamWaitEvent(selected(), event(mark), 0), "cudaStreamWaitEvent");
}

void CudaQueues::wait_on_host(int mark) { check_cuda(reach(mark), "waiting for the GPU"); }

// By polling: a wait inside CUDA for a collective whose peer is gone would not end.
cudaError_t CudaQueues::reach(int mark) {
    using Clock = std::chrono::steady_clock;
    using Seconds = std::chrono::duration<double>;
    constexpr Seconds spin{2e-3};  // longer waits leave the core to others
    constexpr std::chrono::microseconds nap{20};
    constexpr Seconds between_watches{0.05};
    const auto start = Clock::now();
    auto watched = start;
    while (true) {
        const cudaError_t state = cudaEventQuery(event(mark));
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

std::ptrdiff_t CudaQueues::count_reached() const {
    return std::ranges::count_if(marks_,
                                 [](const auto& mark) { return cudaEventQuery(mark->get()) == cudaSuccess; });
}

void CudaQueues::call_watches(HostWait wait) const {
    for (const auto& [number, watch] : watches_) watch(wait);
}

int CudaQueues::add_watch(Watch watch) {
    const int number = watches_.empty() ? 0 : watches_.rbegin()->first + 1;
    watches_[number] = std::move(watch);
    return number;
}

cudaError_t CudaQueues::wait_until_empty() {
    const cudaError_t error = cudaEventRecord(event(finished_), selected());
    return error == cudaSuccess ? reach(finished_) : error;
}

void CudaQueues::finish() { check_cuda(wait_until_empty(), "waiting for the GPU"); }

void CudaQueues::finish_all() {
    const StreamKind before = selected_;
    for (const StreamKind kind : all_streams) {
        select(kind);
        finish();
    }
    select(before);
}

double CudaQueues::milliseconds(int from, int to) {
    float elapsed = 0;
    check_cuda(cudaEventElapsedTime(&elapsed, event(from), event(to)), "cudaEventElapsedTime");
    return elapsed;
}

}  // namespace llmc::cuda
