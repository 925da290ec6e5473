// NCCL's collectives, sends and receives. Each is queued in its stream. When its turn comes, it processes
// what its peers have sent until everything is there, without blocking other streams. As in NCCL, the calls
// of one communicator run one after another, whatever their streams.
#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "simt/runtime/nccl_library.h"
#include "simt/runtime/nccl_operation.h"

namespace {

using namespace simt::runtime;
using std::chrono::steady_clock;

// The group that ncclGroupStart opened on this thread.
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

// In place, as NCCL defines it, or without overlap.
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
    if (!in_place && !apart)
        stop(name_of(call) + ": its buffers overlap, but not in the way of an in-place call");
}

// Enqueues the calls of one communicator as one operation: a collective, or sends and receives.
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
    r.counts.communicates(r.streams.get(stream).priority);
    // Ended with the work that it is part of.
    const std::shared_ptr<void> in_flight(nullptr, [&r](void*) { --r.nccl_in_flight; });
    ++r.nccl_in_flight;
    Multiprocessors& on = r.multiprocessors(communicator.device);
    const auto share = std::make_shared<std::optional<Multiprocessors::Share>>();
    const auto why = [&communicator, operation, turn, share]() -> std::string {
        if (communicator.done < turn) return "its turn in the communicator";
        if (*share && !(*share)->take()) return "free multiprocessors";
        return operation->waits_for().empty() ? "" : "rank " + operation->waits_for();
    };
    const auto run = [&r, &communicator, &on, why, operation, turn, in_flight, share,
                      since = steady_clock::time_point{}]() mutable {
        if (communicator.aborted) return true;
        if (communicator.done < turn) return false;
        if (!*share) {
            share->emplace(on, communicator.size > 1 ? communicator.blocks_of_kernels : 0);
            r.counts.wants(on.wanted());
        }
        if (since == steady_clock::time_point{}) {
            since = steady_clock::now();
            if (r.is_struck("nccl")) {
                communicator.error = ncclSystemError;
                communicator.last_error = "the simulated network failed";
            }
        }
        bool done = false;
        try {
            done =
                communicator.error == ncclSuccess && (*share)->take() && operation->run(communicator.sockets);
        } catch (const PeerGone& fault) {
            communicator.error = ncclRemoteError;
            communicator.last_error = fault.what();
        }
        if (done) ++communicator.done;
        const double seconds = std::chrono::duration<double>(steady_clock::now() - since).count();
        if (!done && seconds > r.settings.nccl_seconds) {
            stop("rank " + std::to_string(communicator.rank) + " of " + std::to_string(communicator.size) +
                 " still waits in " + name_of(operation->first()) + " for " + why() + " after " +
                 std::to_string(static_cast<int>(seconds)) + " seconds:" + r.streams.standing());
        }
        return done;
    };
    r.streams.add(stream, name_of(calls.front()), run, accesses, why);
}

// Enqueues the calls of a group, or a single call, for one communicator.
void enqueue_all(Runtime& r, ncclComm& communicator, const std::vector<Group::Member>& members) {
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
            enqueue_all(r, communicator, members);
        } else {
            communicator.in_flight = [&r, &communicator, members] {
                enqueue_all(r, communicator, members);
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
        if (communicator.in_flight) {
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
