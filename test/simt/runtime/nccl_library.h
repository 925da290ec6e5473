// What the parts of the tests' NCCL share: communicators, and how its functions are entered.
//   nccl_communicators.cpp  how communicators come and go
//   nccl_calls.cpp          what is queued in streams
//   nccl_operation.h        what becomes of it when it runs
#pragma once

#include <nccl.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "simt/runtime/nccl_mesh.h"
#include "simt/runtime/runtime.h"

struct ncclComm {
    int rank = 0, size = 1, device = 0;
    bool blocks = true;
    std::string id;  // its splits are named after it
    std::vector<simt::runtime::Socket> sockets;
    std::vector<std::uint64_t> processes;  // by rank

    std::uint64_t issued = 0, done = 0;  // operations
    int splits = 0;
    bool aborted = false, destroyed = false;
    ncclResult_t error = ncclSuccess;
    std::string last_error;
    // What is under way where it does not block: true when it is done.
    std::function<bool()> under_way = nullptr;
};

namespace simt::runtime {

struct Library {
    std::vector<std::unique_ptr<ncclComm>> communicators;  // kept, so that a destroyed one is known
    // By process: collectives issued with it.
    std::map<std::uint64_t, std::uint64_t> collectives_with;
    const std::uint64_t process;  // a number of its own
    std::string last_error;
};
Library& library();

// Answers `result`, and has `why` for who asks.
ncclResult_t refuse(ncclResult_t result, const std::string& why);
// What the handle is of. A destroyed one ends the process.
ncclComm& checked(ncclComm_t handle);

// Runs the body of an API function that answers an ncclResult_t. `from_host`: the program's own thread goes on with its
// work, as opposed to one that watches.
template <class Body>
ncclResult_t nccl_call(const Body& body, bool from_host = true) {
    Runtime& r = runtime();
    const std::lock_guard one_at_a_time(r.mutex);
    if (from_host) r.streams.host_is_here();
    if (from_host && (r.settings.gpus == 0 || r.fault() != cudaSuccess)) {
        return refuse(ncclUnhandledCudaError, "CUDA failed before");
    }
    const ncclResult_t result = body(r);
    if (from_host) r.streams.host_is_here();
    return result;
}

}  // namespace simt::runtime
