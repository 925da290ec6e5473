// Shared by the parts of the tests' NCCL: communicators, and the entry of its functions.
//   nccl_communicators.cpp  creation and end of communicators
//   nccl_calls.cpp          the calls that are queued in streams
//   nccl_operation.h        the execution of these calls
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
    int blocks_of_kernels = 32;  // ncclConfig_t::maxCTAs, or NCCL_MAX_CTAS
    std::string id;              // the ids of its splits derive from it
    std::vector<simt::runtime::Socket> sockets;
    std::vector<std::uint64_t> processes;  // by rank

    std::uint64_t issued = 0, done = 0;  // operations
    int splits = 0;
    bool aborted = false, destroyed = false;
    ncclResult_t error = ncclSuccess;
    std::string last_error;
    // The unfinished call, if the communicator does not block. It returns true when it is done.
    std::function<bool()> in_flight = nullptr;
};

namespace simt::runtime {

struct Library {
    std::vector<std::unique_ptr<ncclComm>> communicators;  // kept, so that the use of a destroyed one is
                                                           // detected
    // By process: the number of collectives issued with it.
    std::map<std::uint64_t, std::uint64_t> collectives_with;
    const std::uint64_t process;  // a unique number
    std::string last_error;
};
Library& library();

// Returns `result`, and keeps `why` as the last error.
ncclResult_t refuse(ncclResult_t result, const std::string& why);
// The communicator of the handle. A destroyed one ends the process.
ncclComm& checked(ncclComm_t handle);

// Runs the body of an API function that returns an ncclResult_t. `from_host`: the call is part of the
// program's own work, not of a watching thread.
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
