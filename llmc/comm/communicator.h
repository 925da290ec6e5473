// Communication between processes: a group of ranks and the collectives over it. HostCommunicator
// (host_communicator.h) is for CPU data; nccl/ is for GPU data.
//
// - Every rank of the group issues the same calls in the same order.
// - Sums are deterministic: the same call on the same ranks gives the same bits.
// - HostCommunicator adds element by element, as a tree of adjacent pairs ((0+1)+(2+3))+..., for buffers of
//   any size. Each sum of two is rounded to the elements' dtype. Sums of groups of 2^k ranks, summed in turn,
//   therefore equal the sum over all.
// - NCCL adds in an order that it chooses for the ranks' topology.
// - Calls may work in place, as in NCCL: reduce_scatter if `recv` is the rank's own part of `send`, and
//   all_gather if `send` is the rank's own part of `recv`. For all_reduce and broadcast both are then the
//   same memory.
// - A peer that is dead or stuck ends the job with one message within the watchdog's limit; no rank hangs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "llmc/core/tensor.h"
#include "llmc/core/text.h"

namespace llmc {

enum class CallKind { all_reduce, reduce_scatter, all_gather, broadcast, send, recv };
inline constexpr std::array all_call_kinds = {CallKind::all_reduce, CallKind::reduce_scatter,
                                              CallKind::all_gather, CallKind::broadcast,
                                              CallKind::send,       CallKind::recv};
constexpr std::string_view name_of(CallKind kind) {
    return name_among(kind, "all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "recv");
}

// The calls of one rank, and the payload bytes that it sent (for recv: received).
struct Traffic {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
};

// The bytes that a rank sends in an all_reduce of `bytes` bytes: a reduce_scatter and an all_gather. The
// remaining elements, fewer than `ranks`, are sent whole to every rank.
constexpr std::uint64_t all_reduce_bytes(std::uint64_t bytes, std::uint64_t element_bytes,
                                         std::uint64_t ranks) {
    const std::uint64_t elements = bytes / element_bytes, rest = elements % ranks;
    return (ranks - 1) * (2 * (elements - rest) / ranks + rest) * element_bytes;
}

class Communicator {
  public:
    virtual ~Communicator() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;

    // recv = the rank's own 1/size of the sum of `send` over ranks. send (n), recv (n/size): fp32, bf16 or
    // fp64. Sends (size-1)/size of the bytes of `send`.
    virtual void reduce_scatter(const Tensor& recv, const Tensor& send) = 0;
    // recv = the ranks' `send` tensors, concatenated. send (n), recv (n*size), any dtype. Sends (size-1)
    // times the bytes of `send`.
    virtual void all_gather(const Tensor& recv, const Tensor& send) = 0;
    // x = the sum of x over ranks. Any number of elements. If `size` divides their number, this is a
    // reduce_scatter and then an all_gather.
    virtual void all_reduce(const Tensor& x) = 0;
    // x = the greatest of x over ranks; int32. It counts as an all_reduce.
    virtual void maximum(const Tensor& x) = 0;
    // x of every rank = x of `root`. Any dtype.
    virtual void broadcast(const Tensor& x, int root) = 0;

    // Point to point, any dtype. Between group_begin and group_end, calls are only collected. group_end
    // performs them together, so that two ranks that send to each other do not deadlock.
    virtual void send(const Tensor& x, int to) = 0;
    virtual void recv(const Tensor& x, int from) = 0;
    virtual void group_begin() = 0;
    virtual void group_end() = 0;

    // Start a send or recv without waiting, and return the number of the transfer; `x` must not change until
    // it is done. Transfers to one peer go in the order in which they were started, and so do transfers from
    // one peer.
    virtual int start_send(const Tensor& x, int to) = 0;
    virtual int start_recv(const Tensor& x, int from) = 0;
    // Whether the transfer is done. Call it until it returns true, and then no more. (On a GPU a transfer
    // counts as done once it is queued, because the streams order their operations.)
    virtual bool is_done(int transfer) = 0;

    virtual void barrier() = 0;

    // Ranks with the same color form a new group, ordered by key, then by rank. A rank with a negative color
    // joins no group and receives null. A group that only sends and receives takes less of a GPU.
    virtual std::unique_ptr<Communicator> split(int color, int key, bool only_sends = false) = 0;

    const Traffic& traffic(CallKind kind) const { return traffic_[static_cast<std::size_t>(kind)]; }

  protected:
    void count(CallKind kind, std::uint64_t bytes) {
        Traffic& traffic = traffic_[static_cast<std::size_t>(kind)];
        traffic.calls += 1;
        traffic.bytes += bytes;
    }

  private:
    std::array<Traffic, all_call_kinds.size()> traffic_{};
};

}  // namespace llmc
