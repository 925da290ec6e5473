// The communicator for CPU data: collectives over the messages of a Transport. Results are deterministic to
// the bit, exactly the counted bytes are sent, and every wait has a limit.
//
// Every collective is a direct exchange: each rank sends to every other rank exactly the data that it needs.
// The ranks that wait for a silent rank can therefore name it. Not thread-safe: one thread of a process
// communicates at a time. A rank that waits longer than the time limit ends the job with one line on standard
// error. Errors of MPI, and ranks that disagree on a size, are ProgrammingErrors.
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
    // A group of all ranks of the job. The transport must outlive all communicators (Job in comm/bootstrap.h
    // owns both).
    HostCommunicator(Transport& transport, const ExchangeOptions& options);

    // Bytes of staging memory for full speed of sums over `size` ranks.
    static std::size_t staging_bytes(int size);
    // Sets the memory that receives pieces of other ranks before they are added: any dtype, aligned to 8
    // bytes, the same size on every rank of the job. It must live until other memory is set. All communicators
    // of the same world share it. Without any, as before the first call and after one with an empty tensor, they use a
    // few KiB of their own, enough for sums of scalars. Results do not depend on its size.
    void set_staging(const Tensor& staging);
    // Sets the time limit of one wait, for the same communicators. `advice` names another possible cause if it is
    // exceeded.
    void set_timeout(std::chrono::duration<double> timeout, std::string advice = {});
    // A watchdog with the same limit, for waits for other ranks that need no message, such as waits for a
    // GPU. Do not use it after the communicators are gone.
    Watchdog watchdog() const;

    int rank() const override { return rank_; }
    int size() const override { return static_cast<int>(ranks_.size()); }

    void reduce_scatter(const Tensor& recv, const Tensor& send) override;
    void all_gather(const Tensor& recv, const Tensor& send) override;
    // fp32, bf16 or fp64. With n elements of e bytes and r = n mod size, sends (size-1) (2 (n-r)/size + r) e
    // bytes. Every rank receives the r remaining elements of all ranks and adds them itself, in the same
    // order.
    void all_reduce(const Tensor& x) override;
    void maximum(const Tensor& x) override;
    // The root sends (size-1) times the bytes of x; the others send nothing.
    void broadcast(const Tensor& x, int root) override;

    // `to` and `from` are other ranks.
    void send(const Tensor& x, int to) override;
    void recv(const Tensor& x, int from) override;
    void group_begin() override;
    void group_end() override;

    int start_send(const Tensor& x, int to) override;
    int start_recv(const Tensor& x, int from) override;
    bool is_done(int transfer) override;

    // Exchanges messages of zero bytes.
    void barrier() override;

    // Uses an all_gather of three int32 per rank, which is counted as such.
    std::unique_ptr<Communicator> split(int color, int key, bool only_sends = false) override;

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
    // State that the communicators of one job share.
    struct Shared;
    // A send or recv that group_end will perform.
    struct Deferred {
        CallKind kind;
        Tensor x;
        int peer;
    };

    HostCommunicator(std::shared_ptr<Shared> shared, std::vector<int> ranks, int rank, int context);

    Exchange& begin(Channel channel, std::string_view call, std::size_t slot = 0);
    int world_rank(int rank) const { return ranks_[static_cast<std::size_t>(rank)]; }
    void check_collective(std::string_view call) const;
    void reduce(const Tensor& x);
    std::uint64_t sum_pieces(Channel channel, const Tensor& out, const std::byte* pieces, std::size_t stride);
    std::uint64_t gather_parts(Channel channel, const Tensor& recv, const Tensor& send);
    void point_to_point(CallKind kind, const Tensor& x, int peer);
    void check_peer(int peer) const;
    int start_transfer(CallKind kind, const Tensor& x, int peer);

    std::shared_ptr<Shared> shared_;
    std::vector<int> ranks_;  // this communicator's ranks, by their numbers in the job
    int rank_;
    // The other ranks, beginning with the next one, so that the ranks do not all send to the same one first.
    std::vector<int> peers_;
    // Separates this communicator's messages from those of other communicators of the same ranks.
    int context_;
    bool grouping_ = false;
    std::vector<Deferred> group_;
};

}  // namespace llmc
