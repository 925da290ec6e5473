// The CUDA device's queues: which goes before which, and what watches are told while the host waits for long. (What the
// queues do for steps is tested with whole trainings.)
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#include "llmc/device/cuda/cuda_queues.h"
#include "simt/runtime/child.h"

namespace runtime_test {
namespace {

using llmc::cuda::CudaQueues;
using llmc::cuda::HostWait;

// What a watch is told, and how many marks it finds reached.
struct Told {
    std::vector<HostWait> waits;
    std::vector<std::ptrdiff_t> reached;
};

// Of a wait for so many pieces of work, of 5 ms each, with a mark behind each.
Told told_in_wait(int pieces) {
    CudaQueues queues;
    Told told;
    const int watch = queues.add_watch([&](HostWait wait) {
        told.waits.push_back(wait);
        told.reached.push_back(queues.count_reached());
    });
    for (int i = 0; i < pieces; ++i) {
        must(cudaLaunchHostFunc(
            queues.selected(), [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); },
            nullptr));
        queues.set(queues.new_mark());
    }
    queues.finish();
    queues.remove_watch(watch);
    return told;
}

TEST(Queues, communication_and_copies_go_before_kernels) {
    EXPECT_TRUE(run_process({}, [] {
                    const CudaQueues queues;
                    const auto priority_of = [&](llmc::StreamKind kind) {
                        int priority = 0;  // the smaller, the sooner
                        must(cudaStreamGetPriority(queues.stream(kind), &priority));
                        return priority;
                    };
                    return std::ranges::all_of(llmc::all_streams, [&](llmc::StreamKind kind) {
                        return kind == llmc::StreamKind::compute ||
                               priority_of(kind) < priority_of(llmc::StreamKind::compute);
                    });
                }).good());
}

TEST(Queues, a_long_wait_begins_and_ends) {
    EXPECT_TRUE(run_process({}, [] {
                    const std::vector<HostWait> told = told_in_wait(50).waits;
                    return told.size() >= 2 && told.front() == HostWait::begins &&
                           told.back() == HostWait::ends &&
                           std::all_of(told.begin() + 1, told.end() - 1,
                                       [](HostWait wait) { return wait == HostWait::goes_on; });
                }).good());
}

TEST(Queues, marks_are_reached_one_after_the_other) {
    EXPECT_TRUE(run_process({}, [] {
                    const std::vector<std::ptrdiff_t> reached = told_in_wait(50).reached;
                    return std::ranges::is_sorted(reached) && reached.front() < 50 && reached.back() == 51;
                }).good());
}

TEST(Queues, a_short_wait_is_nobodys_business) {
    EXPECT_TRUE(run_process({}, [] { return told_in_wait(0).waits.empty(); }).good());
}

}  // namespace
}  // namespace runtime_test
