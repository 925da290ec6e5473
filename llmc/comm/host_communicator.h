// The communicator of the CPU's data: collectives over the messages of a Transport that are deterministic to the bit,
// send exactly the bytes they count, and never wait without a limit.
//
// Every collective is a direct exchange: each rank sends to every other what that one needs and nothing else,
// so a rank that does not answer is named by those who wait for it. Not thread-safe: one thread of a process
// communicates at a time. A rank that waits longer than the time limit ends the job with one line on standard error.
// MPI's own errors and disagreements of ranks on a size are ProgrammingErrors.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <vector>

#include "llmc/comm/communicator.h"

namespace llmc {

struct ExchangeOptions;
class Exchange;
class Transport;
class Watchdog;

class HostCommunicator final : public Communicator {
  public:
    // All ranks of the job. The transport must outlive all communicators (comm/bootstrap.h holds it and the world).
    HostCommunicator(Transport& transport, const ExchangeOptions& options);

    // Bytes of memory with which sums over `size` ranks run at full speed.
    static std::size_t staging_bytes(int size);
    // Where pieces of other ranks arrive before they are added. Any dtype, aligned to 8 bytes, as large on
    // every rank of the job, alive as long as it is in use. Serves this communicator and all that come from
    // the same world by split. Until it is given, a few KiB of their own do, enough for the sums of scalars.
    // The results do not depend on its size.
    void set_staging(const Tensor& staging);
    // The time limit of one wait, for the same communicators.
    void set_timeout(std::chrono::duration<double> timeout);
    // With the same limit, of waits for other ranks that are not for messages. It is of no use after the communicators.
    Watchdog watchdog() const;

    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(ranks_.size()); }

    void reduce_scatter(const Tensor& recv, const Tensor& send) override;
    void all_gather(const Tensor& recv, const Tensor& send) override;
    // fp32, bf16 or fp64. With n elements of e bytes and r = n mod size, sends (size-1) (2 (n-r)/size + r) e
    // bytes: the ragged end goes whole to every rank, which adds it itself, in the same order.
    void all_reduce(const Tensor& x) override;
    // The root sends (size-1) times the bytes of x, the others nothing.
    void broadcast(const Tensor& x, int root) override;

    // Not to the rank itself.
    void send(const Tensor& x, int to) override;
    void recv(const Tensor& x, int from) override;
    void group_begin() override;
    void group_end() override;

    int start_send(const Tensor& x, int to) override;
    int start_recv(const Tensor& x, int from) override;
    bool is_done(int transfer) override;

    // Sends messages of no bytes.
    void barrier() override;

    // An all_gather of three int32 a rank, and counted as such.
    std::unique_ptr<Communicator> split(int color, int key) override;

  private:
    enum class Channel {
        all_reduce,
        reduce_scatter,
        all_gather,
        broadcast,
        point_to_point,
        transfer,
        barrier
    };
    // What the communicators of one job share.
    struct Shared;
    // A send or recv that waits for the end of its group.
    struct Deferred {
        CallKind kind;
        Tensor x;
        int peer;
    };

    HostCommunicator(std::shared_ptr<Shared> shared, std::vector<int> ranks, int rank, int context);

    Exchange& begin(Channel channel, std::string_view call, std::size_t slot = 0);
    int world_rank(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
    void check_collective(std::string_view call) const;
    std::uint64_t sum_pieces(Channel channel, const Tensor& out, const std::byte* pieces, std::size_t stride);
    std::uint64_t gather_parts(Channel channel, const Tensor& recv, const Tensor& send);
    void point_to_point(CallKind kind, const Tensor& x, int peer);
    void check_peer(int peer) const;
    int start_transfer(CallKind kind, const Tensor& x, int peer);

    std::shared_ptr<Shared> shared_;
    std::vector<int> ranks_;  // of the job
    int rank_;
    std::vector<int>
        peers_;    // the other ranks, beginning with the next one, so that not all write to the same
    int context_;  // keeps this communicator's messages apart from those of others with the same ranks
    bool grouping_ = false;
    std::vector<Deferred> group_;
};

}  // namespace llmc
