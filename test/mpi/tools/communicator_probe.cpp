// For test/python/test_communicator.py: a job that does one thing with the communicator.
//
//   communicator_probe traffic DIRECTORY
//       every call in several sizes; each rank writes the bytes it counted as sent to DIRECTORY/counted.RANK
//   communicator_probe faults CALL RANK FAULT SECONDS
//       all ranks make CALL a few times, with a time limit of SECONDS; in the middle, RANK has the fault:
//       sleep (for ever), stop, kill, pause (for three quarters of the limit), differ (it makes another
//       call); relapse (rank 0 pauses, and later RANK stops)
//   communicator_probe fail one|all
//       one rank or all end the job with an error
//   communicator_probe world
//       each rank prints its place on the machine

#include <fmt/format.h>
#include <fmt/os.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "llmc/comm/bootstrap.h"
#include "llmc/comm/launcher.h"

using namespace llmc;

namespace {

Tensor tensor_of(std::vector<float>& values) {
    return {
        reinterpret_cast<std::byte*>(values.data()), DType::fp32, {static_cast<std::int64_t>(values.size())}};
}

std::uint64_t bytes_sent(const Communicator& communicator) {
    std::uint64_t bytes = 0;
    for (const CallKind kind : all_call_kinds)
        if (kind != CallKind::recv) bytes += communicator.traffic(kind).bytes;
    return bytes;
}

// Passes x around the ring of ranks.
void ring(Communicator& communicator, const Tensor& x, const Tensor& from_previous) {
    const int size = communicator.size();
    if (size == 1) return;
    communicator.group_begin();
    communicator.send(x, (communicator.rank() + 1) % size);
    communicator.recv(from_previous, (communicator.rank() + size - 1) % size);
    communicator.group_end();
}

void use_all(Communicator& communicator, std::int64_t part) {
    std::vector<float> x(static_cast<std::size_t>(part * communicator.size()));
    std::vector<float> y(static_cast<std::size_t>(part));
    const Tensor whole = tensor_of(x);
    communicator.reduce_scatter(tensor_of(y), whole);
    communicator.all_gather(whole, tensor_of(y));
    communicator.all_reduce(whole);
    communicator.all_reduce(whole.flat(0, communicator.size() - 1));
    communicator.broadcast(whole, communicator.size() - 1);
    ring(communicator, whole.flat(0, part), tensor_of(y));
    communicator.barrier();
}

void count_traffic(Job& job, const std::string& directory) {
    HostCommunicator& world = job.world();
    std::vector<float> staging(HostCommunicator::staging_bytes(world.size()) / sizeof(float));
    world.set_staging(tensor_of(staging));
    const auto group = world.split(world.rank() % 2, -world.rank());
    // Short messages, which are sent at once, and longer ones, which need other protocols and several chunks.
    for (const std::int64_t part : {1, 77, 3001, 300007}) {
        use_all(world, part);
        use_all(*group, part);
    }
    fmt::output_file(fmt::format("{}/counted.{}", directory, world.rank()))
        .print("{}", bytes_sent(world) + bytes_sent(*group));
}

void call_once(Communicator& communicator, std::string_view call, const Tensor& x) {
    const Tensor own = x.flat(communicator.rank() * 4, 4);
    if (call == "all_reduce") communicator.all_reduce(x);
    if (call == "reduce_scatter") communicator.reduce_scatter(own, x);
    if (call == "all_gather") communicator.all_gather(x, own);
    if (call == "barrier") communicator.barrier();
    if (call == "ring") {
        std::vector<float> other(4);
        ring(communicator, own, tensor_of(other));
    }
}

void repeat_with_fault(Job& job, std::string_view call, int faulty_rank, std::string_view fault,
                       double seconds) {
    HostCommunicator& world = job.world();
    world.set_timeout(Seconds(seconds));
    std::vector<float> x(static_cast<std::size_t>(4 * world.size()));
    // In a ring, each rank can be one call ahead of its neighbour. There are enough calls that no rank
    // finishes.
    for (int i = 0; i < 5 + world.size(); ++i) {
        std::string_view made = call;
        if (i == 1 && world.rank() == 0 && fault == "relapse")
            std::this_thread::sleep_for(Seconds(0.75 * seconds));
        if (i == 3 && world.rank() == faulty_rank) {
            if (fault == "sleep") std::this_thread::sleep_for(std::chrono::hours(1));
            if (fault == "stop") raise(SIGSTOP);
            if (fault == "kill") raise(SIGKILL);
            if (fault == "pause") std::this_thread::sleep_for(Seconds(0.75 * seconds));
            if (fault == "relapse") raise(SIGSTOP);
            if (fault == "differ") made = call == "barrier" ? "all_reduce" : "barrier";
        }
        call_once(world, made, tensor_of(x));
    }
}

void run(Job& job, std::span<char*> arguments) {
    const std::string_view action = arguments[1];
    if (action == "traffic") count_traffic(job, arguments[2]);
    if (action == "faults")
        repeat_with_fault(job, arguments[2], std::stoi(arguments[3]), arguments[4], std::stod(arguments[5]));
    if (action == "fail") {
        if (std::string_view(arguments[2]) == "all" || job.world().rank() == job.world().size() - 1)
            user_error("--heads 12 does not divide --channels 800");
        job.world().barrier();
    }
    if (action == "world")
        fmt::print("{} of {}: {} of {} here, {} cores\n", job.world().rank(), job.world().size(),
                   job.local_rank(), job.local_size(), job.cores());
}

}  // namespace

int main(int argc, char** argv) {
    if (const auto status = launch_processes(argc, argv)) return *status;
    accept_stop_signals();  // ends this program, which does not handle it
    Job job;
    try {
        run(job, {argv, static_cast<std::size_t>(argc)});
    } catch (const std::exception& error) {
        job.fail(error.what());
    }
    return 0;
}
