// How processes talk: a group of ranks and the collectives over it. MPI carries the CPU's data
// (comm/host_communicator.h).
//
// - Every rank of the group issues the same calls in the same order.
// - Sums are deterministic: the same call on the same ranks gives the same bits. The host's (HostCommunicator) add
//   element by element, as a tree of adjacent pairs ((0+1)+(2+3))+..., whatever the size of the buffer; each sum of two
//   is rounded to the elements' dtype, so that sums of groups of 2^k ranks, summed in turn, are the sum over all; NCCL's go in the order that it chooses for the ranks' topology.
// - In place, as NCCL has it: reduce_scatter when `recv` is the rank's own part of `send`, all_gather when `send`
//   is the rank's own part of `recv`, all_reduce and broadcast when both are the same memory.
// - A peer that is dead or stuck ends the job with one message within the watchdog's limit; no rank hangs.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "llmc/core/tensor.h"

namespace llmc {

enum class CallKind { all_reduce, reduce_scatter, all_gather, broadcast, send, recv };
inline constexpr std::array all_call_kinds = {CallKind::all_reduce, CallKind::reduce_scatter,
                                              CallKind::all_gather, CallKind::broadcast,
                                              CallKind::send,       CallKind::recv};
std::string_view name_of(CallKind kind);

// What one rank sent (received, for recv), in payload bytes and calls.
struct Traffic {
    std::uint64_t calls = 0;
    std::uint64_t bytes = 0;
};

// What a rank sends of an all_reduce of so many bytes: of a reduce_scatter and an all_gather; what does not divide goes whole
// to every rank.
constexpr std::uint64_t all_reduce_bytes(std::uint64_t bytes, std::uint64_t element, std::uint64_t ranks) {
    const std::uint64_t elements = bytes / element, rest = elements % ranks;
    return (ranks - 1) * (2 * (elements - rest) / ranks + rest) * element;
}

class Communicator {
  public:
    virtual ~Communicator() = default;

    virtual int rank() const = 0;
    virtual int size() const = 0;

    // recv = the rank's own 1/size of the sum over ranks of send.   send fp32, bf16 or fp64 (n), recv (n/size).
    // Sends (size-1)/size of the bytes of `send`.
    virtual void reduce_scatter(const Tensor& recv, const Tensor& send) = 0;
    // recv = the ranks' sends one after the other.   send (n), recv (n*size), any dtype. Sends (size-1) times its
    // bytes.
    virtual void all_gather(const Tensor& recv, const Tensor& send) = 0;
    // x = the sum over ranks of x. Any number of elements; reduce_scatter then all_gather where size divides it.
    virtual void all_reduce(const Tensor& x) = 0;
    // x of every rank = x of `root`. Any dtype.
    virtual void broadcast(const Tensor& x, int root) = 0;

    // Point to point, any dtype. Between group_begin and group_end calls are only collected; group_end
    // performs them at once, so that two ranks that send to each other do not deadlock.
    virtual void send(const Tensor& x, int to) = 0;
    virtual void recv(const Tensor& x, int from) = 0;
    virtual void group_begin() = 0;
    virtual void group_end() = 0;

    // The same without waiting: `x` must stay as it is until the transfer is done, of which the result is the number.
    // Transfers to, or from, one peer go in the order in which they were started.
    virtual int start_send(const Tensor& x, int to) = 0;
    virtual int start_recv(const Tensor& x, int from) = 0;
    // To be asked until it is true, and then no more. (A device's queues order what they are given: there a transfer is
    // done for the host as soon as it was given.)
    virtual bool is_done(int transfer) = 0;

    virtual void barrier() = 0;

    // The ranks that give the same color form a new group, ordered by key, then by rank. With a negative color a rank is in
    // none, and receives null.
    virtual std::unique_ptr<Communicator> split(int color, int key) = 0;

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
