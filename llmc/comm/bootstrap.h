// How a process joins the job, over MPI or TCP, as it was started (start.h); the world of all ranks, and what this
// process may use of the machine it shares with other ranks.
#pragma once

#include <bitset>
#include <memory>
#include <span>
#include <string_view>

#include "llmc/comm/exchange.h"
#include "llmc/comm/host_communicator.h"

namespace llmc {

struct Start;
class Transport;

// The cores a process may run on, by number.
using CoreMask = std::bitset<8192>;

// How many cores the process `rank` may count as its own, given the masks of all ranks on its machine: a core
// that several may use is shared out equally among them. At least 1.
int share_of_cores(std::span<const CoreMask> masks, int rank);

// This process as one of the job. At its end all ranks meet once more, so what a rank cannot go on from must
// be caught inside its life and given to fail().
class Job {
  public:
    // Where the processes do not find each other, one of them prints a line that begins with `error: `, and they exit
    // with status 1.
    explicit Job(const ExchangeOptions& options = {});
    ~Job();
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    HostCommunicator& world() { return *world_; }
    Transport& transport() { return *transport_; }

    // Among the ranks on this machine, in the order of their ranks.
    int local_rank() const { return local_rank_; }
    int local_size() const { return local_size_; }
    // Share of the cores: how many threads to compute with, unless the user says otherwise.
    int cores() const { return cores_; }

    // Prints `error: what` once and ends the whole job with status 1, however many ranks call it, one or all.
    [[noreturn]] void fail(std::string_view what) const;

    // Ends the whole job with a status that is not 0, silently. All ranks call it, with nothing left to write.
    [[noreturn]] void end(int status) const;

  private:
    void find_place(const Start& start);

    std::unique_ptr<Transport> transport_;
    std::unique_ptr<HostCommunicator> world_;
    int local_rank_ = 0;
    int local_size_ = 1;
    int cores_ = 1;
};

}  // namespace llmc
