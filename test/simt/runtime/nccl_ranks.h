// Shared by the tests of NCCL: ranks as processes, and their communicators.
#pragma once

#include <nccl.h>

#include <cstdlib>

#include "simt/runtime/device_memory.h"

namespace runtime_test {

inline void must(ncclResult_t result) {
    if (result == ncclSuccess) return;
    std::fprintf(stderr, "%s: %s\n", ncclGetErrorString(result), ncclGetLastError(nullptr));
    std::exit(1);
}

class Communicator {
  public:
    explicit Communicator(ncclComm_t handle) : handle_(handle) {}
    Communicator(const ncclUniqueId& id, int size, int rank) {
        must(ncclCommInitRank(&handle_, size, id, rank));
    }
    ~Communicator() {
        if (handle_) must(ncclCommDestroy(handle_));
    }
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    operator ncclComm_t() const { return handle_; }
    Communicator split(int color, int key) const {
        ncclComm_t made = nullptr;
        must(ncclCommSplit(handle_, color, key, &made, nullptr));
        return Communicator(made);
    }

  private:
    ncclComm_t handle_ = nullptr;
};

inline ncclUniqueId new_id() {
    ncclUniqueId id;
    must(ncclGetUniqueId(&id));
    return id;
}

// Each rank has its own device and its own random order.
inline std::vector<Outcome> run_ranks(int size, const std::function<bool(int rank)>& body,
                                      Environment environment = {}) {
    environment.try_emplace("SIMT_GPUS", "8");
    return run_processes(size, environment, [&](int rank) {
        if (environment.contains("SIMT_SEED")) {
            const std::string seed = environment.at("SIMT_SEED") + std::to_string(rank + 1);
            setenv("SIMT_SEED", seed.c_str(), 1);
        }
        must(cudaSetDevice(environment.at("SIMT_GPUS") == "1" ? 0 : rank));
        return body(rank);
    });
}

}  // namespace runtime_test
