// The CUDA device's queues while the host waits for them for long: what watches are told. (What the queues do for steps is
// tested with whole trainings.)
#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "llmc/device/cuda/cuda_queues.h"
#include "simt/runtime/child.h"

namespace runtime_test {
namespace {

using llmc::cuda::CudaQueues;
using llmc::cuda::HostWait;

// What a watch is told in a wait for so many pieces of work, of 5 ms each, with or without a mark behind each.
std::vector<HostWait> told_in_wait(int pieces, bool marked) {
    CudaQueues queues;
    std::vector<HostWait> told;
    const int watch = queues.add_watch([&](HostWait wait) { told.push_back(wait); });
    for (int i = 0; i < pieces; ++i) {
        must(cudaLaunchHostFunc(
            queues.selected(), [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); },
            nullptr));
        if (marked) queues.set(queues.new_mark());
    }
    queues.finish();
    queues.remove_watch(watch);
    return told;
}

TEST(Queues, a_long_wait_begins_and_ends) {
    EXPECT_TRUE(run_process({}, [] {
                    const std::vector<HostWait> told = told_in_wait(50, false);
                    return told.size() >= 2 && told.front() == HostWait::begins &&
                           told.back() == HostWait::ends &&
                           std::all_of(told.begin() + 1, told.end() - 1,
                                       [](HostWait wait) { return wait == HostWait::stands; });
                }).good());
}

TEST(Queues, marks_that_are_reached_in_a_long_wait_are_movement) {
    EXPECT_TRUE(run_process({}, [] {
                    return std::ranges::count(told_in_wait(200, true), HostWait::moves) >= 2 &&
                           std::ranges::count(told_in_wait(200, false), HostWait::moves) == 0;
                }).good());
}

TEST(Queues, a_short_wait_is_nobodys_business) {
    EXPECT_TRUE(run_process({}, [] { return told_in_wait(0, false).empty(); }).good());
}

}  // namespace
}  // namespace runtime_test
