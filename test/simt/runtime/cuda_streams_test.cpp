// The CUDA device's streams: their priorities, and what watches are told while the host waits for a long
// time. (Whole trainings test the streams' work in steps.)
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include "llmc/device/cuda/cuda_streams.h"
#include "simt/runtime/child.h"

namespace runtime_test {
namespace {

using llmc::cuda::CudaStreams;
using llmc::cuda::HostWait;

// The waits that a watch is told of, and the number of events that it finds reached.
struct Told {
    std::vector<HostWait> waits;
    std::vector<std::ptrdiff_t> reached;
};

// A wait for this many pieces of work, of 5 ms each, with an event after each.
Told watch_a_wait(int pieces) {
    CudaStreams streams;
    Told told;
    const int watch = streams.add_watch([&](HostWait wait) {
        told.waits.push_back(wait);
        told.reached.push_back(streams.count_reached());
    });
    for (int i = 0; i < pieces; ++i) {
        must(cudaLaunchHostFunc(
            streams.selected(), [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); },
            nullptr));
        streams.record(streams.new_event());
    }
    streams.finish();
    streams.remove_watch(watch);
    return told;
}

TEST(CudaStreams, communication_and_copies_go_before_kernels) {
    EXPECT_TRUE(run_process({}, [] {
                    const CudaStreams streams;
                    const auto priority_of = [&](llmc::StreamKind kind) {
                        int priority = 0;  // a smaller number runs sooner
                        must(cudaStreamGetPriority(streams.stream(kind), &priority));
                        return priority;
                    };
                    return std::ranges::all_of(llmc::device_streams, [&](llmc::StreamKind kind) {
                        return kind == llmc::StreamKind::compute ||
                               priority_of(kind) < priority_of(llmc::StreamKind::compute);
                    });
                }).good());
}

TEST(CudaStreams, a_long_wait_begins_and_ends) {
    EXPECT_TRUE(run_process({}, [] {
                    const std::vector<HostWait> told = watch_a_wait(50).waits;
                    return told.size() >= 2 && told.front() == HostWait::begins &&
                           told.back() == HostWait::ends &&
                           std::all_of(told.begin() + 1, told.end() - 1,
                                       [](HostWait wait) { return wait == HostWait::goes_on; });
                }).good());
}

TEST(CudaStreams, events_are_reached_one_after_the_other) {
    // The last event, 51, is the one that CudaStreams records itself after the 50 of the pieces.
    EXPECT_TRUE(run_process({}, [] {
                    const std::vector<std::ptrdiff_t> reached = watch_a_wait(50).reached;
                    return std::ranges::is_sorted(reached) && reached.front() < 50 && reached.back() == 51;
                }).good());
}

TEST(CudaStreams, watches_are_not_told_of_a_short_wait) {
    EXPECT_TRUE(run_process({}, [] { return watch_a_wait(0).waits.empty(); }).good());
}

}  // namespace
}  // namespace runtime_test
