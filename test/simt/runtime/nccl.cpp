// NCCL's functions. Every call is queued in its stream; when its turn comes it goes on with what its peers have sent,
// without holding up other streams, until all is there. The calls of one communicator run one after the other,
// whatever their streams, as NCCL's do.
//
// A communicator that does not block (ncclConfig_t::blocking = 0) answers ncclInProgress, and goes on when it is asked
// for its state: until then what it was given is not even queued, and another call is refused.
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <thread>

#include "simt/runtime/nccl_operation.h"
#include "simt/runtime/runtime.h"

using namespace simt::runtime;

struct ncclComm {
    int rank = 0, size = 1, device = 0;
    bool blocks = true;
    std::string id;  // its splits are named after it
    std::vector<Socket> sockets;
    std::vector<std::uint64_t> processes;  // by rank

    std::uint64_t issued = 0, done = 0;  // operations
    int splits = 0;
    bool aborted = false, destroyed = false;
    ncclResult_t error = ncclSuccess;
    std::string last_error;
    // What is under way where it does not block: true when it is done.
    std::function<bool()> under_way = nullptr;
};

namespace {

using Clock = std::chrono::steady_clock;

struct Library {
    std::vector<std::unique_ptr<ncclComm>> communicators;  // kept, so that a destroyed one is known
    // By process: collectives issued with it.
    std::map<std::uint64_t, std::uint64_t> collectives_with;
    std::uint64_t process = (std::uint64_t{std::random_device{}()} << 32) | std::random_device{}();
    std::string last_error;
};

Library& library() {
    static Library& instance = *new Library;
    return instance;
}

// What ncclGroupStart began, on this thread.
struct Group {
    struct Member {
        ncclComm* communicator;
        Call call;
        cudaStream_t stream;
    };
    int depth = 0;
    std::vector<Member> members;
};

Group& group() {
    thread_local Group instance;
    return instance;
}

ncclResult_t refuse(ncclResult_t result, const std::string& why) {
    library().last_error = why;
    return result;
}

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

ncclComm& checked(ncclComm_t handle) {
    for (const auto& communicator : library().communicators) {
        if (communicator.get() != handle) continue;
        if (communicator->destroyed) stop("an NCCL communicator was destroyed and is used");
        return *communicator;
    }
    stop("an ncclComm_t that no communicator has");
}

// Until `step` is true. Others may call meanwhile.
void wait_for(Runtime& r, const std::function<bool()>& step, const std::function<std::string()>& what) {
    const auto start = Clock::now();
    while (!step()) {
        if (std::chrono::duration<double>(Clock::now() - start).count() > r.settings.nccl_seconds) {
            stop(what() + " since " + std::to_string(static_cast<int>(r.settings.nccl_seconds)) + " seconds");
        }
        r.mutex.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        r.mutex.lock();
    }
}

// Performs `step` now where the communicator blocks, and else when its state is asked for.
ncclResult_t perform(Runtime& r, ncclComm& communicator, std::function<bool()> step,
                     const std::string& what) {
    if (!communicator.blocks) {
        communicator.under_way = std::move(step);
        return ncclInProgress;
    }
    wait_for(r, step, [&] {
        return "rank " + std::to_string(communicator.rank) + " of " + std::to_string(communicator.size) +
               " waits in " + what;
    });
    return communicator.error;
}

// ---- communicators ----

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

// Two ranks with one GPU are refused, unless each says that it is a machine of its own.
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

// The ranks of `mesh` with this color, by key.
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
    // A peer may wait for what this process has queued while it does something else.
    if (communicator.size > 1) runtime().streams.run_in_background();
}

ncclComm& create(const std::string& id, int size, int rank, bool blocks) {
    ncclComm& made = *library().communicators.emplace_back(std::make_unique<ncclComm>());
    made.rank = rank;
    made.size = size;
    made.device = current_device();
    made.blocks = blocks;
    made.id = id;
    return made;
}

bool is_blocking(const ncclConfig_t* config, bool otherwise) {
    return config && config->blocking != NCCL_CONFIG_UNDEF_INT ? config->blocking != 0 : otherwise;
}

// ---- calls ----

std::string why_wrong(const Memory& memory, const Call& call, const ncclComm& communicator) {
    if (bytes_of(call.type) == 0) return "a data type that is not supported here";
    const bool sums = call.kind == Collective::all_reduce || call.kind == Collective::reduce_scatter;
    if (sums && (!adds(call.type) || call.op < ncclSum || call.op > ncclAvg))
        return "a sum that is not supported here";
    if (call.peer < 0 || call.peer >= communicator.size)
        return "a peer or root that is not in the communicator";
    if (call.kind == Collective::point_to_point && call.peer == communicator.rank)
        return "a peer that is itself";
    for (const Access& access : accesses_of(call, communicator.rank, communicator.size)) {
        if (access.bytes == 0) continue;
        if (!memory.block_of(access.begin) || !memory.is_one_piece(access.begin, access.bytes)) {
            stop(name_of(call) + ": a buffer is not, or not wholly, in allocated memory");
        }
    }
    return "";
}

// In place as NCCL has it, or apart.
void check_overlap(const Call& call, const ncclComm& communicator) {
    if (call.kind == Collective::point_to_point || !call.send) return;
    const std::size_t part = call.count * bytes_of(call.type),
                      own = part * static_cast<std::size_t>(communicator.rank);
    const std::size_t whole = part * static_cast<std::size_t>(communicator.size);
    const std::size_t sent = call.kind == Collective::reduce_scatter ? whole : part;
    const std::size_t received = call.kind == Collective::all_gather ? whole : part;
    const bool in_place = call.kind == Collective::reduce_scatter ? call.recv == call.send + own
                          : call.kind == Collective::all_gather   ? call.send == call.recv + own
                                                                  : call.send == call.recv;
    const bool apart = call.send + sent <= call.recv || call.recv + received <= call.send;
    if (!in_place && !apart) stop(name_of(call) + ": its buffers overlap, and not as in place");
}

// Queues calls of one communicator as one operation: a collective, or sends and receives.
void queue(Runtime& r, ncclComm& communicator, const std::vector<Call>& calls, cudaStream_t stream) {
    std::vector<std::uint64_t> orders(static_cast<std::size_t>(communicator.size));
    for (std::size_t rank = 0; rank < orders.size(); ++rank) {
        const bool counts =
            calls.front().kind != Collective::point_to_point && static_cast<int>(rank) != communicator.rank;
        if (counts) orders[rank] = ++library().collectives_with[communicator.processes[rank]];
    }
    std::vector<Access> accesses;
    for (const Call& call : calls) {
        for (const Access& access : accesses_of(call, communicator.rank, communicator.size))
            accesses.push_back(access);
    }
    const auto operation = std::make_shared<Operation>(calls, communicator.rank, std::move(orders));
    const std::uint64_t turn = communicator.issued++;
    const auto run = [&r, &communicator, operation, turn, since = Clock::time_point{}]() mutable {
        if (communicator.aborted) return true;
        if (communicator.done < turn) return false;
        if (since == Clock::time_point{}) since = Clock::now();
        bool done = false;
        try {
            done = communicator.error == ncclSuccess && operation->run(communicator.sockets);
        } catch (const PeerGone& fault) {
            communicator.error = ncclRemoteError;
            communicator.last_error = fault.what();
        }
        if (done) ++communicator.done;
        const double seconds = std::chrono::duration<double>(Clock::now() - since).count();
        if (!done && seconds > r.settings.nccl_seconds) {
            stop("rank " + std::to_string(communicator.rank) + " of " + std::to_string(communicator.size) +
                 " waits in " + name_of(operation->first()) + " for rank " + operation->waits_for() +
                 " since " + std::to_string(static_cast<int>(seconds)) + " seconds");
        }
        return done;
    };
    r.streams.add(stream, name_of(calls.front()), run, accesses);
}

// What a group holds, or one call, of one communicator.
void queue_all(Runtime& r, ncclComm& communicator, const std::vector<Group::Member>& members) {
    std::vector<Call> together;
    const auto flush = [&](cudaStream_t stream) {
        if (!together.empty()) queue(r, communicator, together, stream);
        together.clear();
    };
    for (const Group::Member& member : members) {
        if (member.communicator != &communicator) continue;
        if (member.stream != members.front().stream) stop("NCCL: calls of a group are in several streams");
        const bool collective = member.call.kind != Collective::point_to_point;
        if (collective) flush(member.stream);
        together.push_back(member.call);
        if (collective) flush(member.stream);
    }
    flush(members.front().stream);
}

ncclResult_t end_group(Runtime& r) {
    const std::vector<Group::Member> members = std::exchange(group().members, {});
    ncclResult_t result = ncclSuccess;
    std::vector<ncclComm*> seen;
    for (const Group::Member& member : members) {
        ncclComm& communicator = *member.communicator;
        if (std::ranges::find(seen, &communicator) != seen.end()) continue;
        seen.push_back(&communicator);
        if (communicator.blocks) {
            queue_all(r, communicator, members);
        } else {
            communicator.under_way = [&r, &communicator, members] {
                queue_all(r, communicator, members);
                return true;
            };
            result = ncclInProgress;
        }
    }
    return result;
}

ncclResult_t call(ncclComm_t handle, const Call& call, cudaStream_t stream) {
    return nccl_call([&](Runtime& r) {
        ncclComm& communicator = checked(handle);
        if (communicator.under_way) {
            return refuse(ncclInvalidArgument, "the communicator's last call is still in progress");
        }
        if (communicator.error != ncclSuccess) return communicator.error;
        if (const std::string why = why_wrong(r.memory, call, communicator); !why.empty()) {
            return refuse(ncclInvalidArgument, name_of(call) + ": " + why);
        }
        check_overlap(call, communicator);
        group().members.push_back({&communicator, call, stream});
        return group().depth == 0 ? end_group(r) : ncclSuccess;
    });
}

const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }
std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }

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
        ncclComm& made = create(id.internal, size, rank, is_blocking(config, true));
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
        if (parent.under_way)
            return refuse(ncclInvalidArgument, "the communicator's last call is still in progress");
        char id[17];
        const std::string path = parent.id + "/" + std::to_string(parent.splits++);
        std::snprintf(id, sizeof(id), "%016llx", static_cast<unsigned long long>(hash(path)));
        const auto mesh = std::make_shared<Mesh>(id, own_hello(parent.rank, color, key), parent.size);
        *made = nullptr;
        // The parent is what is in progress, and the new one is known when it has succeeded.
        const auto connect = [&parent, mesh, color, made,
                              config_blocks = is_blocking(config, parent.blocks)] {
            if (!mesh->connect()) return false;
            if (color == NCCL_SPLIT_NOCOLOR) return true;
            ncclComm& child = create(mesh->id(), parent.size, parent.rank, config_blocks);
            take_members(child, *mesh, color);
            *made = &child;
            return true;
        };
        return perform(r, parent, connect, "ncclCommSplit");
    });
}

// Until all that was issued has run.
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
    return nccl_call([&](Runtime&) {
        ncclComm& communicator = checked(handle);
        communicator.destroyed = true;
        communicator.sockets.clear();
        return ncclSuccess;
    });
}

ncclResult_t ncclCommAbort(ncclComm_t handle) {
    return nccl_call(
        [&](Runtime&) {
            ncclComm& communicator = checked(handle);
            communicator.aborted = communicator.destroyed = true;
            communicator.under_way = nullptr;
            communicator.sockets.clear();  // the peers notice
            return ncclSuccess;
        },
        false);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
    return nccl_call(
        [&](Runtime&) {
            ncclComm& communicator = checked(handle);
            const int before = std::exchange(current_device(), communicator.device);  // whatever thread asks
            if (communicator.under_way && communicator.under_way()) communicator.under_way = nullptr;
            current_device() = before;
            *state = communicator.under_way ? ncclInProgress : communicator.error;
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

// ---- calls ----

ncclResult_t ncclAllReduce(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
    return call(handle, {Collective::all_reduce, bytes(send), bytes(recv), count, type, op}, stream);
}

ncclResult_t ncclReduceScatter(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t handle, cudaStream_t stream) {
    return call(handle, {Collective::reduce_scatter, bytes(send), bytes(recv), count, type, op}, stream);
}

ncclResult_t ncclAllGather(const void* send, void* recv, std::size_t count, ncclDataType_t type,
                           ncclComm_t handle, cudaStream_t stream) {
    return call(handle, {Collective::all_gather, bytes(send), bytes(recv), count, type}, stream);
}

ncclResult_t ncclBroadcast(const void* send, void* recv, std::size_t count, ncclDataType_t type, int root,
                           ncclComm_t handle, cudaStream_t stream) {
    return call(handle, {Collective::broadcast, bytes(send), bytes(recv), count, type, ncclSum, root},
                stream);
}

ncclResult_t ncclSend(const void* send, std::size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
    return call(handle, {Collective::point_to_point, bytes(send), nullptr, count, type, ncclSum, peer},
                stream);
}

ncclResult_t ncclRecv(void* recv, std::size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
    return call(handle, {Collective::point_to_point, nullptr, bytes(recv), count, type, ncclSum, peer},
                stream);
}

ncclResult_t ncclGroupStart() {
    ++group().depth;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    return nccl_call([&](Runtime& r) {
        if (group().depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
        return --group().depth == 0 ? end_group(r) : ncclSuccess;
    });
}
