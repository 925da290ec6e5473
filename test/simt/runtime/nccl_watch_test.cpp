// The watchdog of a job whose ranks wait for their GPUs (nccl_communicator.cpp). A step that takes longer
// than the time limit ends the job only if it reaches no event within the limit.
// (test_simulated_gpu_errors.py tests ranks that are gone or stopped.)
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <thread>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/nccl/nccl_communicator.h"
#include "llmc/device/cuda/cuda_streams.h"
#include "simt/runtime/nccl_ranks.h"

namespace runtime_test {
namespace {

constexpr auto limit = std::chrono::seconds(2);
constexpr auto piece = std::chrono::milliseconds(50);
constexpr int pieces = 100;

// Below the ports that the system assigns to connections, so that it stays free.
std::string free_port() {
    std::random_device random;
    while (true) {
        const auto port = static_cast<std::uint16_t>(20000 + random() % 12000);
        const int made = socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        const bool is_free = bind(made, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
        close(made);
        if (is_free) return std::to_string(port);
    }
}

// Two ranks wait for their GPUs for longer than the limit, with an event after each piece of work or without
// events.
std::vector<Outcome> wait_for_gpus(bool with_events) {
    const Environment variables = {
        {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", free_port()}};
    return run_ranks(
        2,
        [&](int rank) {
            setenv("RANK", std::to_string(rank).c_str(), 1);
            llmc::Job job({.timeout = limit});
            llmc::cuda::CudaStreams streams;
            const auto nccl = llmc::make_nccl_communicator(job.world(), streams, false);
            for (int i = 0; i < pieces; ++i) {
                must(cudaLaunchHostFunc(
                    streams.selected(), [](void*) { std::this_thread::sleep_for(piece); }, nullptr));
                if (with_events) streams.record(streams.new_event());
            }
            streams.finish();
            return true;
        },
        variables);
}

TEST(NcclWatch, a_gpu_that_is_slow_is_waited_for) {
    for (const Outcome& outcome : wait_for_gpus(true)) EXPECT_TRUE(outcome.good()) << outcome;
}

TEST(NcclWatch, a_gpu_that_comes_no_further_ends_the_job) {
    std::string said;
    for (const Outcome& outcome : wait_for_gpus(false)) {
        EXPECT_FALSE(outcome.good()) << outcome;
        said += outcome.errors;
    }
    EXPECT_NE(said.find("waited 2 s in the GPU's work for rank"), std::string::npos) << said;
}

}  // namespace
}  // namespace runtime_test
