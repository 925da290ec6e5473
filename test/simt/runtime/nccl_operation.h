// One collective of the tests' NCCL, or a group of sends and receives: which data goes to which rank, and how
// arriving data is used. Sums go around the ring as NCCL's do. Part p of n begins with rank p + 1 and ends
// with rank p, rounded to the dtype at every step.
#pragma once

#include <nccl.h>

#include <chrono>
#include <string>
#include <vector>

#include "simt/runtime/accesses.h"
#include "simt/runtime/nccl_mesh.h"

namespace simt::runtime {

enum class Collective { all_reduce, reduce_scatter, all_gather, broadcast, point_to_point };

// One call.
struct Call {
    Collective kind;
    const std::byte* send;  // null: only receives
    std::byte* recv;        // null: only sends
    std::size_t count;      // as given in the call
    ncclDataType_t type;
    ncclRedOp_t op = ncclSum;
    int peer = 0;  // or the root
};

std::size_t bytes_of(ncclDataType_t type);  // 0 if the type is not known here
bool adds(ncclDataType_t type);             // whether it can be summed here
std::string name_of(const Call& call);      // "ncclAllReduce of 12 float32"
std::vector<Access> accesses_of(const Call& call, int rank, int size);

// The description of a call that ranks exchange, so that calls that do not match are found.
struct Header {
    Collective kind;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;
    std::uint64_t count;
    std::uint64_t order;  // among all collectives of these two processes

    bool operator==(const Header&) const = default;
};

// Calls that run together: one collective, or sends and receives.
class Operation {
  public:
    // `orders`: by rank, the collective's number among those with that rank's process.
    Operation(std::vector<Call> calls, int rank, std::vector<std::uint64_t> orders);
    Operation(const Operation&) = delete;
    Operation& operator=(const Operation&) = delete;

    // Progresses; returns true when it is done. Throws PeerGone. Ends the process if the peers are in another
    // call.
    bool run(const std::vector<Socket>& sockets);

    const Call& first() const { return calls_.front(); }
    std::string waits_for() const;  // the ranks

  private:
    struct Arrival {
        const Call* call;
        int peer;
        Header header;
        std::size_t message;  // the one that brings it
    };
    void meet();
    void begin();
    void send(const Call& call, int peer, const std::byte* data, std::size_t bytes);
    void receive(const Call& call, int peer, std::byte* data, std::size_t bytes);
    Header header_of(const Call& call, int peer) const;
    void check_headers() const;
    void finish() const;

    std::vector<Call> calls_;
    int rank_;
    std::vector<std::uint64_t> orders_;
    enum class Phase { turn, rendezvous, moving };
    Phase phase_ = Phase::turn;
    std::vector<std::byte> arrived_;  // data of the others, by rank
    std::vector<Header> sent_;
    std::vector<Arrival> arrivals_;
    std::vector<Message> messages_;
};

}  // namespace simt::runtime
