// NCCL's communicators: their creation, their end and their state.
//
// A communicator that does not block (ncclConfig_t::blocking = 0) returns ncclInProgress, and progresses only
// when its state is queried. Before that its call is not even queued, and another call is refused.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <utility>

#include "simt/runtime/nccl_library.h"

namespace simt::runtime {

Library& library() {
    static Library& instance =
        *new Library{.communicators = {},
                     .collectives_with = {},
                     .process = (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}(),
                     .last_error = {}};
    return instance;
}

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
    library().last_error = why;
    return result;
}

ncclComm& checked(ncclComm_t handle) {
    for (const auto& communicator : library().communicators) {
        if (communicator.get() != handle) continue;
        if (communicator->destroyed) stop("an NCCL communicator was destroyed and is used");
        return *communicator;
    }
    stop("an ncclComm_t that no communicator has");
}

}  // namespace simt::runtime

namespace {

using namespace simt::runtime;
using std::chrono::steady_clock;

// Waits until `step` returns true. Other threads may make calls meanwhile.
void wait_for(Runtime& r, const std::function<bool()>& step, const std::function<std::string()>& what) {
    const auto start = steady_clock::now();
    while (!step()) {
        if (std::chrono::duration<double>(steady_clock::now() - start).count() > r.settings.nccl_seconds) {
            stop(what() + " after " + std::to_string(static_cast<int>(r.settings.nccl_seconds)) + " seconds");
        }
        r.mutex.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        r.mutex.lock();
    }
}

// Performs `step` now if the communicator blocks, and otherwise when its state is queried.
ncclResult_t perform(Runtime& r, ncclComm& communicator, std::function<bool()> step,
                     const std::string& what) {
    if (!communicator.blocks) {
        communicator.in_flight = std::move(step);
        return ncclInProgress;
    }
    wait_for(r, step, [&] {
        return "rank " + std::to_string(communicator.rank) + " of " + std::to_string(communicator.size) +
               " still waits in " + what;
    });
    return communicator.error;
}

std::uint64_t hash(const std::string& text) {
    std::uint64_t value = 14695981039346656037u;  // FNV-1a
    for (const char c : text) value = (value ^ static_cast<unsigned char>(c)) * 1099511628211u;
    return value;
}

Hello own_hello(int rank, int color, int key) {
    const char* host = std::getenv("NCCL_HOSTID");
    return {.rank = rank,
            .color = color,
            .key = key,
            .process = library().process,
            .host = hash(host ? host : "this machine"),
            .gpu = gpu_uuid(current_device())};
}

// Two ranks with the same GPU are refused, unless each claims to be a separate machine.
bool share_a_gpu(const std::vector<Hello>& hellos, std::string* who) {
    for (const Hello& a : hellos) {
        for (const Hello& b : hellos) {
            if (a.rank >= b.rank || a.host != b.host || std::memcmp(&a.gpu, &b.gpu, sizeof(a.gpu)) != 0)
                continue;
            *who = "Duplicate GPU detected: rank " + std::to_string(b.rank) + " and rank " +
                   std::to_string(a.rank);
            return true;
        }
    }
    return false;
}

// Takes the ranks of `mesh` with this color, ordered by key.
void take_members(ncclComm& communicator, Mesh& mesh, int color) {
    std::vector<Hello> members;
    for (const Hello& hello : mesh.hellos) {
        if (hello.color == color) members.push_back(hello);
    }
    std::ranges::stable_sort(members, {}, &Hello::key);
    const int own = communicator.rank;
    communicator.size = static_cast<int>(members.size());
    for (std::size_t i = 0; i < members.size(); ++i) {
        if (members[i].rank == own) communicator.rank = static_cast<int>(i);
        communicator.processes.push_back(members[i].process);
        communicator.sockets.push_back(std::move(mesh.sockets[static_cast<std::size_t>(members[i].rank)]));
    }
    std::string who;
    if (share_a_gpu(members, &who)) communicator.error = refuse(ncclInvalidUsage, who);
    // A peer may wait for work that this process has queued, while this process does something else.
    if (communicator.size > 1) runtime().streams.run_in_background();
}

// NCCL's kernels have at most 32 blocks.
int blocks_of_kernels(const ncclConfig_t* config, int otherwise) {
    const char* const given = std::getenv("NCCL_MAX_CTAS");
    const int most = given                                                ? std::atoi(given)
                     : config && config->maxCTAs != NCCL_CONFIG_UNDEF_INT ? config->maxCTAs
                                                                          : otherwise;
    return std::min(most, 32);
}

ncclComm& create(const std::string& id, int size, int rank, bool blocks, int blocks_of_kernels) {
    ncclComm& made = *library().communicators.emplace_back(std::make_unique<ncclComm>());
    made.rank = rank;
    made.size = size;
    made.device = current_device();
    made.blocks = blocks;
    made.blocks_of_kernels = blocks_of_kernels;
    made.id = id;
    runtime().add_communicator(made.device);
    return made;
}

bool is_blocking(const ncclConfig_t* config, bool otherwise) {
    return config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking != 0 : otherwise;
}

}  // namespace

// ---- the library ----

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess:
            return "no error";
        case ncclUnhandledCudaError:
            return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
        case ncclSystemError:
            return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
        case ncclInvalidArgument:
            return "invalid argument (run with NCCL_DEBUG=WARN for details)";
        case ncclInvalidUsage:
            return "invalid usage (run with NCCL_DEBUG=WARN for details)";
        case ncclRemoteError:
            return "remote process exited or there was a network error";
        case ncclInProgress:
            return "NCCL operation in progress";
        default:
            return "internal error";
    }
}

const char* ncclGetLastError(ncclComm_t handle) {
    return handle && !handle->last_error.empty() ? handle->last_error.c_str() : library().last_error.c_str();
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    std::random_device random;
    *id = {};
    std::snprintf(id->internal, sizeof(id->internal), "%08x%08x%08x", random(), random(), random());
    return ncclSuccess;
}

// ---- communicators ----

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    return nccl_call([&](Runtime& r) {
        if (size < 1 || rank < 0 || rank >= size) return refuse(ncclInvalidArgument, "no such rank");
        ncclComm& made =
            create(id.internal, size, rank, is_blocking(config, true), blocks_of_kernels(config, 32));
        const auto mesh = std::make_shared<Mesh>(made.id, own_hello(rank, 0, rank), size);
        *handle = &made;
        const auto connect = [&made, mesh] {
            if (!mesh->connect()) return false;
            take_members(made, *mesh, 0);
            return true;
        };
        return perform(r, made, connect, "ncclCommInitRank");
    });
}

ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(handle, size, id, rank, nullptr);
}

ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
    return nccl_call([&](Runtime& r) {
        ncclComm& parent = checked(handle);
        if (parent.in_flight)
            return refuse(ncclInvalidArgument, "the communicator's last call is still in progress");
        char id[17];
        const std::string path = parent.id + "/" + std::to_string(parent.splits++);
        std::snprintf(id, sizeof(id), "%016llx", static_cast<unsigned long long>(hash(path)));
        const auto mesh = std::make_shared<Mesh>(id, own_hello(parent.rank, color, key), parent.size);
        *made = nullptr;
        // The parent is in progress. The new communicator is known when the call has succeeded.
        const auto connect = [&parent, mesh, color, made, config_blocks = is_blocking(config, parent.blocks),
                              of_kernels = blocks_of_kernels(config, parent.blocks_of_kernels)] {
            if (!mesh->connect()) return false;
            if (color == NCCL_SPLIT_NOCOLOR) return true;
            ncclComm& child = create(mesh->id(), parent.size, parent.rank, config_blocks, of_kernels);
            take_members(child, *mesh, color);
            *made = &child;
            return true;
        };
        return perform(r, parent, connect, "ncclCommSplit");
    });
}

// Waits until all issued work has run.
ncclResult_t ncclCommFinalize(ncclComm_t handle) {
    return nccl_call([&](Runtime& r) {
        ncclComm& communicator = checked(handle);
        const auto all_ran = [&r, &communicator] {
            if (communicator.done == communicator.issued || communicator.aborted) return true;
            if (communicator.error == ncclSuccess) r.streams.step();
            return communicator.error != ncclSuccess;
        };
        return perform(r, communicator, all_ran, "ncclCommFinalize");
    });
}

ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    const ncclResult_t result = ncclCommFinalize(handle);
    if (result == ncclInProgress) {
        for (ncclResult_t state = ncclInProgress; state == ncclInProgress;)
            ncclCommGetAsyncError(handle, &state);
    }
    return nccl_call([&](Runtime& r) {
        ncclComm& communicator = checked(handle);
        communicator.destroyed = true;
        r.remove_communicator(communicator.device);
        communicator.sockets.clear();
        return ncclSuccess;
    });
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
    return nccl_call(
        [&](Runtime& r) {
            ncclComm& communicator = checked(handle);
            communicator.aborted = communicator.destroyed = true;
            r.remove_communicator(communicator.device);
            communicator.in_flight = nullptr;
            communicator.sockets.clear();  // the peers notice
            return ncclSuccess;
        },
        false);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
    return nccl_call(
        [&](Runtime&) {
            ncclComm& communicator = checked(handle);
            const int before = std::exchange(current_device(), communicator.device);  // for any calling
                                                                                      // thread
            if (communicator.in_flight && communicator.in_flight()) communicator.in_flight = nullptr;
            current_device() = before;
            *state = communicator.in_flight ? ncclInProgress : communicator.error;
            return ncclSuccess;
        },
        false);
}

ncclResult_t ncclCommCount(const ncclComm_t handle, int* count) {
    return nccl_call([&](Runtime&) {
        *count = checked(handle).size;
        return ncclSuccess;
    });
}

ncclResult_t ncclCommUserRank(const ncclComm_t handle, int* rank) {
    return nccl_call([&](Runtime&) {
        *rank = checked(handle).rank;
        return ncclSuccess;
    });
}

ncclResult_t ncclCommCuDevice(const ncclComm_t handle, int* device) {
    return nccl_call([&](Runtime&) {
        *device = checked(handle).device;
        return ncclSuccess;
    });
}
