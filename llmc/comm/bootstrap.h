// How a process joins the job: the start and end of MPI, the world of all ranks, and what this process may use of
// the machine it shares with other ranks.
#pragma once

#include <bitset>
#include <memory>
#include <span>
#include <string_view>

#include "llmc/comm/exchange.h"
#include "llmc/comm/host_communicator.h"

namespace llmc {

// The cores a process may run on, by number.
using CoreMask = std::bitset<8192>;

// How many cores the process `rank` may count as its own, given the masks of all ranks on its machine: a core
// that several may use is shared out equally among them. At least 1.
int share_of_cores(std::span<const CoreMask> masks, int rank);

// This process as one of the job. At its end all ranks meet once more, so what a rank cannot go on from must
// be caught inside its life and given to fail().
class Job {
  public:
    explicit Job(const ExchangeOptions& options = {});
    ~Job();
    Job(const Job&) = delete;
    Job& operator=(const Job&) = delete;

    HostCommunicator& world() { return *world_; }

    // Among the ranks on this machine, in the order of their ranks.
    int local_rank() const { return local_rank_; }
    int local_size() const { return local_size_; }
    // Share of the cores: how many threads to compute with, unless the user says otherwise.
    int cores() const { return cores_; }

    // Prints `error: what` once and ends the whole job with status 1, however many ranks call it, one or all.
    [[noreturn]] void fail(std::string_view what) const;

    // Ends the whole job with a status that is not 0, silently: of processes that return one mpirun prints a
    // banner, and one line more for each. All ranks call it, with nothing left to write.
    [[noreturn]] void end(int status) const;

  private:
    bool speaks_of_failures() const;

    std::unique_ptr<HostCommunicator> world_;
    int local_rank_ = 0;
    int local_size_ = 1;
    int cores_ = 1;
};

}  // namespace llmc
